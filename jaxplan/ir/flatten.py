"""A nested jaxpr -> the flat Graph: calls seen through, each loop body written once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from .._jax import Literal, as_closed, dtype_bytes, scan_signature
from .graph import Loop, Op, Site, Value
from .memory_space import on_host
from .products import laid_by
from .sources import UNKNOWN, source_of

_CALLS: Mapping[str, str] = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "call": "call_jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "remat": "jaxpr",
    "composite": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_vmap_call": "call",
    "eval_jaxpr": "jaxpr",
    "linear_call": "callee",
    "remat_opt": "fwd_jaxpr",
    "xla_metadata_call": "jaxpr",
}
"""Primitives that only wrap a jaxpr, and the parameter that holds it; "call_jaxpr" where a jax has renamed it.

What they say beside it concerns differentiation and batching, which are over, or names a group of operations.
"""


_TYPES = frozenset({"pcast", "pvary", "reshard"})
"""Types alone: within a `shard_map`, or (in its derivatives) of Explicit axes, of which a plan's mesh has none."""

SEEN_THROUGH = frozenset({*_CALLS, "custom_linear_solve"})
"""Primitives that `call_of` knows."""


class Call(NamedTuple):
    """A call seen through: `jaxpr` with its `consts`, applied to the equation's operands at `positions`."""

    jaxpr: Any
    consts: tuple[Any, ...]
    positions: tuple[int, ...]


class Stated(NamedTuple):
    """A sharding that the `jax.jit` of the function `jitted` states."""

    sharding: NamedSharding
    jitted: str


def call_of(eqn: Any) -> Call | None:
    """What an equation calls, when it does nothing else; None when it is an operation, a loop or a branch."""
    name, params = eqn.primitive.name, eqn.params
    if name == "custom_linear_solve":
        # operands: the constants of matvec, vecmat, solve and transpose_solve, then the right-hand sides
        lengths = params["const_lengths"]
        before = lengths.matvec + lengths.vecmat
        own, right = range(before, before + lengths.solve), range(sum(lengths), len(eqn.invars))
        return Call(*as_closed(params["jaxprs"].solve), (*own, *right))
    body = params.get(_CALLS[name], params.get("call_jaxpr")) if name in _CALLS else None
    return None if body is None else Call(*as_closed(body), tuple(range(len(eqn.invars))))


class Flattener:
    """Collects values and operations while it walks a jaxpr (one walk, then `graph`).

    `restate` gives an operation's parameters from its primitive, those it has and its source line.
    """

    def __init__(
        self,
        while_trips: float,
        restate: Callable[[str, Mapping[str, Any], str], Mapping[str, Any]] | None = None,
    ) -> None:
        self._restate = restate
        self._source = UNKNOWN  # of the equation that is being walked
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.loops: list[Loop] = []
        self.invariants: list[tuple[int, Site]] = []
        self.barriers: list[tuple[int, ...]] = []
        self.constants: list[int] = []
        self.assumptions: list[str] = []
        self.stated: dict[int, Stated] = {}  # by value, at the ends of jitted functions
        self.while_trips = while_trips
        self._literals: dict[tuple[Any, ...], int] = {}
        self._elements: dict[Any, tuple[str, float]] = {}
        self._types: dict[int, tuple[Any, tuple[int, ...], str, float, bool]] = {}
        self._sources: dict[tuple[Any, str], str] = {}

    # -- values -------------------------------------------------------------------------------------------

    def value(
        self,
        aval: Any,
        name: str,
        site: Site | None = None,
        *,
        constant: bool = False,
        number: float | None = None,
        **laid: Any,
    ) -> int:
        index = len(self.values)
        if id(aval) not in self._types:  # equal types are mostly one object, which is kept
            shape, dtype = tuple(map(int, getattr(aval, "shape", ()))), getattr(aval, "dtype", None)
            self._types[id(aval)] = aval, shape, *self._element(dtype), on_host(aval)
        _, shape, element, item_bytes, host = self._types[id(aval)]
        self.values.append(
            Value(
                index=index, shape=shape, dtype=element, item_bytes=item_bytes, name=name, site=site,
                constant=constant, number=number, host=host, **laid,
            )
        )  # fmt: skip
        return index

    def _element(self, dtype: Any) -> tuple[str, float]:
        """The name of an element type and its bytes; None is a token's."""
        if dtype not in self._elements:
            self._elements[dtype] = ("token", 0.0) if dtype is None else (str(dtype), dtype_bytes(dtype))
        return self._elements[dtype]

    def _source_of(self, eqn: Any) -> str:
        """`source_of`, looked up once for equal tracebacks: those of repeated layers are."""
        key = (eqn.source_info.traceback, self._source)
        if key not in self._sources:
            self._sources[key] = source_of(eqn, self._source)
        if self._sources[key] == UNKNOWN and eqn.primitive.name == "shard_map":  # run again, under jax.checkpoint
            return next(filter(UNKNOWN.__ne__, map(source_of, as_closed(eqn.params["jaxpr"])[0].eqns)), UNKNOWN)
        return self._sources[key]

    def captured(self, aval: Any, name: str) -> int:
        index = self.value(aval, name, constant=True)
        self.constants.append(index)
        return index

    def read(self, env: dict[Any, int], atom: Any) -> int:
        if not isinstance(atom, Literal):
            return env[atom]
        aval: Any = atom.aval
        number = None if aval.shape or not _is_real(aval.dtype) else float(atom.val)
        key = (tuple(aval.shape), aval.dtype, number)
        if key not in self._literals:
            self._literals[key] = self.value(aval, "literal", constant=True, number=number)
        return self._literals[key]

    def emit(
        self,
        primitive: str,
        params: Mapping[str, Any],
        operands: Sequence[int],
        results: Sequence[int],
        *,
        trips: float,
        source: str,
        sites: Sequence[Site],
        equation: Any = None,
    ) -> None:
        self.ops.append(
            Op(
                index=len(self.ops),
                primitive=primitive,
                params=params,
                operands=tuple(operands),
                results=tuple(results),
                trips=trips,
                source=source,
                sites=tuple(sites),
                equation=equation,
            )
        )

    # -- the walk -----------------------------------------------------------------------------------------

    def walk(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        arguments: Sequence[int],
        frame: tuple[int, ...],
        trips: float,
    ) -> list[int]:
        """Flatten `jaxpr` applied to values `arguments`; the values of its results."""
        env: dict[Any, int] = {}
        for var in jaxpr.constvars:
            env[var] = self.captured(var.aval, f"constant{len(self.constants)}")
        env.update(zip(jaxpr.invars, arguments, strict=True))
        for position, eqn in enumerate(jaxpr.eqns):
            self._equation(eqn, position, env, frame, trips)
        return [self.read(env, atom) for atom in jaxpr.outvars]

    def _note_shardings(self, params: Mapping[str, Any], side: str, values: Sequence[int]) -> None:
        for value, sharding in zip(values, params.get(side, ()), strict=False):
            if isinstance(sharding, NamedSharding):
                self.stated.setdefault(value, Stated(sharding, params["name"]))

    def _equation(
        self, eqn: Any, position: int, env: dict[Any, int], frame: tuple[int, ...], trips: float
    ) -> None:
        name = eqn.primitive.name
        around, self._source = self._source, self._source_of(eqn)
        operands = [self.read(env, atom) for atom in eqn.invars]
        called = call_of(eqn)
        if called is not None:
            self._note_shardings(eqn.params, "in_shardings", operands)
            arguments = [operands[i] for i in called.positions]
            if eqn.params.get("differentiated") and np.any(eqn.params.get("prevent_cse", False)):
                self.barriers.append((*frame, position))
                self._invariant(arguments, (*frame, position))
            results = self.walk(called.jaxpr, called.consts, arguments, (*frame, position), trips)
            self._note_shardings(eqn.params, "out_shardings", results)
        elif name == "scan":
            results = self._scan(eqn, position, operands, frame, trips)
        elif name == "while":
            results = self._while(eqn, position, operands, frame, trips)
        elif name == "cond":
            results = self._cond(eqn, position, operands, frame, trips)
        elif name in _TYPES:
            results = operands
        else:
            made, laid = enumerate(eqn.outvars), laid_by(eqn, [self.values[v] for v in operands])
            results = [self.value(v.aval, f"{name}", Site(frame, "result", position, i), **laid) for i, v in made]
            sites = [Site(frame, "operand", position, i) for i in range(len(operands))]
            params, source = eqn.params, self._source
            if self._restate is not None:
                params = self._restate(name, params, source)
            # what waits for each other lies each as it likes
            apart = [slice(i, i + 1) for i in range(len(operands))] if name == "optimization_barrier" else [slice(None)]
            for i in apart:
                self.emit(name, params, operands[i], results[i], trips=trips, source=source, sites=sites[i],
                          equation=eqn)  # fmt: skip
        self._source = around
        env.update(zip(eqn.outvars, results, strict=True))

    def _carry(
        self, inits: Sequence[int], avals: Sequence[Any], outer: tuple[int, ...], inner: tuple[int, ...],
        position: int, offset: int, offset_inner: int, trips: float, source: str,
    ) -> list[int]:  # fmt: skip
        carries = []
        for i, (init, aval) in enumerate(zip(inits, avals, strict=True)):
            carry = self.value(aval, "carry", Site(inner, "enter", -1, offset_inner + i))
            self.emit("carry_init", {}, [init], [carry], trips=trips, source=source,
                      sites=[Site(outer, "operand", position, offset + i)])  # fmt: skip
            carries.append(carry)
        return carries

    def _carry_next(
        self, nexts: Sequence[int], carries: Sequence[int], inner: tuple[int, ...], trips: float, source: str
    ) -> None:
        for i, (after, carry) in enumerate(zip(nexts, carries, strict=True)):
            if after != carry:
                site = Site(inner, "leave", -1, i)
                self.emit(
                    "carry_next", {}, [after, carry], [], trips=trips, source=source, sites=[site, site]
                )

    def _invariant(self, values: Sequence[int], inner: tuple[int, ...]) -> None:
        self.invariants += [(value, Site(inner, "enter", -1, i)) for i, value in enumerate(values)]

    def _scan(
        self, eqn: Any, position: int, operands: list[int], frame: tuple[int, ...], trips: float
    ) -> list[int]:
        n_consts, n_carry, length, closed = scan_signature(eqn)
        jaxpr, consts = as_closed(closed)
        inner, source, inside = (*frame, position), self._source, trips * length
        first_xs = n_consts + n_carry
        body_avals = [v.aval for v in jaxpr.invars]
        carries = self._carry(
            operands[n_consts:first_xs], body_avals[n_consts:first_xs], frame, inner, position, n_consts, n_consts,
            trips, source,
        )  # fmt: skip
        start = len(self.ops)
        loop = len(self.loops)
        self.loops.append(Loop(start=start, stop=start, trips=length, kind="scan", source=source))
        slices = []
        for i, operand in enumerate(operands[first_xs:]):
            piece = self.value(body_avals[first_xs + i], "slice", Site(inner, "enter", -1, first_xs + i))
            self.emit("scan_slice", {}, [operand], [piece], trips=inside, source=source,
                      sites=[Site(frame, "operand", position, first_xs + i)])  # fmt: skip
            slices.append(piece)
        self._invariant(operands[:n_consts], inner)
        results = self.walk(jaxpr, consts, operands[:n_consts] + carries + slices, inner, inside)
        self._carry_next(results[:n_carry], carries, inner, inside, source)
        stacks = []
        for i, result in enumerate(results[n_carry:]):
            stack = self.value(
                eqn.outvars[n_carry + i].aval, "stack", Site(frame, "result", position, n_carry + i)
            )
            self.emit("scan_stack", {}, [result], [stack], trips=inside, source=source,
                      sites=[Site(inner, "leave", -1, n_carry + i)])  # fmt: skip
            stacks.append(stack)
        self.loops[loop] = Loop(start=start, stop=len(self.ops), trips=length, kind="scan", source=source)
        return carries + stacks

    def _while(
        self, eqn: Any, position: int, operands: list[int], frame: tuple[int, ...], trips: float
    ) -> list[int]:
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        cond, cond_consts = as_closed(eqn.params["cond_jaxpr"])
        body, body_consts = as_closed(eqn.params["body_jaxpr"])
        source = self._source
        length = _known_trips(cond, eqn.invars[n_cond + n_body :])
        if length is None:
            length = self.while_trips
            self.assumptions.append(
                f"while loop at {source}: its trip count is not known before it runs; {length:g} iterations are "
                "assumed (options.while_trips)"
            )
        inside, inner = trips * length, (*frame, position, 1)
        first = n_cond + n_body
        carries = self._carry(
            operands[first:],
            [v.aval for v in body.invars[n_body:]],
            frame,
            inner,
            position,
            first,
            n_body,
            trips,
            source,
        )
        start = len(self.ops)
        loop = len(self.loops)
        self.loops.append(Loop(start=start, stop=start, trips=length, kind="while", source=source))
        tested = (*frame, position, 0)
        (again,) = self.walk(cond, cond_consts, operands[:n_cond] + carries, tested, inside)
        sites = [Site(tested, "leave", -1, 0)]
        if self.values[again].shape:  # of a batched loop, which goes on while any of its elements does
            every, again = again, self.value(jax.ShapeDtypeStruct((), bool), "any")
            self.emit("while_any", {}, [every], [again], trips=inside, source=source, sites=sites)
        self.emit("while_test", {}, [again], [], trips=inside, source=source, sites=sites)
        self._invariant(operands[n_cond:first], inner)
        nexts = self.walk(body, body_consts, operands[n_cond:first] + carries, inner, inside)
        self._carry_next(nexts, carries, inner, inside, source)
        self.loops[loop] = Loop(start=start, stop=len(self.ops), trips=length, kind="while", source=source)
        return carries

    def _cond(
        self, eqn: Any, position: int, operands: list[int], frame: tuple[int, ...], trips: float
    ) -> list[int]:
        outcomes = []
        frames = [(*frame, position, b) for b in range(len(eqn.params["branches"]))]
        for branch, inner in zip(eqn.params["branches"], frames, strict=True):
            jaxpr, consts = as_closed(branch)
            outcomes.append(self.walk(jaxpr, consts, operands[1:], inner, trips))
        results = []
        for i, var in enumerate(eqn.outvars):
            result = self.value(var.aval, "cond", Site(frame, "result", position, i))
            sites = [Site(frame, "operand", position, 0), *(Site(inner, "leave", -1, i) for inner in frames)]
            branches = [outcome[i] for outcome in outcomes]
            self.emit(
                "cond_join",
                {},
                [operands[0], *branches],
                [result],
                trips=trips,
                source=self._source,
                sites=sites,
            )
            results.append(result)
        return results


def _known_trips(cond: Any, inits: Sequence[Any]) -> float | None:
    """Iterations of `while i < n` with literal start and end (what `fori_loop` writes), else None."""
    if len(cond.eqns) != 1 or cond.eqns[0].primitive.name != "lt":
        return None

    def known(atom: Any) -> float | None:
        if isinstance(atom, Literal):
            return float(atom.val)
        offset = len(cond.invars) - len(inits)
        position = cond.invars.index(atom) - offset if atom in cond.invars else -1
        if position >= 0 and isinstance(inits[position], Literal):
            return float(inits[position].val)
        return None

    start, stop = (known(atom) for atom in cond.eqns[0].invars)
    return max(stop - start, 0.0) if start is not None and stop is not None else None


@functools.cache
def _is_real(dtype: Any) -> bool:
    return any(jax.dtypes.issubdtype(dtype, kind) for kind in (np.floating, np.integer, np.bool_))
