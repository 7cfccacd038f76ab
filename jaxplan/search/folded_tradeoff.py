"""The frontier of a folded problem: nodes that are alike decide once, as often as they are there (folds.py).

What comes out is the frontier of all assignments in which they choose alike, and its bounds are of these.  Layers that
may differ lie between its points, and may be faster in the same memory: by how much at most is bounded beside it,
within some budgets, from messages and prices that all nodes of a kind share (lifted.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from .base import Incumbent
from .evaluate import Evaluator
from .folds import DEPTHS, Folds
from .known import Floor, Known, Tradeoff, TradeoffPoint, Weigh, staircase
from .lifted import LiftedAscent, ascend
from .reduce import reduce
from .tradeoff import tradeoff

#: Budgets, from point to point along the frontier, within which layers that differ are bounded with prices on memory.
BOUNDED = 4


def folded_tradeoff(
    folds: Folds,
    *,
    eps: float,
    time_limit_s: float,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
    weigh: Weigh | None = None,
) -> tuple[Tradeoff, str] | None:
    """As `tradeoff`, of what a problem has with nodes that are alike choosing alike; `Tradeoff.apart` bounds all of it.

    None where the problem does not fold, or where nodes that are alike can't choose alike.
    """
    deadline = time.monotonic() + time_limit_s
    tied = folds.tied(DEPTHS[0], None)
    if tied is None:
        return None
    lift = tied.lift
    found, method = tradeoff(
        tied.problem, eps=eps, time_limit_s=time_limit_s, seed=seed, say=say,
        weigh=weigh and (lambda assignment: weigh(lift(assignment))),
    )  # fmt: skip
    judge, points = Evaluator(folds.problem), list[TradeoffPoint]()
    for point in found.points:
        lifted = tied.lift(point.assignment)
        result = judge(lifted)
        points.append(
            TradeoffPoint(objective_s=result.objective_s, peak_bytes=result.peak_bytes, assignment=lifted)
        )
    found = replace(found, points=staircase(points))
    if found.points:
        found = replace(found, apart=_apart(folds, found, eps, deadline))
    return found, f"{method}, layers that repeat cut alike"


def _apart(folds: Folds, found: Tradeoff, eps: float, deadline: float) -> tuple[tuple[int, float], ...]:
    """The floor of all assignments: free of prices, and at the prices that bytes have within some budgets."""
    # compiled code, and what compiles it, are loaded by those who need them
    from .branches import Branch

    tied = folds.tied(DEPTHS[0], None)
    assert tied is not None
    known = Known(folds.problem, eps)
    for point in found.points:
        known.note(point.assignment)
    reduction = reduce(tied.problem, for_peak=True)
    last = len(found.points) - 1
    chosen = sorted({round(last * part / (BOUNDED - 1)) for part in range(BOUNDED)}, reverse=True)
    by_byte: dict[int, float] = {}
    budgets: list[TradeoffPoint | None] = [None, *(found.points[index] for index in chosen)]
    for within in budgets:
        limit = known.top_bytes if within is None else within.peak_bytes
        prices: dict[int, float] = {}
        if within is not None:
            if time.monotonic() > deadline:
                break
            priced = Branch(reduction.problem, limit, by_byte=by_byte, best_s=within.objective_s)
            by_byte = priced.by_byte
            prices = {int(reduction.time_steps[row]): price for row, price in by_byte.items()}
            if not prices:
                continue
        best = Incumbent(replace(folds.problem, limit_bytes=limit))
        best.offer((within or found.points[-1]).assignment)
        quotient = folds.quotient(DEPTHS[0], limit)
        assert quotient is not None
        ascend(LiftedAscent(quotient, prices), best, eps, deadline if within is not None else math.inf)
        known.floors.append(Floor(limit=limit, target_s=best.bound_s, price_s=sum(prices.values())))
    return known.tradeoff(0, rows=0, largest=0).floor
