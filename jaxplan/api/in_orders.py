"""A problem in which each strategy is there once for every order of the axes that it cuts one dimension with.

What turns on its way (`lowering.turns`) is then a price of an edge like any other, so that the search weighs it, and
its bound holds with it: the search of the problem itself knows no orders.  Within an operation the dimensions that
share a factor share an order, as in `lowering.resolve_orders`; a dimension of several factors has the mesh's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..cost import CostModel
from ..lowering import Lying, cut_by, lying, turning
from ..search import Edge, Passage, Space, StrategyProblem, narrow, solve
from ..sharding import MeshAxes, pieces

MOST_PAIRS = 400_000
"""Of layouts and orders at the two ends of an edge: what takes more is left without orders."""

SOON_S, SOON_GAP = 2.0, 1e-3
"""Seconds and a gap within which the orders of one assignment are found, to begin from."""


class InOrders(NamedTuple):
    """`strategies[n]`: of node n's strategies in `problem` those that they are of the space's."""

    problem: StrategyProblem
    strategies: tuple[np.ndarray, ...]

    def without(self, assignment: Sequence[int]) -> tuple[int, ...]:
        """The space's assignment."""
        return tuple(int(of[one]) for of, one in zip(self.strategies, assignment, strict=True))

    def of(self, assignment: Sequence[int], seed: int = 0) -> tuple[int, ...] | None:
        """The cheapest of `problem` that is this of the space, if one is found soon."""
        left = {n: np.flatnonzero(of == assignment[n]) for n, of in enumerate(self.strategies)}
        found = solve(narrow(self.problem, left), time_limit_s=SOON_S, relative_gap=SOON_GAP, seed=seed)
        return tuple(int(left[n][one]) for n, one in enumerate(found.assignment)) if found.found else None


def in_orders(space: Space, model: CostModel, axes: MeshAxes) -> InOrders | None:
    """`space.problem` with orders and the seconds of what they make turn; None where that is too large."""
    nodes = [_variants(rows) for rows in _cuts(space)]
    strategies = tuple(np.array([strategy for strategy, _ in variants]) for variants in nodes)
    problem, priced = narrow(space.problem, dict(enumerate(strategies))), _Priced(model, axes)
    edges = []
    for edge, moved in zip(problem.edges, space.passages, strict=True):
        edges.append(priced.edge(edge, moved, nodes[edge.tail], nodes[edge.head]))
        if priced.pairs > MOST_PAIRS:
            return None
    return InOrders(replace(problem, edges=tuple(edges)), strategies)


_Variant = tuple[int, tuple[tuple[int, ...], ...]]
"""A strategy, and the order of each set of axes that cut one of its factors."""


def _cuts(space: Space) -> list[np.ndarray]:
    """For every node `int[n_strategies, n_axes]`: what each axis cuts, a factor of an operation or a dimension."""
    cuts = {node: space.strategies[node].factors for node in space.node_op}
    for edge, moved in zip(space.problem.edges, space.passages, strict=True):
        cuts.setdefault(edge.tail, moved.tails)
        cuts.setdefault(edge.head, moved.heads)
    free = [np.full((node.costs_s.size, 1), -1) for node in space.problem.nodes]
    return [cuts.get(number, rows) for number, rows in enumerate(free)]


def _variants(rows: np.ndarray) -> list[_Variant]:
    found: list[_Variant] = []
    for strategy, row in enumerate(rows):
        sets = [cut for place in sorted(set(row.tolist())) if place >= 0 and len(cut := cut_by(row, place)) > 1]
        found += [(strategy, orders) for orders in itertools.product(*map(itertools.permutations, sets))]
    return found


class _Priced:
    """Edges with what orders make turn in their price; equal ones are one array."""

    def __init__(self, model: CostModel, axes: MeshAxes) -> None:
        self.pairs = 0
        self._model, self._axes = model, axes
        self._made: dict[tuple[object, ...], np.ndarray] = {}
        self._ends: dict[tuple[int, tuple[_Variant, ...]], tuple[list[Lying], np.ndarray]] = {}
        self._turns: dict[tuple[Lying, Lying], list[tuple[bool, tuple[int, ...]]]] = {}

    def edge(self, edge: Edge, moved: Passage, tail: list[_Variant], head: list[_Variant]) -> Edge:
        """An edge between nodes of these variants, which has to outlive this, with the price of what turns."""
        sent = moved.tensor.bytes * moved.tensor.as_sent("collective_permute")
        (tails, at_tail), (heads, at_head) = self._end(moved.tails, tail), self._end(moved.heads, head)
        key = id(edge.costs_s), id(tails), id(heads), sent, moved.trips
        if key not in self._made:
            self.pairs += len(tails) * len(heads)
            turned = np.array([[self._seconds(a, b, sent) for b in heads] for a in tails]) * moved.trips
            self._made[key] = edge.costs_s + turned[np.ix_(at_tail, at_head)] if turned.any() else edge.costs_s
        return replace(edge, costs_s=self._made[key])

    def _end(self, rows: np.ndarray, variants: list[_Variant]) -> tuple[list[Lying], np.ndarray]:
        """What lies at an edge's end in any way, and which of it each variant is."""
        key = id(rows), tuple(variants)
        if key not in self._ends:
            known: dict[Lying, int] = {}
            at = [known.setdefault(lying(rows[s], orders), len(known)) for s, orders in variants]
            self._ends[key] = list(known), np.array(at)
        return self._ends[key]

    def _seconds(self, made: Lying, taken: Lying, sent: float) -> float:
        if not made[1] and not taken[1]:
            return 0.0
        if (made, taken) not in self._turns:
            self._turns[made, taken] = turning(made, taken)
        return sum(
            self._model.collective_over(
                "collective_permute",
                sent / pieces(np.frombuffer((taken if late else made)[0], np.int8)[None], self._axes)[0],
                tuple(self._axes[axis][0] for axis in turned),
            )
            for late, turned in self._turns[made, taken]
        )
