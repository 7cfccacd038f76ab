"""FT on real problems: the frontier stretch by stretch, each by elimination over what can still lead there.

Frontier tables (frontier.py) over all strategies of a real program would be too wide.  But a bound on the cost within a
budget rules most of them out: with prices on memory and costs shifted against each other (dual.py) no node, pair or
byte costs less than nothing beside the bound, so that what lies on the frontier within the budget and at most a
little over the bound consists of strategies that cost at most that little, and so do all of its parts.  The strategies
that are left are few, tables over them small, and a point that has spent more is not carried on.  What comes out is
every point of that stretch.  The next one begins under its smallest peak, down to the least of all.

The stretch's length is chosen as it goes: shorter after tables that were too wide, longer after quick ones.
Where even the shortest is too wide the walk ends, and searches under budgets (sweep.py) go on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .base import SearchResult
from .dual import DualAscent
from .evaluate import Evaluator
from .frontier import (
    Elimination,
    NoAssignment,
    Rows,
    Slack,
    Table,
    TooWide,
    Tradeoff,
    TradeoffPoint,
    assignment_of,
    staircase,
)
from .problem import Floats, StrategyProblem
from .program import OutOfTime
from .reduce import Reduction, reduce

BudgetSearch = Callable[[StrategyProblem, tuple[int, ...]], SearchResult]
"""(a problem with its limit, an assignment to start from or ()) -> the search's result."""

#: Sweeps at each price, and prices that are tried for a stretch.
SWEEPS, PRICES = 40, 10

#: Time steps that the tables of a stretch carry; points that are over their budget at others are not of the stretch.
MOST_ROWS = 3

#: Sums of two points that a table of a stretch may take: some tenths of a second.
MOST_SUMS = 10_000_000

#: Of the least peak that is given, relatively.
LEAST_GAP = 1e-3

#: Bounds under this share of what the smallest peak costs are no measure of a stretch.
LEAST_UNIT = 0.01

#: The first stretch, as a share of its bound; the factor to a longer one, after fewer sums than these, and the longest;
#: the factor to a shorter one, and the shortest that is tried.
FIRST, LONGER, FEW_SUMS, LONGEST, SHORTER, SHORTEST = 0.02, 2.0, 3_000_000, 0.3, 0.2, 5e-4


@dataclass(frozen=True, kw_only=True)
class _Floor:
    """What one stretch or search proves of every budget up to `limit`.

    Nothing within a budget is faster than both the steps say and `target_s + price_s * (limit - budget)`.

    Attributes:
      sizes, seconds: of the steps, ascending and descending: nothing under `sizes[i + 1]` bytes beats `seconds[i]`.
    """

    limit: int
    target_s: float
    price_s: float = 0.0
    sizes: Floats = field(default_factory=lambda: np.zeros(0))
    seconds: Floats = field(default_factory=lambda: np.zeros(0))

    def at(self, budgets: Floats) -> Floats:
        """Seconds that nothing within each budget is under; -inf where this says nothing."""
        line = self.target_s + self.price_s * (self.limit - budgets)
        step = np.searchsorted(self.sizes, budgets, side="right") - 1
        table = np.where(step >= 0, np.append(self.seconds, math.inf)[step], math.inf)
        return np.where(budgets <= self.limit, np.minimum(line, table), -math.inf)


def walk_frontier(
    problem: StrategyProblem,
    search: BudgetSearch,
    least: SearchResult,
    *,
    eps: float = 1e-3,
    deadline: float = math.inf,
    on_stretch: Callable[[int, int], None] | None = None,
) -> tuple[Tradeoff, int]:
    """The frontier of a problem, and the budget from which on downwards it is not whole (0: it is); no limit is kept.

    Args:
      search: an exact search; least: what `least_peak` found.
      eps: points whose bytes differ by a smaller factor than 1 + eps are merged.
      deadline: no stretch begins after it, in `time.monotonic` seconds; the small end is found in any case.
      on_stretch: told the number of points so far and the budget that is next, after each stretch.
    """
    reduction = reduce(problem, for_peak=True)
    if reduction.infeasible or not least.assignment:
        return Tradeoff(points=(), floor=(), rows=0, largest=0), 0
    stretches = _Stretches(problem, reduction, search, eps, deadline)
    smallest = stretches.note(least.assignment).peak_bytes
    # the fastest of the smallest peak; the other end is the first stretch's
    stretches.ask(smallest, least.assignment)
    slowest_s = min(p.objective_s for p in stretches.points.values() if p.peak_bytes == smallest)
    stretches.unit_s = max(abs(slowest_s) * LEAST_UNIT, math.ulp(1.0))
    limit = stretches.top_bytes
    while limit >= smallest:
        following = stretches.next_limit(limit)
        if following == limit:
            break
        limit = following
        if on_stretch is not None:
            on_stretch(len(staircase(stretches.points.values())), limit)
    found = Tradeoff(
        points=staircase(stretches.points.values()), floor=stretches.floor(smallest), rows=stretches.rows_carried,
        largest=stretches.largest,
    )  # fmt: skip
    return found, limit if limit >= smallest else 0


class _Stretches:
    """The points found so far and what is proved of the others."""

    def __init__(
        self,
        problem: StrategyProblem,
        reduction: Reduction,
        search: BudgetSearch,
        eps: float,
        deadline: float,
    ) -> None:
        self.problem, self.reduction, self.search, self.eps, self.deadline = (
            problem,
            reduction,
            search,
            eps,
            deadline,
        )
        self.small, self.evaluate = reduction.problem, Evaluator(replace(problem, limit_bytes=None))
        self.top_bytes = sum(int(usage.bytes.max()) for usage in self.small.usages)
        self.points: dict[tuple[int, ...], TradeoffPoint] = {}
        self.floors: list[_Floor] = []
        self.share, self.rows = FIRST, list[int]()
        self.rows_carried, self.largest, self.sums = 0, 0, 0
        self.unit_s = 0.0  # what a stretch is a share of, where its bound is less
        self._judge = Evaluator(self.small)
        self._by_byte = 0.0  # price of the stretch before

    def note(self, assignment: tuple[int, ...]) -> TradeoffPoint:
        """Keep a point."""
        if assignment not in self.points:
            found = self.evaluate(assignment)
            self.points[assignment] = TradeoffPoint(
                objective_s=found.objective_s, peak_bytes=found.peak_bytes, assignment=assignment
            )
        return self.points[assignment]

    def ask(self, limit: int, start: tuple[int, ...]) -> int | None:
        """Search one budget; the peak of what was found."""
        result = self.search(replace(self.problem, limit_bytes=limit), start)
        self.floors.append(_Floor(limit=limit, target_s=result.bound_s))
        return self.note(result.assignment).peak_bytes if result.assignment else None

    def next_limit(self, limit: int) -> int:
        """Find the stretch within a limit; the limit of the next one, the same where this one can't be found."""
        dual = DualAscent(replace(self.small, limit_bytes=max(limit, 1)))
        self._price(dual, limit)
        from_s = dual.bound_s()
        while time.monotonic() < self.deadline and self.share >= SHORTEST:
            target_s = from_s + self.share * max(abs(from_s), self.unit_s)
            try:
                found, floor = self._stretch(dual, limit, target_s)
            except TooWide:
                self.share *= SHORTER
                continue
            except OutOfTime:
                break
            self.floors.append(floor)
            if self.sums < FEW_SUMS:
                self.share = min(self.share * LONGER, LONGEST)
            left = _uncovered(found, floor, self.eps)
            if left < limit:
                return math.ceil((left + 1) / (1 + self.eps)) - 1
            from_s = target_s
        self.floors.append(_Floor(limit=limit, target_s=from_s))
        return limit

    def _price(self, dual: DualAscent, limit: int) -> None:
        """Raise the bound: one price, of the bytes at the time step that overflows most, as high as is best."""
        for _ in range(SWEEPS):
            chosen = dual.sweep()
        alive = self._judge.timeline_bytes(chosen.tolist())
        if alive.max(initial=0) <= limit:
            return
        row = int(self._judge.times[int(np.argmax(alive))])

        def bound_at(by_byte: float) -> float:
            dual.set_prices({row: by_byte * max(limit, 1)})
            for _ in range(SWEEPS):
                dual.sweep()
            return dual.bound_s()

        tried = {0.0: dual.bound_s()}
        by_byte = self._by_byte or self._chord(limit)
        tried[by_byte] = bound_at(by_byte)
        for _ in range(PRICES):
            best = max(tried, key=lambda price: tried[price])
            lower = max((price for price in tried if price < best), default=None)
            higher = min((price for price in tried if price > best), default=None)
            if higher is None:
                by_byte = best * 4 or self._chord(limit)
            else:
                # within the wider side of the best, by factors
                up, down = higher / best if best else 16.0, best / lower if lower else 16.0
                by_byte = higher / math.sqrt(up) if up >= down else best / math.sqrt(down)
            if by_byte in tried:
                break
            tried[by_byte] = bound_at(by_byte)
        self._by_byte = max(tried, key=lambda price: tried[price])
        for _ in range(4):
            bound_at(self._by_byte)

    def _chord(self, limit: int) -> float:
        """Seconds a byte between the fastest point known and that of the smallest peak."""
        front = staircase(self.points.values())
        slow, fast = front[0], front[-1]
        return (slow.objective_s - fast.objective_s) / max(fast.peak_bytes - slow.peak_bytes, 1)

    def _stretch(self, dual: DualAscent, limit: int, target_s: float) -> tuple[list[TradeoffPoint], _Floor]:
        """The points within a limit that are no slower than a target, and what is proved.

        Raises:
          TooWide: the tables would be.  OutOfTime: the deadline came first.
        """
        self.sums = 0
        price_s = sum(dual.price.values()) / max(limit, 1)
        nothing = _Floor(limit=limit, target_s=target_s, price_s=price_s)
        cut = dual.core(target_s)
        if cut is None:
            return [], nothing
        again = reduce(cut[0], for_peak=True)
        if again.infeasible:
            return [], nothing
        # with so much less to choose among, the bound of what is left is nearer, and costs lie on fewer nodes
        step_of = {int(step): position for position, step in enumerate(again.time_steps)}
        inner = DualAscent(replace(again.problem, limit_bytes=max(limit, 1)))
        inner.set_prices({step_of[row]: price for row, price in dual.price.items() if row in step_of})
        for _ in range(2 * SWEEPS):
            inner.sweep()
        price_s = sum(inner.price.values()) / max(limit, 1)
        nothing = replace(nothing, price_s=price_s)
        inside = inner.core(target_s)
        if inside is None:
            return [], nothing
        core, kept = inside
        part, lacking_s = inner.shifted(kept, core)

        def lift(assignment: Sequence[int]) -> list[int]:
            middle = again.lift([int(own[s]) for own, s in zip(kept, assignment, strict=True)])
            return [int(own[s]) for own, s in zip(cut[1], middle, strict=True)]

        rows = [row for row in dict.fromkeys([*dual.price, *self.rows]) if row in step_of][:MOST_ROWS]
        while True:
            carried = Rows(part, np.array([step_of[row] for row in rows], dtype=np.int64))
            by_row = np.array([inner.price.get(step_of[row], 0.0) / max(limit, 1) for row in rows])
            taken = carried.less_least()
            paid_s = taken @ by_row
            nodes = tuple(replace(n, costs_s=n.costs_s + s) for n, s in zip(part.nodes, paid_s, strict=True))
            slack = Slack(
                price_s=by_row,
                slack_s=target_s - inner.bound_s(),
                spare_bytes=np.int64(limit) - taken.sum(axis=0),
            )
            elimination = Elimination(
                replace(part, nodes=nodes), carried, self.eps, MOST_SUMS, self.deadline, slack
            )
            try:
                final, largest = elimination.run()
            except NoAssignment:
                return [], nothing
            self.sums += elimination.sums
            self.largest, self.rows_carried = max(self.largest, largest), max(self.rows_carried, len(rows))
            found, over = self._found(final, lift, len(part.nodes), limit)
            new = [row for row in over if row not in rows and row in step_of]
            if not new or len(rows) == MOST_ROWS:
                break
            rows.append(new[0])
        self.rows = rows
        least = (final.points.low + taken.sum(axis=0)).max(axis=1, initial=0)
        seconds = final.points.seconds + (lacking_s - paid_s.sum())
        order = np.lexsort((seconds, least))
        floor = replace(
            nothing, sizes=least[order].astype(np.float64), seconds=np.minimum.accumulate(seconds[order])
        )
        within = [p for p in found if p.objective_s <= target_s + price_s * (limit - p.peak_bytes)]
        return within, floor

    def _found(
        self, final: Table, lift: Callable[[Sequence[int]], list[int]], count: int, limit: int
    ) -> tuple[list[TradeoffPoint], list[int]]:
        """The points of the last table that keep the limit, and the time steps at which others do not, worst first.

        Args:
          lift: from an assignment of the tables' `count` nodes to one of the reduced problem.
        """
        found, over = [], dict[int, int]()
        for index in range(final.points.seconds.size):
            chosen = lift(assignment_of(final, index, count))
            point = self.note(self.reduction.lift(chosen))
            if point.peak_bytes <= limit:
                found.append(point)
                continue
            step = int(self._judge.times[int(np.argmax(self._judge.timeline_bytes(chosen)))])
            over[step] = max(over.get(step, 0), point.peak_bytes - limit)
        return found, sorted(over, key=lambda step: -over[step])

    def floor(self, smallest: int) -> tuple[tuple[int, float], ...]:
        """(bytes, seconds) steps of what is proved."""
        sizes = {smallest, *(point.peak_bytes for point in self.points.values())}
        for floor in self.floors:
            sizes |= {floor.limit + 1, *floor.sizes.astype(np.int64).tolist()}
        starts = np.array(
            sorted(size for size in sizes if smallest <= size <= self.top_bytes), dtype=np.float64
        )
        # of all budgets from one start to the next, the largest allows most
        budgets = np.append(starts[1:] - 1, self.top_bytes)
        proved = np.max([floor.at(budgets) for floor in self.floors], axis=0)
        steps: list[tuple[int, float]] = []
        for start, bound_s in zip(starts.tolist(), proved.tolist(), strict=True):
            if not steps or bound_s < steps[-1][1]:
                steps.append((int(start), bound_s))
        # the least peak is proved to within its own gap only
        return ((int(steps[0][0] * (1 - LEAST_GAP)), steps[0][1]), *steps[1:])


def _uncovered(found: Sequence[TradeoffPoint], floor: _Floor, eps: float) -> int:
    """The largest budget for which the fastest of the points found may be slower than another by more than `eps`."""
    budget = floor.limit
    for point in reversed(staircase(found)):
        if point.objective_s > (1 + eps) * (floor.target_s + floor.price_s * (floor.limit - budget)):
            break
        budget = point.peak_bytes - 1
    return budget
