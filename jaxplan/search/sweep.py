"""The frontier of step time and peak memory by searches under ever other budgets, where tables would be too wide.

A search under a budget finds a point and proves that no smaller budget allows anything faster than its bound.  Between
two neighbours on the frontier, a rectangle is open: of bytes, and of seconds.  The widest rectangle is cut first, by a
search under a budget in its middle (geometrically), so that the sweep can be stopped at any time: what it has is a
frontier, and `Tradeoff.regret_bound` says how far from the true one it can be.  No rectangle narrower than `eps` in
bytes or in seconds is cut.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from .base import SearchResult
from .evaluate import Evaluator
from .frontier import Tradeoff, TradeoffPoint, staircase
from .problem import StrategyProblem

BudgetSearch = Callable[[StrategyProblem, tuple[int, ...]], SearchResult]
"""(a problem with its limit, an assignment to start from or ()) -> the search's result."""


def sweep_frontier(
    problem: StrategyProblem,
    search: BudgetSearch,
    least: SearchResult,
    *,
    eps: float = 1e-3,
    time_limit_s: float | None = None,
    known: Tradeoff | None = None,
    known_from: int = 0,
    on_point: Callable[[int, float], None] | None = None,
) -> Tradeoff:
    """The frontier of a problem; its `limit_bytes` is not looked at.

    Args:
      search: an exact search; least: what `least_peak` found.
      eps: neighbours whose bytes or seconds differ by a smaller factor than 1 + eps are not parted.
      time_limit_s: no search begins after it.
      known, known_from: a frontier that is whole for budgets over these bytes; nothing is searched for there.
      on_point: told the number of searches so far and the width of the widest open rectangle, after each.
    """
    deadline = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    evaluate = Evaluator(replace(problem, limit_bytes=None))
    points: list[TradeoffPoint] = []
    bounds: dict[float, float] = {}
    searched = 0

    def note(assignment: tuple[int, ...]) -> TradeoffPoint:
        found = evaluate(assignment)
        points.append(
            TradeoffPoint(objective_s=found.objective_s, peak_bytes=found.peak_bytes, assignment=assignment)
        )
        return points[-1]

    def ask(limit_bytes: int | None, start: tuple[int, ...]) -> None:
        nonlocal searched
        result = search(replace(problem, limit_bytes=limit_bytes), start)
        searched += 1
        if result.assignment:
            note(result.assignment)
            bounds[math.inf if limit_bytes is None else limit_bytes] = result.bound_s

    if known is None:
        ask(None, ())
    else:
        points += known.points
        for point in known.points:
            if point.peak_bytes > known_from:
                bounds[point.peak_bytes - 1] = known.bound_at(point.peak_bytes - 1)
        bounds[known_from] = known.bound_at(known_from)
        bounds[math.inf] = known.bound_at(max((p.peak_bytes for p in points), default=0))
    if not points or not least.assignment:
        return Tradeoff(points=(), floor=(), rows=0, largest=0)
    smallest = note(least.assignment)
    # many meet the least peak; of them the cheapest is wanted
    ask(smallest.peak_bytes, smallest.assignment)
    while time.monotonic() < deadline:
        front = staircase(points)
        gaps = [gap for pair in itertools.pairwise(front) if (gap := _gap(*pair, bounds)).is_open(eps)]
        widest = max(gaps, key=lambda gap: (gap.width, gap.low_bytes), default=None)
        if on_point is not None:
            on_point(searched, widest.width if widest else 0.0)
        if widest is None:
            break
        ask(widest.middle, widest.start)
    floor = _floor(bounds)
    if known is not None:
        floor = _higher(known, Tradeoff(points=(), floor=floor, rows=0, largest=0))
    return Tradeoff(points=staircase(points), floor=floor, rows=0, largest=0)


@dataclass(frozen=True)
class _Gap:
    """What is not known between two neighbours: budgets over `low_bytes` and under `high_bytes` allow something
    between `fast_s` and `slow_s`.  `start` is an assignment within every one of them.
    """

    low_bytes: int
    high_bytes: int
    fast_s: float
    slow_s: float
    start: tuple[int, ...]

    def is_open(self, eps: float) -> bool:
        wide = self.high_bytes - self.low_bytes > 1 and self.high_bytes > (1 + eps) * self.low_bytes
        return wide and self.slow_s > (1 + eps) * self.fast_s

    @property
    def width(self) -> float:
        """The area, both sides as ratios."""
        seconds = math.log(self.slow_s / self.fast_s) if self.fast_s > 0 else math.inf
        return seconds * math.log(self.high_bytes / max(self.low_bytes, 1))

    @property
    def middle(self) -> int:
        middle = int(math.sqrt(max(self.low_bytes, 1)) * math.sqrt(self.high_bytes))
        return min(max(middle, self.low_bytes + 1), self.high_bytes - 1)


def _gap(slow: TradeoffPoint, fast: TradeoffPoint, bounds: Mapping[float, float]) -> _Gap:
    # a budget that was asked about brought nothing better than the slow one
    asked = max((limit for limit in bounds if slow.peak_bytes <= limit < fast.peak_bytes), default=0)
    low = max(int(asked), slow.peak_bytes)
    return _Gap(low, fast.peak_bytes, fast.objective_s, slow.objective_s, slow.assignment)


def _higher(one: Tradeoff, other: Tradeoff) -> tuple[tuple[int, float], ...]:
    """What both floors prove together."""
    steps: list[tuple[int, float]] = []
    for start in sorted({size for floor in (one.floor, other.floor) for size, _ in floor}):
        bound_s = max(known.bound_at(start) for known in (one, other) if known.floor and start >= known.floor[0][0])
        if not steps or bound_s < steps[-1][1]:
            steps.append((start, bound_s))
    return tuple(steps)


def _floor(bounds: Mapping[float, float]) -> tuple[tuple[int, float], ...]:
    """Steps (bytes, seconds): a bound proved for a budget holds for every smaller one."""
    steps: list[tuple[int, float]] = []
    start = 0
    for limit in sorted(bounds):
        bound_s = max(seconds for other, seconds in bounds.items() if other >= limit)
        if not steps or bound_s < steps[-1][1]:
            steps.append((start, bound_s))
        if math.isfinite(limit):
            start = int(limit) + 1
    return tuple(steps)
