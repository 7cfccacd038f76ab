"""A nested jaxpr as one list of equations: calls seen through, loops, branches and remat left whole.

What `Replay` runs, written down: an equation is named by its frame and its position there, and by its index here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .._jax import Literal
from ..ir import Graph, Op, Site, call_of

KEPT_CALLS = frozenset({"checkpoint", "remat", "remat2", "xla_metadata_call"})
"""Calls that mean something to the compiler and must stay: their bodies are recomputed, not kept, or named."""


class Equation(NamedTuple):
    """One equation; `operands` and `results` are numbers of values, one number a value of the whole list."""

    frame: tuple[int, ...]
    position: int
    eqn: Any
    operands: tuple[int, ...]
    results: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A program as a list.

    Attributes:
      arguments, results: values that go in and come out; constants: values that are known, literals included.
    """

    equations: tuple[Equation, ...]
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    constants: Mapping[int, Any]


def seen_through(eqn: Any) -> bool:
    """Whether an equation only calls a jaxpr that stands in its place."""
    return call_of(eqn) is not None and eqn.primitive.name not in KEPT_CALLS


def listing_of(jaxpr: Any, consts: Sequence[Any]) -> Listing:
    """The list of `jaxpr`'s equations."""
    equations: list[Equation] = []
    constants: dict[int, Any] = {}
    count = 0

    def number() -> int:
        nonlocal count
        count += 1
        return count - 1

    def constant(value: Any) -> int:
        constants[count] = value
        return number()

    def walk(jaxpr: Any, consts: Sequence[Any], operands: Sequence[int], frame: tuple[int, ...]) -> list[int]:
        env = {var: constant(value) for var, value in zip(jaxpr.constvars, consts, strict=True)}
        env.update(zip(jaxpr.invars, operands, strict=True))

        def read(atom: Any) -> int:
            return constant(atom.val) if isinstance(atom, Literal) else env[atom]

        for position, eqn in enumerate(jaxpr.eqns):
            inside = [read(atom) for atom in eqn.invars]
            called = call_of(eqn)
            if called is not None and eqn.primitive.name not in KEPT_CALLS:
                passed = [inside[i] for i in called.positions]
                results = walk(called.jaxpr, called.consts, passed, (*frame, position))
            else:
                results = [number() for _ in eqn.outvars]
                equations.append(Equation(frame, position, eqn, tuple(inside), tuple(results)))
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    arguments = tuple(number() for _ in jaxpr.invars)
    results = tuple(walk(jaxpr, consts, arguments, ()))
    return Listing(equations=tuple(equations), arguments=arguments, results=results, constants=constants)


class Places:
    """Which equation of a list a site, or an operation of the graph, belongs to; loops' bodies to their loop."""

    def __init__(self, listing: Listing, graph: Graph) -> None:
        self._index = {(e.frame, e.position): i for i, e in enumerate(listing.equations)}
        self.of_op = [self._of_op(op, graph) for op in graph.ops]
        self.ops: list[list[int]] = [[] for _ in listing.equations]
        self.rank: list[int] = []
        for op, equation in enumerate(self.of_op):
            self.rank.append(len(self.ops[equation]))
            self.ops[equation].append(op)

    def _of_op(self, op: Op, graph: Graph) -> int:
        site = op.sites[0] if op.sites else graph.values[op.results[0]].site
        assert site is not None  # no operation makes an argument
        return self.of_site(site)

    def of_site(self, site: Site) -> int:
        """The equation that a site is at, or in the body of."""
        found = self._index.get((site.frame, site.equation))
        depth = len(site.frame)
        while found is None:
            depth -= 1
            found = self._index.get((site.frame[:depth], site.frame[depth]))
        return found

    def moved(self, op: int, equations: Mapping[int, int]) -> int:
        """The operation that is to its equation's counterpart what `op` is to its own."""
        return self.ops[equations[self.of_op[op]]][self.rank[op]]
