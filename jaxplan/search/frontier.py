"""FT: the frontier of step time and peak memory by exact variable elimination over frontier tables.

Every factor of the problem (a node's costs, an edge's matrix) is a table of frontiers, at first of one point each.  A
node is eliminated by adding up the tables that it occurs in and keeping, for every joint choice of its neighbours, the
(seconds, bytes) that no other choice of it beats in both: TensorOpt's node, edge, branch, triangle and star rules
(arXiv 2004.10856) are the cases of it with one to several neighbours.  Memory is always part of dominance.

Memory is a peak over time steps, not one sum: a point carries the bytes at the steps `rows`, and its peak over them is
at most the true one.  Steps are added where the true peak of a found point is higher, until none is or there are
`MOST_ROWS`.  With `width` > 0 points of almost equal bytes are merged; each carries the fewest bytes that it may stand
for.  So two things are known of every budget: a plan that keeps it (its peak evaluated on all steps), and how fast no
plan can be that does (`Tradeoff.bound_at`), from the same tables.
"""

from __future__ import annotations

import math

import numpy as np

from ..errors import SolverError
from .evaluate import Evaluator
from .frontier_elimination import MOST_SUMS, Elimination, Points, Rows, assignments_of
from .known import Tradeoff, TradeoffPoint, staircase
from .problem import StrategyProblem
from .reduce import reduce

#: Time steps that a point carries; dominance in so many rows is rare, so frontiers grow with each.
MOST_ROWS = 3

def trace_frontier(
    problem: StrategyProblem, *, width: float = 0.0, most_rows: int = MOST_ROWS, most_sums: int = MOST_SUMS,
    deadline: float = math.inf,
) -> Tradeoff:  # fmt: skip
    """The frontier of a problem; its `limit_bytes` is not looked at.

    Args:
      width: points whose bytes differ by a smaller factor than 1 + width are merged.
      most_rows: time steps that the tables may carry; most_sums: of two points, that making one table may take.
      deadline: no table is begun after it, in `time.monotonic` seconds.

    Raises:
      TooWide: the problem's graph is too dense for tables.  SolverError: no assignment is possible.  OutOfTime: the
        deadline came first.
    """
    reduction = reduce(problem, for_peak=True)
    if reduction.infeasible:
        raise SolverError(reduction.infeasible)
    small, evaluate, evaluate_small = reduction.problem, Evaluator(problem), Evaluator(reduction.problem)
    steps: list[int] = []
    found: dict[tuple[int, ...], TradeoffPoint] = {}
    while True:
        rows = Rows(small, evaluate_small.times[steps] if steps else np.zeros(0, np.int64))
        final, largest = Elimination(small, rows, width, most_sums=most_sums, deadline=deadline).run()
        over: dict[int, int] = {}
        every = np.arange(final.points.seconds.size)
        for index, assignment in enumerate(assignments_of(final, every, len(small.nodes)).tolist()):
            alive = evaluate_small.timeline_bytes(assignment)
            excess = int(alive.max(initial=0)) - int(final.points.bytes[index].max(initial=0))
            if excess > 0:
                step = int(np.argmax(alive))
                over[step] = max(over.get(step, 0), excess)
            lifted = reduction.lift(assignment)
            result = evaluate(lifted)
            found[lifted] = TradeoffPoint(
                objective_s=result.objective_s, peak_bytes=result.peak_bytes, assignment=lifted
            )
        if not over or len(steps) == most_rows:
            points = staircase(found.values())
            return Tradeoff(points=points, floor=_floor(final.points), rows=len(steps), largest=largest)
        steps.append(max(sorted(over), key=lambda step: over[step]))


def _floor(points: Points) -> tuple[tuple[int, float], ...]:
    """How fast an assignment can be at most, by the fewest bytes that any may need for it."""
    least = points.low.max(axis=1, initial=0)
    steps: list[tuple[int, float]] = []
    for index in np.lexsort((points.seconds, least)):
        if not steps or points.seconds[index] < steps[-1][1]:
            steps.append((int(least[index]), float(points.seconds[index])))
    return tuple(steps)
