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
from dataclasses import replace

import numpy as np

from .dual import DualAscent
from .evaluate import Evaluator
from .frontier import Elimination, NoAssignment, Rows, Slack, Table, TooWide, assignment_of
from .known import BudgetSearch, Floor, Known
from .problem import Ints
from .program import OutOfTime
from .reduce import Reduction, reduce

#: Sweeps at each price, and prices that are tried for a stretch.
SWEEPS, PRICES = 40, 10

#: Time steps that the tables of a stretch carry; points that are over their budget at others are not of the stretch.
MOST_ROWS = 3

#: Sums of two points that a table of a stretch may take: some tenths of a second.
MOST_SUMS = 10_000_000

#: Bounds under this share of what the smallest peak costs are no measure of a stretch.
LEAST_UNIT = 0.01

#: The first stretch, as a share of its bound; the factor to a longer one, after fewer sums than these, and the longest;
#: the factor to a shorter one, and the shortest that is tried.
FIRST, LONGER, FEW_SUMS, LONGEST, SHORTER, SHORTEST = 0.02, 2.0, 3_000_000, 0.3, 0.2, 5e-4


def walk_frontier(
    known: Known,
    search: BudgetSearch,
    *,
    deadline: float = math.inf,
    on_stretch: Callable[[int, int], None] | None = None,
) -> tuple[int, int]:
    """Close the gaps of what is known of a frontier from the largest budget downwards, as far as tables and time go.

    Args:
      known: with the smallest peak among its points.
      search: an exact one, for single budgets that tables don't decide.
      deadline: no stretch begins after it, in `time.monotonic` seconds.
      on_stretch: told the number of points so far and the budget that is next, after each stretch.

    Returns the time steps that the tables carried and the entries of the largest (0: none was made).
    """
    reduction = reduce(known.problem, for_peak=True)
    stretches = _Stretches(known, reduction, deadline)
    while time.monotonic() < deadline and (gaps := known.gaps()):
        limit = gaps[-1].high_bytes
        if not stretches.cover(limit):
            if time.monotonic() >= deadline:
                break
            known.ask(search, limit, gaps[-1].start)
            if known.gap_at(limit) is not None:
                break
        if on_stretch is not None:
            on_stretch(len(known.front()), limit)
    smallest = known.front()[0]
    if time.monotonic() < deadline and known.at(np.array([smallest.peak_bytes]))[0] < smallest.objective_s:
        # the end itself, which no gap wider than a grain is left of
        stretches.cover(smallest.peak_bytes)
    return stretches.rows_carried, stretches.largest


class _Stretches:
    """Tables over what can still lead to the points of a stretch."""

    def __init__(self, known: Known, reduction: Reduction, deadline: float) -> None:
        self.known, self.reduction, self.deadline = known, reduction, deadline
        self.small = reduction.problem
        self.share, self.rows = FIRST, list[int]()
        self.rows_carried, self.largest, self.sums = 0, 0, 0
        # what a stretch is a share of, where its bound is less
        self.unit_s = max(abs(known.front()[0].objective_s) * LEAST_UNIT, math.ulp(1.0))
        self._judge = Evaluator(self.small)
        self._by_byte = 0.0  # price of the stretch before

    def cover(self, limit: int) -> bool:
        """Close the gap at a limit by the stretches from its bound on; whether that was done."""
        dual = DualAscent(replace(self.small, limit_bytes=max(limit, 1)))
        self._price(dual, limit)
        from_s = dual.bound_s()
        while time.monotonic() < self.deadline and self.share >= SHORTEST:
            target_s = from_s + self.share * max(abs(from_s), self.unit_s)
            try:
                self.known.floors.append(self._stretch(dual, limit, target_s))
            except TooWide:
                self.share *= SHORTER
                continue
            except OutOfTime:
                break
            if self.sums < FEW_SUMS:
                self.share = min(self.share * LONGER, LONGEST)
            gap = self.known.gap_at(limit)
            if gap is None:
                return True
            if target_s > gap.slow_s:
                # the tables left out a time step at which what they have is too large
                break
            from_s = target_s
        self.share = max(self.share, FIRST)
        self.known.floors.append(Floor(limit=limit, target_s=from_s))
        return False

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
                replace(part, nodes=nodes), carried, self.known.eps, MOST_SUMS, self.deadline, slack
            )
            try:
                final, largest = elimination.run()
            except NoAssignment:
                return nothing
            self.sums += elimination.sums
            self.largest, self.rows_carried = max(self.largest, largest), max(self.rows_carried, len(rows))
            over = self._note(final, lift, len(part.nodes), taken.sum(axis=0))
            new = [row for row in over if row not in rows and row in step_of]
            if not new or len(rows) == MOST_ROWS:
                break
            rows.append(new[0])
        self.rows = rows
        least = (final.points.low + taken.sum(axis=0)).max(axis=1, initial=0)
        seconds = final.points.seconds + (lacking_s - paid_s.sum())
        order = np.lexsort((seconds, least))
        return replace(
            nothing, sizes=least[order].astype(np.float64), seconds=np.minimum.accumulate(seconds[order])
        )

    def _note(
        self, final: Table, lift: Callable[[Sequence[int]], list[int]], count: int, taken: Ints
    ) -> list[int]:
        """Note the points of the last table; the time steps at which some are larger than it says, the worst first.

        Args:
          lift: from an assignment of the tables' `count` nodes to one of the reduced problem.
          taken: by row, the bytes that are alive in any case.
        """
        over, grain = dict[int, int](), self.known.grain_bytes
        for index in range(final.points.seconds.size):
            chosen = lift(assignment_of(final, index, count))
            point = self.known.note(self.reduction.lift(chosen))
            excess = point.peak_bytes - int((final.points.bytes[index] + taken).max(initial=0))
            if excess > grain:
                step = int(self._judge.times[int(np.argmax(self._judge.timeline_bytes(chosen)))])
                over[step] = max(over.get(step, 0), excess)
        return sorted(over, key=lambda step: -over[step])
