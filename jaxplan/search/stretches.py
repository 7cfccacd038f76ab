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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from .dual import DualAscent
from .evaluate import Evaluator
from .frontier_elimination import Elimination, NoAssignment, Rows, Slack, Table, TooWide, assignment_of
from .known import BudgetSearch, Floor, Known
from .problem import Floats, Ints
from .program import OutOfTime
from .reduce import reduce

#: Sweeps at each price, and prices that are tried for a stretch.
SWEEPS, PRICES = 40, 10

#: Time steps that the tables of a stretch carry; points that are over their budget at others are not of the stretch.
MOST_ROWS = 3

#: Of two points that differ in seconds by less than this part of `eps` only the smaller one is looked at.
PARTED = 0.1

#: Within a table points are merged whose seconds differ by less than this part of `eps` of the whole, and of the slack:
#: over the hundreds of tables that a point is the sum of, what that hides adds up ...
MERGED, MERGED_SLACK = 0.005, 0.001

#: ... and whose bytes differ by less than this part of `eps`, of themselves and this part of what is between the ends.
MERGED_BYTES, MERGED_SPAN = 0.1, 0.03

#: Where what was hidden leaves a budget open, so much less is merged there, twice.
FINER = 0.1

#: Sums of two points that the tables of a stretch may take: some seconds.
MOST_SUMS = 30_000_000

#: Bounds under this share of what the smallest peak costs are no measure of a stretch.
LEAST_UNIT = 0.01

#: The first stretch, as a share of its bound; the factor to a longer one, after fewer sums than these, and the longest;
#: the factor to a shorter one, after more sums than these or too wide tables, and the shortest that is tried.
FIRST, LONGER, FEW_SUMS, LONGEST = 0.002, 3.0, 1_000_000, 0.3
SHORTER, MANY_SUMS, SHORTEST = 0.3, 5_000_000, 1e-4


def walk_frontier(
    known: Known,
    search: BudgetSearch,
    *,
    deadline: float = math.inf,
    on_stretch: Callable[[int, int], None] | None = None,
) -> Stretches:
    """Close the gaps of what is known of a frontier from the largest budget downwards, as far as tables and time go.

    Args:
      known: with the smallest peak among its points.
      search: an exact one, for single budgets that tables don't decide.
      deadline: no stretch begins after it, in `time.monotonic` seconds.
      on_stretch: told the number of points so far and the budget that is next, after each stretch.

    Returns what can go on with single budgets.
    """
    stretches = Stretches(known, deadline)
    while time.monotonic() < deadline and (gaps := known.gaps()):
        # what is within a grain of the next point is not told from it
        limit = max(gaps[-1].low_bytes, gaps[-1].high_bytes - known.grain_bytes)
        if not stretches.cover(limit):
            if time.monotonic() >= deadline:
                break
            known.ask(search, limit, gaps[-1].start)
            if known.gap_at(limit) is not None:
                break
        if on_stretch is not None:
            on_stretch(len(known.front()), limit)
    # the end itself, which no gap wider than a grain is left of
    smallest = known.front()[0].peak_bytes
    if time.monotonic() < deadline and known.slack_at(smallest) > known.eps:
        stretches.cover(smallest, alone=True)
    return stretches


class Stretches:
    """Tables over what can still lead to the points of a stretch, none begun after a deadline.

    `rows_carried` time steps at most were carried, `largest` entries are in the largest table (0: none was made).
    """

    def __init__(self, known: Known, deadline: float) -> None:
        self.known, self.deadline = known, deadline
        self.reduction = reduce(known.problem, for_peak=True)
        self.small = self.reduction.problem
        self.share, self.rows = FIRST, list[int]()
        self.rows_carried, self.largest, self.sums = 0, 0, 0
        self.merged = 1.0
        # what a stretch is a share of, where its bound is less
        self.unit_s = max(abs(known.front()[0].objective_s) * LEAST_UNIT, math.ulp(1.0))
        self._judge = Evaluator(self.small)
        self._by_byte: dict[int, float] = {}  # prices of the stretch before, by time step

    def cover(self, limit: int, *, alone: bool = False) -> bool:
        """Close the gap at a limit by the stretches from its bound on; whether that was done.

        `alone`: the point at the limit itself, though a grain's width of budgets is no gap.
        """

        def is_open() -> bool:
            known = self.known
            return known.slack_at(limit) > known.eps if alone else known.gap_at(limit) is not None

        dual = DualAscent(replace(self.small, limit_bytes=max(limit, 1)))
        self._price(dual, limit)
        from_s, wide_s, self.merged = dual.bound_s(), math.inf, 1.0
        while time.monotonic() < self.deadline:
            unit_s = max(abs(from_s), self.unit_s)
            # no farther than half the way to what was too wide
            target_s = min(from_s + self.share * unit_s, (from_s + wide_s) / 2)
            if target_s - from_s < SHORTEST * unit_s:
                break
            try:
                self.known.floors.append(self._stretch(dual, limit, target_s))
            except TooWide:
                self.share, wide_s = max(self.share * SHORTER, SHORTEST), target_s
                continue
            except OutOfTime:
                break
            if self.sums < FEW_SUMS:
                self.share = min(self.share * LONGER, LONGEST)
            elif self.sums > MANY_SUMS:
                self.share = max(self.share * SHORTER, SHORTEST)
            if not is_open():
                return True
            if target_s > self.known.best_at(limit):
                # merging hid it, or the tables left out a time step at which what they have is too large
                self.merged *= FINER
                if self.merged < FINER**2 / 2:
                    break
                continue
            from_s = target_s
        self.share = max(self.share, FIRST)
        self.known.floors.append(Floor(limit=limit, target_s=from_s))
        return False

    def _price(self, dual: DualAscent, limit: int) -> None:
        """Raise the bound by prices on the bytes at the time steps that overflow most, each as high as is best."""
        for _ in range(SWEEPS):
            chosen = dual.sweep()
        self._by_byte = {row: price for row, price in self._by_byte.items() if price}
        prices: dict[int, float] = {}
        for _ in range(MOST_ROWS):
            alive = self._judge.timeline_bytes(chosen.tolist())
            row = int(self._judge.times[int(np.argmax(alive))]) if alive.max(initial=0) > limit else -1
            if row < 0 or row in prices:
                break
            prices[row] = self._by_byte[row] = self._best_price(dual, limit, prices, row)
            self._bound_at(dual, limit, prices)
            for _ in range(3 * SWEEPS):
                chosen = dual.sweep()

    def _bound_at(self, dual: DualAscent, limit: int, prices: Mapping[int, float]) -> float:
        dual.set_prices({row: by_byte * max(limit, 1) for row, by_byte in prices.items()})
        for _ in range(SWEEPS):
            dual.sweep()
        return dual.bound_s()

    def _best_price(self, dual: DualAscent, limit: int, others: Mapping[int, float], row: int) -> float:
        """Of the bytes alive at a time step, beside the prices of others, seconds a byte: by ever smaller factors."""
        tried = {0.0: dual.bound_s()}
        by_byte = self._by_byte.get(row) or self._chord(limit)
        tried[by_byte] = self._bound_at(dual, limit, {**others, row: by_byte})
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
            tried[by_byte] = self._bound_at(dual, limit, {**others, row: by_byte})
        return max(tried, key=lambda price: tried[price])

    def _chord(self, limit: int) -> float:
        """Seconds a byte between the fastest point known and that of the smallest peak."""
        front = self.known.front()
        slow, fast = front[0], front[-1]
        return (slow.objective_s - fast.objective_s) / max(fast.peak_bytes - slow.peak_bytes, 1)

    def _stretch(self, dual: DualAscent, limit: int, target_s: float) -> Floor:
        """Note the points within a limit that are no slower than a target; what is proved.

        Raises:
          TooWide: the tables would be.  OutOfTime: the deadline came first.
        """
        self.sums = 0
        price_s = sum(dual.price.values()) / max(limit, 1)
        nothing = Floor(limit=limit, target_s=target_s, price_s=price_s)
        cut = dual.core(target_s)
        if cut is None:
            return nothing
        again = reduce(cut[0], for_peak=True)
        if again.infeasible:
            return nothing
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
            return nothing
        core, kept = inside
        part, lacking_s = inner.shifted(kept, core)

        def lift(assignment: Sequence[int]) -> list[int]:
            middle = again.lift([int(own[s]) for own, s in zip(kept, assignment, strict=True)])
            return [int(own[s]) for own, s in zip(cut[1], middle, strict=True)]

        rows = [row for row in dict.fromkeys([*dual.price, *self.rows]) if row in step_of][:MOST_ROWS]
        proved: Floor | None = None
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
            step_s = min(MERGED * self.known.eps * abs(target_s), MERGED_SLACK * slack.slack_s) * self.merged
            width = MERGED_BYTES * self.known.eps * self.merged
            base = max(1.0, MERGED_SPAN * self.known.span_bytes)
            elimination = Elimination(
                replace(part, nodes=nodes), carried, width, base=base, step_s=step_s,
                deadline=self.deadline, most_work=MOST_SUMS, slack=slack,
            )
            try:
                final, largest = elimination.run()
            except NoAssignment:
                return nothing
            except TooWide:
                if proved is None:
                    raise
                # with fewer time steps less is proved, but something
                return proved
            self.sums += elimination.sums
            self.largest, self.rows_carried = max(self.largest, largest), max(self.rows_carried, len(rows))
            seconds = final.points.seconds + (lacking_s - paid_s.sum())
            over = self._note(final, seconds, lift, len(part.nodes), taken.sum(axis=0))
            least = (final.points.low + taken.sum(axis=0)).max(axis=1, initial=0)
            early = final.points.early + (lacking_s - paid_s.sum())
            order = np.lexsort((early, least))
            proved = replace(
                nothing, sizes=least[order].astype(np.float64), seconds=np.minimum.accumulate(early[order])
            )
            new = [row for row in over if row not in rows and row in step_of]
            if not new or len(rows) == MOST_ROWS:
                self.rows = rows
                return proved
            rows.append(new[0])

    def _note(
        self, final: Table, seconds: Floats, lift: Callable[[Sequence[int]], list[int]], count: int, taken: Ints
    ) -> list[int]:
        """Note the points of the last table; the time steps at which some are larger than it says, the worst first.

        Args:
          seconds: what each point costs.
          lift: from an assignment of the tables' `count` nodes to one of the reduced problem.
          taken: by row, the bytes that are alive in any case.
        """
        over, grain = dict[int, int](), self.known.grain_bytes
        sizes = (final.points.bytes + taken).max(axis=1, initial=0)
        for index in _parted(sizes, seconds, self.known.eps * PARTED):
            chosen = lift(assignment_of(final, index, count))
            point = self.known.note(self.reduction.lift(chosen))
            excess = point.peak_bytes - int(sizes[index])
            if excess > grain:
                step = int(self._judge.times[int(np.argmax(self._judge.timeline_bytes(chosen)))])
                over[step] = max(over.get(step, 0), excess)
        return sorted(over, key=lambda step: -over[step])


def _parted(sizes: Ints, seconds: Floats, eps: float) -> list[int]:
    """The points that no other one beats, less those that are hardly faster than a smaller one; the fastest stays."""
    kept: list[int] = []
    last = -1
    for index in np.lexsort((seconds, sizes)).tolist():
        if last < 0 or seconds[index] < seconds[last]:
            last = index
            if not kept or seconds[index] < seconds[kept[-1]] * (1 - eps):
                kept.append(index)
    return kept if last in kept or last < 0 else [*kept, last]
