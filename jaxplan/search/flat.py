"""A problem as a dozen flat arrays: what compiled kernels read.

Matrices are laid out once each, in both orientations, however many edges share them.  A forbidden pair costs
`forbidden_s`, more than all that choices can differ by: a kernel needs no masks and can lead an assignment that
takes such a pair out of it, and a bound of the finite costs stays a bound.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from .problem import Floats, Ints, StrategyProblem

#: `forbidden_s` is so many times what all choices together can make a difference: prices on memory may grow to some of
#: that, too.
FORBIDDEN_SPANS = 64.0


class Flat(NamedTuple):
    """What compiled kernels take as one argument.

    Attributes:
      size, at: of each node, how many strategies it has, and where they begin in `unary_s` (and in every array of
        one entry a strategy).
      unary_s: the price of each strategy.
      near_start, near_node: the neighbours of node n are `near_node[near_start[n] : near_start[n + 1]]`.
      near_own, near_other: where in `matrix_s` the edge to that neighbour begins, [own, other's] and [other's, own].
      near_back: the same edge, as the neighbour numbers it.
      matrix_s: all matrices, row by row, forbidden pairs at `forbidden_s`.
      use_start, use_from, use_to, use_at: the usages of node n are those numbered from `use_start[n]` on; alive at the
        peaks `use_from <= p < use_to`; their bytes begin at `use_at` in `bytes`.  Those of one node don't overlap.
      peaks: how many there are.
      limit_bytes: -1 without a limit.
    """

    size: Ints
    at: Ints
    unary_s: Floats
    near_start: Ints
    near_node: Ints
    near_own: Ints
    near_other: Ints
    near_back: Ints
    matrix_s: Floats
    use_start: Ints
    use_from: Ints
    use_to: Ints
    use_at: Ints
    bytes: Ints
    peaks: int
    limit_bytes: int
    forbidden_s: float


def flatten(problem: StrategyProblem) -> Flat:
    """The problem in flat arrays; parallel edges stay several."""
    size = np.array([node.costs_s.size for node in problem.nodes], dtype=np.int64)
    span_s = sum(float(np.ptp(node.costs_s)) for node in problem.nodes)
    span_s += sum(float(np.ptp(edge.costs_s)) for edge in problem.edges)
    forbidden_s = FORBIDDEN_SPANS * span_s or 1.0
    place: dict[tuple[int, int], tuple[int, int]] = {}
    parts: list[Floats] = []
    total = 0
    near: list[list[tuple[int, int, int]]] = [[] for _ in problem.nodes]
    for edge in problem.edges:
        key = id(edge.costs_s), id(edge.allowed)
        if key not in place:
            matrix = (
                edge.costs_s if edge.allowed is None else np.where(edge.allowed, edge.costs_s, forbidden_s)
            )
            parts += [matrix.ravel(), matrix.T.ravel()]
            place[key] = total, total + matrix.size
            total += 2 * matrix.size
        own, turned = place[key]
        near[edge.tail].append((edge.head, own, turned))
        near[edge.head].append((edge.tail, turned, own))
    rows = np.array(list(itertools.chain.from_iterable(near)), dtype=np.int64).reshape(-1, 3)
    near_start = _starts([len(row) for row in near])
    # The edges of a node are numbered in the order of the problem's edges.
    ends = edge_numbers(problem)
    back = np.empty(rows.shape[0], dtype=np.int64)
    back[ends[:, 0]], back[ends[:, 1]] = ends[:, 1], ends[:, 0]
    usages = node_usages(problem)
    spans = np.array([(a, b, u.size) for own in usages for a, b, u in own], dtype=np.int64).reshape(-1, 3)
    return Flat(
        size=size,
        at=np.cumsum(size) - size,
        unary_s=np.concatenate([node.costs_s for node in problem.nodes] or [np.zeros(0)]),
        near_start=near_start,
        near_node=rows[:, 0].copy(),
        near_own=rows[:, 1].copy(),
        near_other=rows[:, 2].copy(),
        near_back=back,
        matrix_s=np.concatenate(parts or [np.zeros(0)]),
        use_start=_starts([len(own) for own in usages]),
        use_from=spans[:, 0].copy(),
        use_to=spans[:, 1].copy(),
        use_at=np.cumsum(spans[:, 2]) - spans[:, 2],
        bytes=np.concatenate([u for own in usages for _, _, u in own] or [np.zeros(0, np.int64)]),
        peaks=max((usage.stop for usage in problem.usages), default=0),
        limit_bytes=-1 if problem.limit_bytes is None else problem.limit_bytes,
        forbidden_s=forbidden_s,
    )


def edge_numbers(problem: StrategyProblem) -> Ints:
    """[edges, 2]: the number of each edge at its tail and at its head, in the arrays of one entry a neighbour."""
    ends = np.array([(edge.tail, edge.head) for edge in problem.edges], dtype=np.int64).reshape(-1, 2)
    numbers = np.empty(ends.size, dtype=np.int64)
    numbers[np.argsort(ends.ravel(), kind="stable")] = np.arange(ends.size)
    return numbers.reshape(-1, 2)


def node_usages(problem: StrategyProblem) -> list[list[tuple[int, int, Ints]]]:
    """For each node the (start, stop, bytes) of its usages added up, as intervals that don't overlap."""
    by_node: list[list[tuple[int, int, Ints]]] = [[] for _ in problem.nodes]
    for usage in problem.usages:
        by_node[usage.node].append((usage.start, usage.stop, usage.bytes))
    for node, own in enumerate(by_node):
        if len(own) > 1:
            at = sorted({time for start, stop, _ in own for time in (start, stop)})
            rows = {time: np.zeros(problem.nodes[node].costs_s.size, dtype=np.int64) for time in at}
            for start, stop, used in own:
                rows[start] = rows[start] + used
                rows[stop] = rows[stop] - used
            total = np.cumsum(np.array([rows[time] for time in at]), axis=0)
            by_node[node] = [
                (a, b, total[i]) for i, (a, b) in enumerate(itertools.pairwise(at)) if total[i].any()
            ]
    return by_node


def _starts(lengths: list[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))]).astype(np.int64)
