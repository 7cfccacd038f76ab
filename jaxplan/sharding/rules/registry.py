"""The table from primitive to rule function, and the one way to look a rule up."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ...errors import RuleError
from ..rule import OpShapes, Rule, RuleBuilder, parse_rule
from .unknown import proved_rule

RuleFunction = Callable[[OpShapes], Rule | str]
"""From an operation's shapes to its rule, or to the rule's text in Shardy's notation."""

LocalFunction = Callable[..., Any]
"""From one device's pieces of an operation's operands, and its parameters by name, to the piece of its results."""

# The two globals that may grow after import, by `register_rule` alone.
_RULES: dict[str, RuleFunction] = {}
_LOCAL: dict[str, LocalFunction | None] = dict.fromkeys(
    ("pallas_call", "tpu_custom_call", "eigh", "fft", "lu", "top_k")
)
"""What runs in a `shard_map`: kernels, and what XLA gathers whole though every matrix or row is on one device (for TPU
eigh and LU of 64 matrices on 8 v5e, jax 0.10.2; Cholesky, QR and triangular solves it leaves where they are; for CPU
top_k and Fourier transforms)."""

_SUMS: dict[str, tuple[Callable[[Mapping[str, Any]], bool], Callable[[Any], LocalFunction]]] = {}
"""Of jax's own primitives whose sums XLA gets wrong in parts: with which parameters, and from an equation to what one
device does."""

_Cut = Callable[[Any], "int | tuple[int, ...] | None"]

_CUTS: dict[str, tuple[_Cut, bool]] = {}
"""Of such primitives, from an equation to the dimension (or dimensions) of its first operand that XLA doesn't cut, and
whether only while no other one is."""


@dataclass(frozen=True)
class Ring:
    """The devices along a dimension that is cut: mesh axes in the mesh's order, as collectives number devices along
    several of them, and the number of the device with each piece, in the order of the pieces."""

    axes: tuple[str, ...]
    devices: tuple[int, ...]


Sending = Callable[[Any, Ring], LocalFunction]
"""From an equation, and the devices along the dimension of `register_cut`, to what one device does."""

_SENDS: dict[str, Sending] = {}
"""Of primitives whose devices exchange edges of that dimension."""


_Function = TypeVar("_Function", bound=RuleFunction)
_CutFunction = TypeVar("_CutFunction", bound=_Cut)


def register(*primitives: str) -> Callable[[_Function], _Function]:
    """Decorator: this function makes the rule of these primitives.

    Raises:
      RuleError: one of them has a rule already (a primitive is one rule in one place).
    """

    def add(function: _Function) -> _Function:
        for primitive in primitives:
            if primitive in _RULES:
                raise RuleError(
                    f"primitive `{primitive}` has two rules: {_RULES[primitive].__qualname__} and "
                    f"{function.__qualname__}; keep one of them"
                )
            _RULES[primitive] = function
        return function

    return add


def register_rule(primitive: str, fn: RuleFunction, *, local: LocalFunction | None = None) -> None:
    """Give a primitive a rule, or replace the one it has; for primitives of one's own.

    XLA cuts what a primitive is lowered to by itself, but no kernel (Pallas, ffi, custom calls): there it gathers the
    operands, or refuses.  With `local` the planned step runs the operation in a `jax.shard_map` instead, on the pieces
    that the plan gives each device.

    Args:
      primitive: the name, as a jaxpr prints it.
      fn: from `OpShapes` to a `Rule` (see `RuleBuilder`) or to Shardy's notation, such as
        `"([i,k],[k,j])->([i,j]) reduction={k}"`.
      local: what one device does: called with its pieces of the operands, and the equation's parameters by name, it
        returns the piece of the result (a sequence, where the primitive has several).  Pieces over reduction factors
        are summed by jaxplan.

    Raises:
      RuleError: `primitive` is not a name, or `fn` or `local` can't be called.
    """
    if not isinstance(primitive, str) or not primitive:
        raise RuleError(f"register_rule: {primitive!r} is no primitive's name; give the one a jaxpr prints")
    if not callable(fn):
        raise RuleError(
            f"register_rule: the rule of `{primitive}` is {fn!r}; give a function from OpShapes to a Rule "
            "or to its text"
        )
    if local is not None and not callable(local):
        raise RuleError(
            f"register_rule: local of `{primitive}` is {local!r}; give a function from the pieces of the operands to "
            "the piece of the result"
        )
    _RULES[primitive] = fn
    _LOCAL.pop(primitive, None)
    if local is not None:
        _LOCAL[primitive] = local


def register_sum(
    primitive: str, where: Callable[[Mapping[str, Any]], bool]
) -> Callable[[Callable[[Any], LocalFunction]], Callable[[Any], LocalFunction]]:
    """Decorator: with parameters as `where` says, sums in parts run in a `shard_map` of what the function returns."""

    def add(function: Callable[[Any], LocalFunction]) -> Callable[[Any], LocalFunction]:
        _SUMS[primitive] = where, function
        return function

    return add


def register_cut(primitive: str, *, alone: bool = False) -> Callable[[_CutFunction], _CutFunction]:
    """Decorator: where a dimension is cut that the function names, the operation runs in a `shard_map`; `alone`: unless
    another one is cut, too."""

    def add(function: _CutFunction) -> _CutFunction:
        _CUTS[primitive] = function, alone
        return function

    return add


def runs_locally(primitive: str) -> bool:
    """Whether the planned step runs this primitive in a `shard_map`: XLA could not cut, nor even take, it otherwise."""
    return primitive in _LOCAL


def sums_locally(primitive: str, params: Mapping[str, Any]) -> bool:
    """Whether the planned step runs this operation in a `shard_map` where its results are sums in parts."""
    return primitive in _SUMS and _SUMS[primitive][0](params)


def cut_locally(eqn: Any) -> tuple[int, ...]:
    """The dimensions of an equation's first operand whose cuts have it run in a `shard_map`; none for most."""
    name = "" if eqn is None else eqn.primitive.name
    found = _CUTS[name][0](eqn) if name in _CUTS else None
    return found if isinstance(found, tuple) else () if found is None else (found,)


def is_cut_locally(eqn: Any, row: Iterable[int]) -> bool:
    """Whether an equation whose first operand is read in the layout `row` runs in a `shard_map`."""
    dims = cut_locally(eqn)
    cut = {int(dim) for dim in row if dim >= 0} if dims else set[int]()
    return not cut.isdisjoint(dims) and (not _CUTS[eqn.primitive.name][1] or cut.issubset(dims))


def register_sends(primitive: str) -> Callable[[Sending], Sending]:
    """Decorator: what one device does where the dimension that `register_cut` names is cut."""

    def add(function: Sending) -> Sending:
        _SENDS[primitive] = function
        return function

    return add


def local_function(eqn: Any, ring: Ring | None = None) -> LocalFunction:
    """What one device does in place of an equation: a kernel without a function of its own is called as it is.

    `ring`: where the dimension of `cut_locally` is cut.
    """
    name = eqn.primitive.name
    if name in _SENDS and ring is not None:
        return _SENDS[name](eqn, ring)
    if name not in _LOCAL:
        return _SUMS[name][1](eqn)
    own = _LOCAL[name]
    if own is None:
        return functools.partial(eqn.primitive.bind, **eqn.primitive.get_bind_params(eqn.params))
    return functools.partial(own, **eqn.params)


def registered() -> frozenset[str]:
    """The primitives that have a rule."""
    return frozenset(_RULES)


def named_unknown(op: OpShapes) -> bool:
    """Whether the operation has no rule: it is replicated at its price, and a plan's warnings name it."""
    return op.primitive not in _RULES


def rule_for(op: OpShapes) -> Rule:
    """The verified rule of an operation; where there is none, what can be proved, or all replicated and `note` set.

    Raises:
      RuleError: the rule does not fit the operation's shapes, or its function returned something else.
    """
    function = _RULES.get(op.primitive)
    if function is None:
        rule = proved_rule(op) or replicated(op, note="no rule: replicated")
    else:
        made = function(op)
        rule = parse_rule(made, op) if isinstance(made, str) else made
        if not isinstance(rule, Rule):
            raise RuleError(
                f"the rule function of `{op.primitive}` returned {made!r}; return a Rule or a text in "
                "Shardy's notation"
            )
    rule.verify(op)
    return rule


def replicated(op: OpShapes, *, note: str = "") -> Rule:
    """The rule of an operation that every device does whole; one FLOP per element of its largest tensor."""
    b = RuleBuilder()
    operands = [b.factors(shape) for shape in op.operands]
    results = [b.factors(shape) for shape in op.results]
    return b.rule(
        operands=operands,
        results=results,
        need_replication=range(len(b.sizes)),
        flops=float(max(map(math.prod, op.operands + op.results), default=0)),
        note=note,
    )
