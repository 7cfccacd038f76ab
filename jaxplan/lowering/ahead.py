"""What is finished before a loop begins, because it would keep more in memory through the loop than it leaves.

XLA runs an operation whenever its operands are there, and the gradient of a weight is not wanted before the optimizer:
of a model with a loop over its layers, the compilers for TPU and GPU put the product that makes the head's gradient
after the loop that goes back through the layers as often as before it, and hold all logits for it meanwhile (scanned
GPT-2 XL and Llama on v5e, v5p, v6e and H100, jax 0.10.2, libtpu 0.0.42.1: 0.8 to 2.1 GB of 9 to 13).  So what a step
computes before a loop, doesn't need in it, and makes of more bytes than it has, passes through an
`optimization_barrier` together with what the loop needs: both compilers schedule with barriers in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from .._jax import Literal, as_closed, dtype_bytes
from ..ir import Site, Traced, call_of

LOOPS = frozenset({"scan", "while"})


class Read(NamedTuple):
    """Where a value is read: the equation, by position, and the position among its operands."""

    equation: int
    operand: int


class Waited(NamedTuple):
    """A value that is waited for.

    Attributes:
      value: the jaxpr's variable; reads: who reads it after the loop.
      made: the equation that makes it, by position, and the position among its results.
      dtype: the type that it is kept in meanwhile: the narrower one that it was converted from, if it was.
    """

    value: Any
    dtype: Any
    reads: tuple[Read, ...]
    made: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """What is finished before one loop.

    Attributes:
      tied: the operand of the loop that waits, by position; values: what it waits for.
    """

    tied: int
    values: tuple[Waited, ...]


def ahead_of_loops(jaxpr: Any) -> Mapping[int, Ahead]:
    """For every loop among `jaxpr`'s own equations, by position, what is finished before it; none: left out."""
    if not any(eqn.primitive.name in LOOPS for eqn in jaxpr.eqns):
        return {}
    return dict(_Order(jaxpr).found())


def waited_values(traced: Traced) -> dict[int, tuple[int, float]]:
    """The values of the Graph that are finished before a loop: until which operation they wait, and the share of their
    bytes that they wait in."""
    graph = traced.graph
    by_site = {value.site: value.index for value in graph.values if value.site is not None}
    stops: dict[tuple[int, ...], int] = {}
    for op in graph.ops:
        for depth in range(len(op.sites[0].frame) if op.sites else 0):
            stops[op.sites[0].frame[: depth + 1]] = op.index + 1
    found: dict[int, tuple[int, float]] = {}

    def walk(jaxpr: Any, frame: tuple[int, ...]) -> None:
        for position, ahead in ahead_of_loops(jaxpr).items():
            for value, dtype, _, made in ahead.values:
                site = Site(frame, "result", *made)
                if site in by_site and (*frame, position) in stops:
                    share = dtype_bytes(dtype) / dtype_bytes(value.aval.dtype)
                    found[by_site[site]] = (stops[*frame, position], share)
        for position, eqn in enumerate(jaxpr.eqns):
            called, inner = call_of(eqn), (*frame, position)
            if called is not None:
                walk(called.jaxpr, inner)
            elif eqn.primitive.name == "scan":
                walk(as_closed(eqn.params["jaxpr"])[0], inner)
            elif eqn.primitive.name == "while":
                walk(as_closed(eqn.params["body_jaxpr"])[0], (*inner, 1))

    walk(traced.jaxpr, ())
    return found


class _Order:
    """The equations of one jaxpr, and what each is computed from.

    A step may have hundreds of loops (an optimizer's, one a weight): for each, every equation is visited once.
    """

    def __init__(self, jaxpr: Any) -> None:
        self.eqns = jaxpr.eqns
        self.made: dict[Any, int] = {}
        self.reads: dict[Any, list[Read]] = {}
        for index, eqn in enumerate(self.eqns):
            for position, atom in enumerate(eqn.invars):
                if not isinstance(atom, Literal):
                    self.reads.setdefault(atom, []).append(Read(index, position))
            self.made.update(dict.fromkeys(eqn.outvars, index))
        self.results = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
        # of every equation what it reads that an equation makes, with that equation
        self.operands = [
            [(atom, self.made[atom]) for atom in eqn.invars if not isinstance(atom, Literal) and atom in self.made]
            for eqn in self.eqns
        ]

    def found(self) -> Iterator[tuple[int, Ahead]]:
        for loop, eqn in enumerate(self.eqns):
            if eqn.primitive.name not in LOOPS:
                continue
            own = [(self._maker(atom), position) for position, atom in enumerate(eqn.invars)]
            latest, tied = max(own, default=(-1, -1))
            values = [
                Waited(value, self._narrowest(value), self._reads_after(value, loop), self._made(value))
                for value in self._worth_finishing(loop, self._behind(loop))
            ]
            if values and latest >= 0:
                yield loop, Ahead(tied=tied, values=tuple(values))

    def _reads_after(self, value: Any, loop: int) -> tuple[Read, ...]:
        return tuple(read for read in self.reads.get(value, ()) if read.equation > loop)

    def _maker(self, atom: Any) -> int:
        """The position of the equation that makes it; -1 for what comes in and for constants."""
        return -1 if isinstance(atom, Literal) else self.made.get(atom, -1)

    def _made(self, value: Any) -> tuple[int, int]:
        return self.made[value], self.eqns[self.made[value]].outvars.index(value)

    def _behind(self, loop: int) -> set[int]:
        """The equations that a loop's operands are computed by."""
        seen: set[int] = set()
        todo = [loop]
        while todo:
            for _, maker in self.operands[todo.pop()]:
                if maker not in seen:
                    seen.add(maker)
                    todo.append(maker)
        return seen

    def _worth_finishing(self, loop: int, needed: set[int]) -> Iterator[Any]:
        """The values, not `needed` by a loop, that are wanted after it and leave less than they are computed from, of
        what is needed and ends before the loop."""
        number: dict[Any, int] = {}
        sizes: list[float] = []
        # of every equation that isn't needed the numbers of what it is computed from, as bits
        sources: dict[int, int] = {}
        known: dict[int, float] = {0: 0.0}
        for index in range(loop):
            if index in needed:
                continue
            bits = 0
            for atom, maker in self.operands[index]:
                if maker not in needed:
                    bits |= sources[maker]
                elif self._last(atom) < loop:
                    if atom not in number:
                        number[atom] = len(sizes)
                        sizes.append(_bytes(atom))
                    bits |= 1 << number[atom]
            sources[index] = bits
            for value in self.eqns[index].outvars if bits else ():
                if self._last(value) > loop:
                    if bits not in known:
                        known[bits] = sum(size for at, size in enumerate(sizes) if bits >> at & 1)
                    if known[bits] > _bytes(value):
                        yield value

    def _last(self, value: Any) -> float:
        """The last equation that reads a value; infinite for what the jaxpr returns."""
        if value in self.results:
            return math.inf
        reads = self.reads.get(value)
        return reads[-1].equation if reads else -1

    def _narrowest(self, value: Any) -> Any:
        """The type that holds `value` exactly in the fewest bytes: a float's that was widened, else its own."""
        eqn = self.eqns[self._maker(value)]
        if eqn.primitive.name != "convert_element_type":
            return value.aval.dtype
        before, after = eqn.invars[0].aval.dtype, value.aval.dtype
        floats = jnp.issubdtype(before, jnp.floating) and jnp.issubdtype(after, jnp.floating)
        return before if floats and jnp.promote_types(before, after) == after else after


def _bytes(atom: Any) -> float:
    return atom.aval.size * dtype_bytes(atom.aval.dtype)
