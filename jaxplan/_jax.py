"""The only file that touches jax's private modules, and what differs between the jax versions we support.

Every private name stands here with the versions it was run on.  Where two versions disagree, the callers see
one form:

- jaxprs: 0.10 has `ClosedJaxpr` around `Jaxpr`, 0.12 one class `Jaxpr`: `as_closed`;
- `scan`: 0.10 counts operands in `num_consts`, `num_carry`, 0.12 in the tree `ft_in`: `scan_signature`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax

# Run on jax 0.10.2, 0.11.2 and 0.12.0.1: what `jax.distributed.initialize` connected this process to.
from jax._src import distributed as _distributed

# Run on jax 0.10.2 and 0.12.0.1: the frames of a traceback that are not jax's.
from jax._src import source_info_util as _source_info_util

# Run on jax 0.10.2 and 0.12.0.1: how many frames of the user's traceback a lowered operation's location holds.
from jax._src.config import traceback_in_locations_limit as _traceback_in_locations_limit

# Run on jax 0.10.2 and 0.12.0.1: how many bits an element takes, sub-byte types included.
from jax._src.dtypes import itemsize_bits as _itemsize_bits

# Run on jax 0.10.2 and 0.12.0.1: the tables from primitive to lowering rule.
from jax._src.interpreters import mlir as _mlir

# Run on jax 0.10.2 and 0.12.0.1: an MLIR context that knows StableHLO, CHLO, MHLO and Shardy.
from jax._src.interpreters.mlir import make_ir_context as _make_ir_context

# Run on jax 0.10.2 and 0.12.0.1: MLIR's own Python bindings; jaxlib registers Shardy's passes with them.
from jax._src.lib.mlir import ir as ir
from jax._src.lib.mlir import passmanager as _passmanager
from jax.extend.core import ClosedJaxpr as ClosedJaxpr
from jax.extend.core import DropVar as DropVar
from jax.extend.core import Literal as Literal
from jax.extend.core import Primitive as Primitive
from jax.extend.core import Var as Var
from jax.extend.core import subjaxprs as _subjaxprs

# Run on jax 0.10.2 and 0.12.0.1: jax's own elimination of dead code.
from jax.interpreters.partial_eval import dce_jaxpr as _dce_jaxpr


class ScanSignature(NamedTuple):
    """What a `scan` equation does with its operands `[*consts, *carry, *xs]` and results `[*carry, *ys]`.

    Attributes:
      n_consts, n_carry: how many operands are constants of the loop, how many are its carry.
      length: iterations.
      jaxpr: the body, `[*consts, *carry, *x] -> [*carry, *y]`; read it with `as_closed`.
    """

    n_consts: int
    n_carry: int
    length: int
    jaxpr: Any


class JitSettings(NamedTuple):
    """What a `jax.jit` around a step says of its arguments; positions as they were given."""

    donate_argnums: tuple[int, ...] = ()
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()


def jit_settings(fn: Any) -> JitSettings:
    """The settings of a function that is under `jax.jit` already; none of any other."""
    info = getattr(fn, "_jit_info", None) if isinstance(fn, jax.stages.Wrapped) else None
    return JitSettings() if info is None else JitSettings(*(tuple(getattr(info, name)) for name in JitSettings._fields))


def scan_signature(eqn: Any) -> ScanSignature:
    """The signature of a `scan` equation, on every supported jax."""
    params = eqn.params
    if "num_carry" in params:  # jax 0.10
        n_consts, n_carry = params["num_consts"], params["num_carry"]
    else:  # jax 0.12: a tree of (consts, carry, xs), whose leaves are the operands in order
        n_consts, n_carry, _ = (len(part) for part in params["ft_in"].unpack())
    return ScanSignature(n_consts, n_carry, int(params["length"]), params["jaxpr"])


def with_constants(eqn: Any, equations: Sequence[Any], variables: Sequence[Any], operands: Sequence[Any]) -> Any:
    """A `scan` or `while` equation whose body has other `equations`, which read more constants: inside they are
    `variables`, outside `operands`; on every supported jax."""
    params, scanned = dict(eqn.params), eqn.primitive.name == "scan"
    name = "jaxpr" if scanned else "body_jaxpr"
    n_consts = scan_signature(eqn).n_consts if scanned else params["body_nconsts"]
    before = n_consts if scanned else n_consts + params["cond_nconsts"]
    body = params[name]
    jaxpr, _ = as_closed(body)
    invars = [*jaxpr.invars[:n_consts], *variables, *jaxpr.invars[n_consts:]]
    changed = jaxpr.replace(invars=invars, eqns=list(equations))
    params[name] = changed if jaxpr is body else body.replace(jaxpr=changed)
    if not scanned:
        params["body_nconsts"] += len(variables)
    elif "num_carry" in params:  # jax 0.10
        params["num_consts"] += len(variables)
    else:
        trees = importlib.import_module("jax._src.flattree")  # run on jax 0.12.0.1
        _, *others = params["ft_in"].unpack()
        params["ft_in"] = trees.pack((trees.nones(n_consts + len(variables)), *others))
    return eqn.replace(params=params, invars=[*eqn.invars[:before], *operands, *eqn.invars[before:]])


def as_closed(jaxpr: Any) -> tuple[Any, tuple[Any, ...]]:
    """`(jaxpr, consts)` of a `ClosedJaxpr` or a `Jaxpr`; `consts` go with `jaxpr.constvars`.

    An open `Jaxpr` (a `remat` body in jax 0.10) has no constants.
    """
    return getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ()))


def opened(closed: Any) -> tuple[Any, tuple[Any, ...]]:
    """An open `Jaxpr` that takes the constants of a `ClosedJaxpr` before its own arguments, and these."""
    jaxpr = closed.jaxpr
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]), tuple(closed.consts)


def without_dead_code(jaxpr: Any) -> Any:
    """A jaxpr without the equations that no result and no effect needs; its inputs stay."""
    return _dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def subjaxprs(jaxpr: Any) -> Iterator[Any]:
    """The jaxprs that stand in the parameters of `jaxpr`'s equations, one level down, in order."""
    yield from _subjaxprs(as_closed(jaxpr)[0])


class Frame(NamedTuple):
    """A line of a traceback: the file as Python knows it, the line, and the function's qualified name."""

    file: str
    line: int
    function: str


def frames_of(eqn: Any) -> Iterator[Frame]:
    """The lines that made an equation, innermost first, without jax's own; none where jax kept none."""
    traceback = eqn.source_info.traceback
    # Run on jax 0.10.2, 0.11.2 and 0.12.0.1.
    for frame in _source_info_util.user_frames(traceback):
        yield Frame(frame.file_name, frame.start_line, frame.function_name)


def coordination_client() -> Any:
    """The client of the key-value store that `jax.distributed.initialize` started; None before that.

    Its methods that are used: `key_value_increment`, `key_value_set_bytes`, `blocking_key_value_get_bytes` (which
    raises jax.errors.JaxRuntimeError, DEADLINE_EXCEEDED, when the time is up).
    """
    return _distributed.global_state.client


def dtype_bytes(dtype: Any) -> float:
    """Bytes of one element: 0.5 for int4, 1 for bool and fp8, 8 for a threefry key.

    Sub-byte types are counted packed, as XLA stores them on TPU and GPU; float0, the type of whole numbers'
    derivatives, takes nothing.
    """
    if dtype == jax.dtypes.float0:
        return 0.0
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return float(dtype.itemsize)
    return _itemsize_bits(jax.numpy.dtype(dtype)) / 8


def is_compile_only(device: Any) -> bool:
    """Whether `device` is one of a topology description: there to compile for, not to run on."""
    # Run on jax 0.10.2 and 0.12.0.1: such devices' client is a class of its own, which jax names nowhere publicly.
    return type(device.client).__name__ == "CompileOnlyPyClient"


def parse_module(text: str | bytes) -> Any:
    """A fresh MLIR module parsed from StableHLO text, or from bytecode: passes on it change nothing else."""
    context = _make_ir_context()
    with context:
        return ir.Module.parse(text, context=context)


# Run on jax 0.10.2: the type of a location that is a name, with `name_str`; where the bindings have no such type no
# location is of it.
NameLocation: Any = getattr(ir, "NameLoc", ())


def names_alone() -> contextlib.AbstractContextManager[None]:
    """Lower without source lines: locations hold the names of `jax.named_scope` and nothing else, which is faster.

    For modules that are only read for their names.
    """
    return cast("contextlib.AbstractContextManager[None]", _traceback_in_locations_limit(0))


def run_passes(module: Any, passes: Sequence[str]) -> None:
    """Run MLIR passes on `module` in place, each once, in order; a pass on functions says `func.func(...)`.

    The module is verified as it comes, not again after each pass: Shardy's propagation alone is thirty of them, and two
    thirds of its time would be spent on verifying what it made.

    Raises:
      The bindings' own `MLIRError` where the module is none, or a pass refuses it.
    """
    module.operation.verify()
    with module.context:
        manager = _passmanager.PassManager.parse(f"builtin.module({','.join(passes)})")
        manager.enable_verifier(False)
        manager.run(module.operation)


class equation_context:
    """Bind primitives inside as `eqn` was bound: its source line, name stack and jax context, under name `scope`.

    No generator: it is entered for each of a program's equations.
    """

    __slots__ = ("_managers",)

    def __init__(self, eqn: Any, scope: str) -> None:
        # Run on jax 0.10.2 and 0.12.0.1, as `jax.core.eval_jaxpr` itself does.
        stack = _source_info_util.current_name_stack() + eqn.source_info.name_stack
        if scope:
            stack = stack.extend(scope)
        self._managers = (
            _source_info_util.user_context(eqn.source_info.traceback, name_stack=stack),
            eqn.ctx.manager,
            # The mesh that the program was traced under is left behind: here the plan's holds, whatever that was.
            jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()),
        )

    def __enter__(self) -> None:
        for manager in self._managers:
            manager.__enter__()

    def __exit__(self, *error: Any) -> None:
        for manager in reversed(self._managers):
            manager.__exit__(*error)


def lowered_function(primitive: Any, platform: str) -> Any:
    """The function of jax that a primitive is lowered to on `platform` (by `mlir.lower_fun`); None: something else is.

    Called with the operands and the parameters by name, it returns the result, or the list of them.
    """
    # Run on jax 0.10.2 and 0.12.0.1.
    entry = _mlir._platform_specific_lowerings[platform].get(primitive) or _mlir._lowerings.get(primitive)
    rule: Any = getattr(entry, "rule", None)
    if getattr(rule, "__qualname__", "") != "lower_fun.<locals>.f_lowered":
        return None
    return inspect.getclosurevars(rule).nonlocals.get("fun")


PLACES_ARE_LENT = jax.__version_info__ < (0, 11)
"""Whether XLA for TPU puts buffers where arguments were copied out: libtpu 0.0.42.1 of jax 0.10.2 does, 0.0.50.1 of
0.12.0.1 doesn't; that of 0.11 was not tried, and not to lend is on the safe side."""

HEADS_ARE_PADDED = jax.__version_info__ < (0, 12)
"""Whether XLA for TPU writes into caches of one head in tiles that pad it: libtpu 0.0.42.1 does, 0.0.50.1 doesn't; that
of 0.11 was not tried, and to count them is on the safe side."""

ADDED_ROWS_ARE_COUNTED = jax.__version_info__ >= (0, 11)
"""Whether XLA for TPU keeps tables of any waste in rows where many rows are added to them, see `cost.tiles.Table`:
libtpu 0.0.48.1 of jax 0.11.2 and 0.0.50.1 of 0.12.0.1 do, 0.0.42.1 of 0.10.2 doesn't."""


def primitive_names() -> frozenset[str]:
    """The names of all primitives in the modules of jax that are loaded; what a new jax adds is among them.

    Without the words of the languages in which kernels are written: those stand inside kernels.
    """
    # Run on jax 0.10.2, 0.11.2 and 0.12.0.1.
    kernels = ("jax._src.pallas", "jax._src.thunky")
    modules = [
        module
        for name, module in sorted(sys.modules.items())
        if name.startswith("jax._src.") and not name.startswith(kernels)
    ]
    return frozenset(
        value.name
        for module in modules
        for value in list(vars(module).values())
        if isinstance(value, Primitive)
    )
