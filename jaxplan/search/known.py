"""What is known of a frontier: points that were found, floors that were proved, and the gaps between the two.

A floor says of every budget that nothing within it is faster than so many seconds.  Where the fastest point found is
within `eps` of the highest floor, the frontier is known; the other budgets are gaps, whichever search left them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise

import numpy as np

from .base import SearchResult
from .evaluate import Evaluator
from .problem import Floats, Ints, StrategyProblem

BudgetSearch = Callable[[StrategyProblem, tuple[int, ...]], SearchResult]
"""(a problem with its limit, an assignment to start from or ()) -> the search's result."""

Weigh = Callable[[tuple[int, ...]], int]
"""An assignment -> bytes of its peak as it is simulated, with what the search does not count."""

#: Points that count more bytes than a budget: so many of the nearest are weighed against those within it.
NEAREST = 4

#: What float sums in another order can make of a cost, relatively.
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class TradeoffPoint:
    """An assignment that no other one found beats in both.

    Attributes:
      objective_s, peak_bytes: as `evaluate` finds them; assignment: of the problem asked about.
    """

    objective_s: float
    peak_bytes: int
    assignment: tuple[int, ...]


def staircase(points: Iterable[TradeoffPoint]) -> tuple[TradeoffPoint, ...]:
    """Those that no other one beats in both, by increasing peak."""
    kept: list[TradeoffPoint] = []
    for point in sorted(points, key=lambda p: (p.peak_bytes, p.objective_s, p.assignment)):
        if not kept or point.objective_s < kept[-1].objective_s:
            kept.append(point)
    return tuple(kept)


@dataclass(frozen=True, kw_only=True)
class Tradeoff:
    """The frontier.

    Attributes:
      points: by increasing peak, strictly; the objective strictly decreases.
      floor: (bytes, seconds) steps by increasing bytes: with a budget under the next step's bytes nothing is faster.
      rows, largest: how many time steps the tables carried, and the entries of the largest; 0 of a sweep.
      grain_bytes: budgets that differ by no more were not told apart.
      spent_bytes: up to here no more was looked for: what counts so little needs more than faster ones; -1: nowhere.
      apart: None, or the floor is of assignments in which nodes that are alike choose alike, and this is that of all.
    """

    points: tuple[TradeoffPoint, ...]
    floor: tuple[tuple[int, float], ...]
    rows: int
    largest: int
    grain_bytes: int = 0
    spent_bytes: int = -1
    apart: tuple[tuple[int, float], ...] | None = None

    def at_memory(self, budget_bytes: int) -> TradeoffPoint | None:
        """The fastest point within a budget; None when none is."""
        position = bisect_right([point.peak_bytes for point in self.points], budget_bytes)
        return self.points[position - 1] if position else None

    def bound_at(self, budget_bytes: float) -> float:
        """Seconds that no assignment within a budget is under; infinite when nothing is within it."""
        return _bound_at(self.floor, budget_bytes)

    @property
    def regret_bound(self) -> float:
        """At most how much slower, relatively, a point is than the optimum of any budget for which it is the fastest
        (0: all exact); budgets less than a grain under the next point's peak are not told from it.
        """
        return max(self.regrets, default=0.0)

    @property
    def regrets(self) -> tuple[float, ...]:
        """The same of each point by itself."""
        return self._regrets(self.floor)

    @property
    def apart_regrets(self) -> tuple[float, ...] | None:
        """The same against all assignments where the floor is not of all of them."""
        return None if self.apart is None else self._regrets(self.apart)

    def thinned(self, eps: float) -> Tradeoff:
        """Without the points that are not missed by more than `eps`, relatively.

        Those beside which a smaller one is, at every budget, at most so much slower than what is proved; and those
        within half a grain of the next that may be slower than they need be, beside which nothing was looked for.  The
        fastest stays, and what is left of the small end.
        """
        parted = list(self.points[-1:])
        for point in reversed(self.points[:-1]):
            near = parted[-1].peak_bytes - point.peak_bytes <= self.grain_bytes // 2
            if not near or point.objective_s <= (1 + eps) * self.bound_at(point.peak_bytes):
                parted.append(point)
        smallest, *others = reversed(parted)
        kept = [smallest]
        for point, after in pairwise(others):
            if kept[-1].objective_s > (1 + eps) * self.bound_at(after.peak_bytes - 1):
                kept.append(point)
        return replace(self, points=(*kept, *others[-1:]))

    def _regrets(self, floor: tuple[tuple[int, float], ...]) -> tuple[float, ...]:
        found, ends = list[float](), [point.peak_bytes - 1 - self.grain_bytes for point in self.points[1:]]
        for point, budget in zip(self.points, [*ends, math.inf], strict=True):
            bound_s = _bound_at(floor, budget) if budget >= point.peak_bytes else point.objective_s
            worse_s = max(point.objective_s - bound_s, 0.0)
            found.append(worse_s / bound_s if bound_s > 0 else math.inf if worse_s else 0.0)
        return tuple(found)


def _bound_at(floor: tuple[tuple[int, float], ...], budget_bytes: float) -> float:
    position = bisect_right([size for size, _ in floor], budget_bytes)
    return floor[position - 1][1] if position else math.inf


@dataclass(frozen=True, kw_only=True)
class Floor:
    """What one search proves of every budget up to `limit`.

    Nothing within a budget is faster than both the steps say and `target_s + price_s * (limit - budget)`.

    Attributes:
      sizes, seconds: of the steps, ascending and descending: nothing under `sizes[i + 1]` bytes beats `seconds[i]`.
    """

    limit: int
    target_s: float
    price_s: float = 0.0
    sizes: Floats = field(default_factory=lambda: np.zeros(0))
    seconds: Floats = field(default_factory=lambda: np.zeros(0))

    def at(self, budgets: Floats | Ints) -> Floats:
        """Seconds that nothing within each budget is under; -inf where this says nothing."""
        line = self.target_s + self.price_s * (self.limit - budgets)
        step = np.searchsorted(self.sizes, budgets, side="right") - 1
        table = np.where(step >= 0, np.append(self.seconds, math.inf)[step], math.inf)
        return np.where(budgets <= self.limit, np.minimum(line, table), -math.inf)


@dataclass(frozen=True)
class AnyOf:
    """What is proved of every budget up to `limit` where each floor speaks of one part of what there is."""

    limit: int
    floors: tuple[Floor, ...]

    @property
    def sizes(self) -> Floats:
        """Where any of the floors steps."""
        return np.concatenate([floor.sizes for floor in self.floors])

    def at(self, budgets: Floats | Ints) -> Floats:
        """Seconds that nothing within each budget is under; -inf where this says nothing."""
        found = np.where(budgets <= self.limit, math.inf, -math.inf)
        limit, target_s, price_s = self._lines
        if limit.size:
            lines = target_s + price_s * (limit - np.asarray(budgets)[:, None])
            found = np.minimum(found, np.where(np.asarray(budgets)[:, None] <= limit, lines, -math.inf).min(axis=1))
        for floor in self.floors:
            if floor.sizes.size:
                found = np.minimum(found, floor.at(budgets))
        return found

    @cached_property
    def _lines(self) -> tuple[Floats, Floats, Floats]:
        """Limit, target and price of the floors that have no steps: all that those say is a line."""
        lines = [(one.limit, one.target_s, one.price_s) for one in self.floors if not one.sizes.size]
        limit, target_s, price_s = np.array(lines, dtype=np.float64).reshape(-1, 3).T
        return limit, target_s, price_s


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Budgets from `low_bytes` to `high_bytes`, both among them, of which more is not known than that their optimum is
    between `fast_s` and `slow_s`.  `start` is an assignment within every one of them.
    """

    low_bytes: int
    high_bytes: int
    fast_s: float
    slow_s: float
    start: tuple[int, ...]

    @property
    def width(self) -> float:
        """The area: bytes, times the seconds as a ratio."""
        seconds = math.log(self.slow_s / self.fast_s) if self.fast_s > 0 else math.inf
        return seconds * (self.high_bytes - self.low_bytes + 1)


class Known:
    """The points found and the floors proved so far of one problem, whose own limit is left aside.

    Attributes:
      top_bytes: more than this nothing needs; whole: whether tables over the whole problem were made.
      spent_bytes: up to here nothing is looked for any more (see `spend`); -1: nowhere.
    """

    def __init__(self, problem: StrategyProblem, eps: float, weigh: Weigh | None = None) -> None:
        self.problem, self.eps = problem, eps
        self._weigh, self.spent_bytes = weigh and cache(weigh), -1
        self.top_bytes = _most_bytes(problem)
        self.points: dict[tuple[int, ...], TradeoffPoint] = {}
        self.floors: list[Floor | AnyOf] = []
        self.whole = False
        self._front: tuple[TradeoffPoint, ...] = ()
        self._new: list[TradeoffPoint] = []
        self._evaluate = Evaluator(replace(problem, limit_bytes=None))

    def note(self, assignment: tuple[int, ...]) -> TradeoffPoint:
        """Keep a point."""
        if assignment not in self.points:
            found = self._evaluate(assignment)
            point = TradeoffPoint(
                objective_s=found.objective_s, peak_bytes=found.peak_bytes, assignment=assignment
            )
            self.points[assignment] = point
            self._new.append(point)
        return self.points[assignment]

    def add(self, found: Tradeoff) -> None:
        """Take over what tables over the whole problem found and proved."""
        self.whole = True
        for point in found.points:
            self.note(point.assignment)
        sizes, seconds = (np.array(column, dtype=np.float64) for column in zip(*found.floor, strict=True))
        self.floors.append(Floor(limit=self.top_bytes, target_s=math.inf, sizes=sizes, seconds=seconds))

    def ask(self, search: BudgetSearch, limit_bytes: int | None, start: tuple[int, ...]) -> None:
        """Search within one budget (None: any); what it finds is noted, what it proves is a floor."""
        result = search(replace(self.problem, limit_bytes=limit_bytes), start)
        limit = self.top_bytes if limit_bytes is None else limit_bytes
        self.floors.append(Floor(limit=limit, target_s=result.bound_s))
        if result.found:
            self.note(result.assignment)

    def spend(self, limit_bytes: int, rough: BudgetSearch) -> bool:
        """Whether what is within a budget is worth no search; then nothing is looked for there from now on.

        That is no proof: what is known there is beaten once it is weighed, and so is what a rough search finds besides.
        """
        if self._beaten(limit_bytes):
            within = bisect_right(self.front(), limit_bytes, key=lambda point: point.peak_bytes)
            self.ask(rough, limit_bytes, self.front()[within - 1].assignment)
            if self._beaten(limit_bytes):
                self.spent_bytes = max(self.spent_bytes, limit_bytes)
        return limit_bytes <= self.spent_bytes

    def _beaten(self, limit_bytes: int) -> bool:
        """Whether the smallest and the fastest point within a budget weigh no less than a faster one over it."""
        front = self.front()
        within = bisect_right(front, limit_bytes, key=lambda point: point.peak_bytes)
        if self._weigh is None or within in (0, len(front)):
            return False
        least = min(self._weigh(point.assignment) for point in {front[0], front[within - 1]})
        return any(self._weigh(point.assignment) <= least for point in front[within : within + NEAREST])

    def front(self) -> tuple[TradeoffPoint, ...]:
        """The points that no other one beats."""
        if self._new:
            # what is beaten once stays so: only what came since is laid beside the others
            self._front, self._new = staircase([*self._front, *self._new]), []
        return self._front

    @property
    def span_bytes(self) -> int:
        """What lies between the ends of the frontier."""
        front = self.front()
        return front[-1].peak_bytes - front[0].peak_bytes if front else 0

    @property
    def grain_bytes(self) -> int:
        """Budgets that differ by no more are not told apart: half of what is promised, the other half is for points
        that are left out in the end, see `Tradeoff.thinned`.
        """
        return int(self.eps * self.span_bytes / 2)

    def at(self, budgets: Ints) -> Floats:
        """Seconds that nothing within each budget is under."""
        return np.max(
            [np.full(budgets.size, -math.inf), *(floor.at(budgets) for floor in self.floors)], axis=0
        )

    def gaps(self) -> list[Gap]:
        """What is not known, by increasing budget; nothing that is narrower than a grain, or than `eps` in seconds, nor
        what is spent.
        """
        front = self.front()
        if not front:
            return []
        slow = np.array([point.objective_s for point in front])
        low = np.array([point.peak_bytes for point in front], dtype=np.int64)
        high = np.append(low[1:] - 1, max(self.top_bytes, int(low[-1])))
        known_s = (slow - ROUNDING * np.abs(slow)) / (1 + self.eps)
        fast = self.at(high)
        # floors fall with the budget: the smallest one whose floor is too low, by halves
        under, over = low - 1, high.copy()
        for _ in range(int((over - under).max()).bit_length()):
            middle = under + (over - under) // 2
            is_open = self.at(middle) < known_s
            over, under = np.where(is_open, middle, over), np.where(is_open, under, middle)
        first = np.maximum(over, low)
        grain = self.grain_bytes
        # whatever is within a grain of the next point may be that point
        wide = np.append((high - first + 1)[:-1] > grain, True)
        return [
            Gap(
                low_bytes=int(first[i]), high_bytes=int(high[i]), fast_s=float(fast[i]), slow_s=float(slow[i]),
                start=front[i].assignment,
            )
            for i in np.flatnonzero((fast < known_s) & wide & (high > self.spent_bytes))
        ]  # fmt: skip

    def best_at(self, budget_bytes: int) -> float:
        """Seconds of the fastest point found within a budget; infinite without one."""
        front = self.front()
        position = bisect_right(front, budget_bytes, key=lambda point: point.peak_bytes)
        return front[position - 1].objective_s if position else math.inf

    def slack_at(self, budget_bytes: int) -> float:
        """How much slower, relatively, the fastest point found within a budget is than what is proved."""
        best_s, floor_s = self.best_at(budget_bytes), float(self.at(np.array([budget_bytes]))[0])
        best_s -= ROUNDING * abs(best_s)
        return max(best_s / floor_s - 1, 0.0) if floor_s > 0 else math.inf if best_s > floor_s else 0.0

    def gap_at(self, budget_bytes: int) -> Gap | None:
        """The gap that a budget is in."""
        return next((gap for gap in self.gaps() if gap.low_bytes <= budget_bytes <= gap.high_bytes), None)

    def tradeoff(self, least_bytes: int, *, rows: int, largest: int) -> Tradeoff:
        """All of it; nothing is within less than `least_bytes`."""
        front, grain = self.front(), 2 * self.grain_bytes
        sizes = {least_bytes}
        for point in front:
            sizes |= {point.peak_bytes, point.peak_bytes - grain}
        for floor in self.floors:
            sizes |= {floor.limit + 1, *floor.sizes.astype(np.int64).tolist()}
        most = max(self.top_bytes, least_bytes)
        starts = np.array(sorted(size for size in sizes if least_bytes <= size <= most), dtype=np.int64)
        # of all budgets from one start to the next, the largest allows most
        proved = self.at(np.append(starts[1:] - 1, most))
        steps: list[tuple[int, float]] = []
        for start, bound_s in zip(starts.tolist(), proved.tolist(), strict=True):
            if not steps or bound_s < steps[-1][1]:
                steps.append((int(start), bound_s))
        return Tradeoff(points=front, floor=tuple(steps), rows=rows, largest=largest, grain_bytes=grain)


def _most_bytes(problem: StrategyProblem) -> int:
    """The peak if every usage were at its largest: more than any assignment's."""
    change: dict[int, int] = {}
    for usage in problem.usages:
        most = int(usage.bytes.max())
        change[usage.start] = change.get(usage.start, 0) + most
        change[usage.stop] = change.get(usage.stop, 0) - most
    alive, peak = 0, 0
    for step in sorted(change):
        alive += change[step]
        peak = max(peak, alive)
    return peak
