"""What is learnt of a decision after its search: that some passage costs more, in just the layouts that it chose.

A search on with that in its problem finds what to do instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .problem import Floats
from .space import Port, Space


class Charge(NamedTuple):
    """An edge of the problem, and the layouts at its two ends (rows of place arrays, as bytes)."""

    edge: int
    tail: bytes
    head: bytes


class Crossed:
    """The edges of a space, and what an assignment moves along them."""

    def __init__(self, space: Space, assignment: Sequence[int]) -> None:
        self._space, self._assignment = space, assignment
        self._between = {(edge.tail, edge.head): number for number, edge in enumerate(space.problem.edges)}

    def between(self, value: int, use: tuple[str, int, int], made: bytes, taken: bytes) -> Charge | None:
        """The edge on which a value is brought from one layout to another for a use of it, `lowering.Turn.use`.

        None where it is brought there by way of another.
        """
        space, (kind, index, position) = self._space, use
        copy = space.copies.get((index, position)) if kind == "read" else None
        user = space.reads[index, position] if kind == "read" else space.outputs[index]
        ports = [space.values[value], *([copy] if copy else []), user]
        legs = (self._leg(a, b) for n, b in enumerate(ports) for a in ports[:n])
        return next((leg for leg in legs if leg and (leg.tail, leg.head) == (made, taken)), None)

    def _leg(self, a: Port, b: Port) -> Charge | None:
        number = self._between.get((a.node, b.node))
        if number is None:
            return None
        moved = self._space.passages[number]
        tail, head = moved.tails[self._assignment[a.node]], moved.heads[self._assignment[b.node]]
        return Charge(number, tail.tobytes(), head.tobytes())


def charged(space: Space, charges: Mapping[Charge, float]) -> Space:
    """`space` with seconds added to what some edges cost between the layouts named; equal matrices stay one."""
    edges = list(space.problem.edges)
    made: dict[tuple[object, ...], Floats] = {}
    by_edge: dict[int, list[tuple[bytes, bytes, float]]] = {}
    for charge, seconds in charges.items():
        by_edge.setdefault(charge.edge, []).append((charge.tail, charge.head, seconds))
    for number, added in by_edge.items():
        edge, moved = edges[number], space.passages[number]
        key = (id(edge.costs_s), id(moved.tails), id(moved.heads), *sorted(added))
        if key not in made:
            costs = edge.costs_s.copy()
            for tail, head, seconds in added:
                costs[np.ix_(_at(moved.tails, tail), _at(moved.heads, head))] += seconds
            made[key] = costs
        edges[number] = replace(edge, costs_s=made[key])
    return replace(space, problem=replace(space.problem, edges=tuple(edges)))


def _at(places: np.ndarray, row: bytes) -> np.ndarray:
    return np.flatnonzero((places == np.frombuffer(row, places.dtype)).all(axis=1))
