"""Galvatron's search: dynamic programming along the layers, on a grid of memory.

Miao et al., "Galvatron" (VLDB 2023, arXiv 2211.13878), section 4: the least cost of the first layers for every number
of bytes that they take and every strategy of the last one,

    f[i][v][s] = min over s' of f[i - 1][v - bytes(i, s)][s'] + cost(i, s) + between(s', s).

Theirs is a chain of layers.  Here the nodes of the reduced problem are taken in program order, an argument just before
its first reader, and a node that is joined to others than the one before it pays for what those chose on the best way
to each state: exact where the problem is a chain, and on a program a search that keeps the best way to every pair of
memory and strategy.  So that a way is not the best only because its dear end is still to come, costs are first shifted
along the edges (dual.py), which changes no assignment's cost: a node then pays what those after it cost at least.
Memory is what is alive at one time step, the worst of the cheapest start, in so many cells (to the nearest); the
best ways that are found are judged, and repaired, on the whole timeline.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numba import njit
from numpy.typing import NDArray

from . import moves
from .arena import Arena, searcher
from .dual import DualAscent
from .flat import Flat, edge_numbers, flatten
from .optcnn import offer_repaired
from .problem import Ints, StrategyProblem

#: Cells of memory: as many as the work below leaves, and at most.
MOST_CELLS = 256

#: Sums of two states' costs that the whole table may take, and entries that it may have.
MOST_SUMS, MOST_ENTRIES = 200_000_000, 20_000_000

#: Sweeps that shift the costs.
SWEEPS = 30

#: Ways that are read off the table at its end, the cheapest first.
WAYS = 64


def _layers(arena: Arena) -> None:
    order = _order(arena.flat)
    flat, count = flatten(_shifted(_in_order(arena.reduction.problem, order), arena)), order.size
    arena.check_clock()
    slot, n_slots = _slots(flat)
    degree = np.array([int((flat.near_node[a:b] < n).sum()) for n, (a, b) in enumerate(_ranges(flat))])
    previous = np.concatenate([[1], flat.size[:-1]])
    work = int((previous * flat.size * (1 + degree)).sum())
    widest = int(flat.size.max())
    cells = max(min(MOST_CELLS, MOST_SUMS // work, MOST_ENTRIES // (count * widest)), 2)
    taken = np.zeros(int(flat.size.sum()), dtype=np.int64)
    if flat.limit_bytes >= 0 and flat.peaks:
        step = int(np.argmax(moves.alive_bytes(flat, arena.start[order])))
        taken, cells = _cells(flat, step, cells)
    else:
        cells = 1
    mark = np.full((count, cells, widest), -1, dtype=np.int32)
    cost_s = np.full((cells, widest), np.inf)
    cost_s[0, 0] = 0.0
    way = np.zeros((cells, widest, n_slots), dtype=np.int16)
    for n in range(count):
        arena.check_clock()
        cost_s, way = advance(flat, n, cost_s, way, slot, taken, mark)
    for state in np.argsort(cost_s.ravel(), kind="stable")[:WAYS]:
        if cost_s.ravel()[state] >= flat.forbidden_s + cost_s.min():
            break
        arena.check_clock()
        chosen = np.empty(count, dtype=np.int64)
        chosen[order] = _way_to(int(state), mark)
        offer_repaired(arena, chosen)


solve = searcher(_layers)
"""The best way through the nodes in program order, or the hint; no bound.  See `jaxplan.search.base.Search`."""


def _order(flat: Flat) -> Ints:
    """The nodes as they stand, those that no earlier one is joined to just before the first that is joined to them."""
    first = [min([n, *flat.near_node[a:b].tolist()]) for n, (a, b) in enumerate(_ranges(flat))]
    reader = [min(flat.near_node[a:b].tolist(), default=n) for n, (a, b) in enumerate(_ranges(flat))]
    place = [reader[n] if first[n] == n else n for n in range(flat.size.size)]
    return np.array(sorted(range(len(place)), key=lambda n: (place[n], place[n] == n, n)), dtype=np.int64)


def _in_order(problem: StrategyProblem, order: Ints) -> StrategyProblem:
    """The same problem, its node `order[i]` as number i."""
    number = np.argsort(order).tolist()
    return replace(
        problem,
        nodes=tuple(problem.nodes[n] for n in order),
        edges=tuple(replace(e, tail=number[e.tail], head=number[e.head]) for e in problem.edges),
        usages=tuple(replace(u, node=number[u.node]) for u in problem.usages),
    )


def _shifted(problem: StrategyProblem, arena: Arena) -> StrategyProblem:
    """The same problem with its costs shifted to the earlier nodes: whatever is chosen costs the same."""
    dual = DualAscent(problem)
    for _ in range(SWEEPS):
        arena.check_clock()
        dual.sweep()
    size, at = dual.flat.size, dual.flat.at
    nodes = tuple(
        replace(node, costs_s=dual.node_s[at[n] : at[n] + size[n]].copy()) for n, node in enumerate(problem.nodes)
    )
    edges = []
    for edge, (ours, theirs) in zip(problem.edges, edge_numbers(problem).tolist(), strict=True):
        sent_by_tail = dual.sent_s[dual.sent_at[ours] : dual.sent_at[ours] + size[edge.tail]]
        sent_by_head = dual.sent_s[dual.sent_at[theirs] : dual.sent_at[theirs] + size[edge.head]]
        edges.append(replace(edge, costs_s=edge.costs_s + sent_by_tail[:, None] + sent_by_head))
    return replace(problem, nodes=nodes, edges=tuple(edges))


def _ranges(flat: Flat) -> list[tuple[int, int]]:
    return list(zip(flat.near_start[:-1].tolist(), flat.near_start[1:].tolist(), strict=True))


def _slots(flat: Flat) -> tuple[Ints, int]:
    """For every node where a way keeps its choice until the last node that is joined to it; and how many places."""
    slot, free, used = np.zeros(flat.size.size, dtype=np.int64), list[int](), 0
    leaving: dict[int, list[int]] = {}
    for n, (a, b) in enumerate(_ranges(flat)):
        if not free:
            free.append(used)
            used += 1
        slot[n] = free.pop()
        last = max([n + 1, *flat.near_node[a:b].tolist()])
        leaving.setdefault(last, []).append(int(slot[n]))
        free += leaving.pop(n, [])
    return slot, used


def _cells(flat: Flat, step: int, cells: int) -> tuple[Ints, int]:
    """The cells that every strategy takes at a time step beyond its node's least, and how many there are."""
    held = np.zeros(int(flat.size.sum()), dtype=np.int64)
    owner = np.repeat(np.arange(flat.size.size), np.diff(flat.use_start))
    for u in np.flatnonzero((flat.use_from <= step) & (step < flat.use_to)):
        first, size = flat.at[owner[u]], flat.size[owner[u]]
        held[first : first + size] += flat.bytes[flat.use_at[u] : flat.use_at[u] + size]
    least = np.minimum.reduceat(held, flat.at)
    unit = max((flat.limit_bytes - int(least.sum())) / (cells - 1), 1.0)
    return np.rint((held - np.repeat(least, flat.size)) / unit).astype(np.int64), cells


@njit(cache=True, nogil=True)
def advance(
    flat: Flat, n: int, cost_s: NDArray[np.float64], way: NDArray[np.int16], slot: Ints, taken: Ints,
    mark: NDArray[np.int32],
) -> tuple[NDArray[np.float64], NDArray[np.int16]]:  # fmt: skip
    """The table after node `n` from that before it; `mark[n]` is where each state came from."""
    cells, widest = cost_s.shape
    size = flat.size[n]
    after_s, after_way = np.full((cells, widest), np.inf), np.zeros_like(way)
    more_s = np.empty(size)
    for cell in range(cells):
        for last in range(widest):
            if not cost_s[cell, last] < np.inf:
                continue
            for s in range(size):
                more_s[s] = cost_s[cell, last] + flat.unary_s[flat.at[n] + s]
            for e in range(flat.near_start[n], flat.near_start[n + 1]):
                other = flat.near_node[e]
                if other < n:
                    row = flat.near_other[e] + way[cell, last, slot[other]] * size
                    for s in range(size):
                        more_s[s] += flat.matrix_s[row + s]
            for s in range(size):
                to = cell + taken[flat.at[n] + s]
                if to < cells and more_s[s] < after_s[to, s]:
                    after_s[to, s] = more_s[s]
                    mark[n, to, s] = cell * widest + last
    for cell in range(cells):
        for s in range(size):
            if mark[n, cell, s] >= 0:
                after_way[cell, s] = way[mark[n, cell, s] // widest, mark[n, cell, s] % widest]
                after_way[cell, s, slot[n]] = s
    return after_s, after_way


def _way_to(state: int, mark: NDArray[np.int32]) -> Ints:
    """The assignment that leads to a state of the last table."""
    count, _, widest = mark.shape
    chosen = np.zeros(count, dtype=np.int64)
    for n in range(count - 1, -1, -1):
        chosen[n] = state % widest
        state = int(mark[n].ravel()[state])
    return chosen
