"""TensorOpt's search: the frontier of time and memory by elimination, and of it the fastest point within the limit.

Cai et al., "TensorOpt" (arXiv 2004.10856).  The tables are those of frontier.py.  Where the graph is too dense for
them, some nodes keep the strategy that they have and the rest is eliminated exactly, as the paper's heuristic
elimination does; again and again with other nodes kept, from the best found so far.  What was not exact is said in
`SearchResult.reason`, and only an exact elimination proves a bound.
"""

from __future__ import annotations

import math

import numpy as np

from ..errors import SolverError
from .arena import Arena, searcher
from .frontier import trace_frontier
from .frontier_elimination import TooWide
from .narrow import narrow
from .optcnn import offer_repaired
from .problem import StrategyProblem

#: Points whose bytes differ by a smaller factor than 1 + this are one.
WIDTH = 1e-3

#: Joint choices that a table may be over: at first, how many times fewer after one took too many sums, and at least.
MOST_JOINT, FEWER, LEAST_JOINT = 10_000, 10, 10

#: Sums of two points that one table may take: some tenths of a second.
MOST_SUMS = 20_000_000

#: Eliminations in a row without gain that end the search.
PATIENCE = 4

#: Of so many nodes at random the one in the largest tables is given up.
CANDIDATES = 3


def _eliminate(arena: Arena) -> None:
    problem, current = arena.reduction.problem, arena.start.copy()
    limit = math.inf if problem.limit_bytes is None else problem.limit_bytes
    joint, since, rows = MOST_JOINT, 0, 0
    while since < PATIENCE and joint >= LEAST_JOINT:
        arena.check_clock()
        given_up = _given_up(problem, joint, arena.random)
        kept = {node: int(current[node]) for node in given_up}
        try:
            found = trace_frontier(
                narrow(problem, {node: np.array([only]) for node, only in kept.items()}),
                width=WIDTH, most_rows=rows, most_sums=MOST_SUMS, deadline=arena.deadline,
            )
        except TooWide:
            joint //= FEWER
            continue
        except SolverError:
            # the strategies that were kept forbid everything else
            since += 1
            continue
        if not rows and found.points[-1].peak_bytes > limit:
            # the fastest does not fit: from now on a point carries its bytes
            rows = 1
            continue
        before_s = arena.best.objective_s
        for point in reversed(found.points):
            chosen = np.array(point.assignment, dtype=np.int64)
            chosen[list(kept)] = list(kept.values())
            offer_repaired(arena, chosen)
            if point.peak_bytes <= limit:
                current = chosen
                break
        if not kept:
            arena.best.raise_bound(found.bound_at(int(min(limit, 2**62))))
            return
        arena.note = f"{len(kept)} of {len(problem.nodes)} nodes kept their strategy in each elimination"
        since = 0 if arena.best.objective_s < before_s else since + 1


solve = searcher(_eliminate)
"""The frontier's fastest point within the limit, or the hint; see `jaxplan.search.base.Search`."""


def _given_up(problem: StrategyProblem, joint: int, random: np.random.Generator) -> list[int]:
    """Nodes without which no elimination is over more than `joint` choices, that one always first whose is smallest."""
    sizes = [node.costs_s.size for node in problem.nodes]
    beside: list[set[int]] = [set() for _ in sizes]
    for edge in problem.edges:
        beside[edge.tail].add(edge.head)
        beside[edge.head].add(edge.tail)
    # logarithms: products of many sizes have no room in a float
    weigh = [math.log(size) for size in sizes]

    def table(node: int) -> float:
        return weigh[node] + sum(weigh[other] for other in beside[node])

    tables = {node: table(node) for node in range(len(sizes))}
    given_up = []
    while tables:
        node = min(tables, key=lambda v: (tables[v], v))
        eliminated = tables[node] <= math.log(joint)
        if not eliminated:
            left = sorted(tables)
            node = max((left[i] for i in random.integers(len(left), size=CANDIDATES)), key=lambda v: tables[v])
            given_up.append(node)
        del tables[node]
        around = beside[node]
        for other in around:
            beside[other].discard(node)
            if eliminated:
                beside[other] |= around - {other}
        for other in around:
            tables[other] = table(other)
    return given_up
