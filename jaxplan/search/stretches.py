"""FT on real problems: the frontier stretch by stretch, each by elimination over what can still lead there.

Frontier tables (frontier.py) over all strategies of a real program would be too wide.  But a bound on the cost within a
budget rules most of them out: with prices on memory and costs shifted against each other (dual.py) no node, pair or
byte costs less than nothing beside the bound, so that what lies on the frontier within the budget and at most a
little over the bound consists of strategies that cost at most that little, and so do all of its parts.  The strategies
that are left are few, tables over them small, and a point that has spent more is not carried on.  What comes out is
every point of that stretch.  The next one begins under its smallest peak, down to the least of all.

Where nothing is found in a stretch, or its tables were too wide, the bound is far from what there is: then what is left
is taken apart by a node whose bytes make the difference (branches.py), each part with prices and stretches of its own,
always the one of the lowest bound next.  The stretch's length is chosen as it goes: shorter after tables that were too
wide, longer after quick ones; and where what is known is far from the bound, coarse tables first find something nearer,
which proves little.  Where even the shortest is too wide the walk ends, and searches under budgets (sweep.py)
go on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .branches import LAST_SWEEPS, MOST_ROWS, Branch
from .dual import DualAscent
from .evaluate import Evaluator
from .frontier_elimination import Elimination, NoAssignment, Rows, Slack, Table, TooWide, assignments_of
from .known import AnyOf, BudgetSearch, Floor, Known
from .problem import Floats, Ints
from .program import OutOfTime
from .reduce import reduce

#: Parts that a problem is taken apart into for one limit; parting one has to raise its bound by this share of what a
#: stretch would.
MOST_PARTS, LEAST_RAISE = 96, 0.1

#: Parts that a smaller limit goes on with: of more, most are where that limit needs none, and each is priced anew.
CARRIED = 12

#: Of two points that differ in seconds by less than this part of `eps` only the smaller one is looked at.
PARTED = 0.1

#: Within a table points are merged whose seconds differ by less than this part of `eps` of the whole, and of the slack:
#: over the hundreds of tables that a point is the sum of, what that hides adds up ...
MERGED, MERGED_SLACK = 0.005, 0.001

#: ... and whose bytes differ by less than this part of `eps`, of themselves and this part of what is between the ends.
MERGED_BYTES, MERGED_SPAN = 0.1, 0.03

#: Where what was hidden leaves a budget open, so much less is merged there, twice.
FINER = 0.1

#: Pairs of joint choices that a table may be made of, sums of two points that a stretch may take, and the shortest
#: stretch that is tried with these: first some tenths of a second, and where nothing is left to be parted some seconds.
EFFORTS = ((500_000, 5_000_000, 1e-3), (2_000_000, 30_000_000, 1e-4))

#: Advances at one budget after which it is asked what is there, and whether that is worth more of them.
HARD = 3

#: Where what is known is farther from the bound than this, something is looked for: so much more is merged, in
#: stretches from this share of the bound on, so many at most.
LOOKED, COARSER, LOOK, LOOKS = 0.05, 100.0, 0.006, 6

#: Bounds under this share of what the smallest peak costs are no measure of a stretch.
LEAST_UNIT = 0.01

#: The first stretch, as a share of its bound; the factor to a longer one, after fewer sums than these, and the longest;
#: the factor to a shorter one, after too wide tables, and the shortest that is tried.
FIRST, LONGER, FEW_SUMS, LONGEST = 0.002, 3.0, 1_000_000, 0.3
SHORTER, SHORTEST = 0.3, EFFORTS[-1][2]


def walk_frontier(
    known: Known,
    search: BudgetSearch,
    *,
    rough: BudgetSearch | None = None,
    deadline: float = math.inf,
    on_stretch: Callable[[int, int], None] | None = None,
) -> Stretches:
    """Close the gaps of what is known of a frontier from the largest budget downwards, as far as tables and time go.

    Args:
      known: with the smallest peak among its points.
      search: an exact one, for single budgets that tables don't decide; rough: one for a look at those where tables
        are dear, if what is known can tell what is worth nothing there (`Known.spend`).
      deadline: no stretch begins after it, in `time.monotonic` seconds.
      on_stretch: told the number of points so far and the budget that is next, after each stretch.

    Returns what can go on with single budgets.
    """
    stretches = Stretches(known, deadline, rough)
    while time.monotonic() < deadline and (gaps := known.gaps()):
        # what is within a grain of the next point is not told from it
        limit = max(gaps[-1].low_bytes, gaps[-1].high_bytes - known.grain_bytes)
        if not stretches.cover(limit):
            if time.monotonic() >= deadline or limit <= known.spent_bytes:
                break
            known.ask(search, limit, gaps[-1].start)
            if known.gap_at(limit) is not None:
                break
        if on_stretch is not None:
            on_stretch(len(known.front()), limit)
    return stretches


@dataclass(eq=False)
class _Part:
    """A branch as far as it is covered: up to `reached_s`, which proves `floor`, by stretches of a `share` of that.

    `merged` and `effort` are how coarsely and with how large tables; from `wide_s` on these were too wide.
    """

    branch: Branch
    floor: Floor
    share: float
    reached_s: float = -math.inf
    wide_s: float = math.inf
    merged: float = 1.0
    effort: int = 0

    def low_s(self, limit: int) -> float:
        """Nothing within the limit is faster."""
        return float(self.floor.at(np.array([limit]))[0])


class Stretches:
    """Tables over what can still lead to the points of a stretch, none begun after a deadline.

    `rows_carried` time steps at most were carried, `largest` entries are in the largest table (0: none was made).
    """

    def __init__(self, known: Known, deadline: float, rough: BudgetSearch | None = None) -> None:
        self.known, self.deadline, self._rough = known, deadline, rough
        self.reduction = reduce(known.problem, for_peak=True)
        self.small = self.reduction.problem
        self.share, self.rows = FIRST, list[int]()
        self.rows_carried, self.largest, self.sums = 0, 0, 0
        # what a stretch is a share of, where its bound is less
        self.unit_s = max(abs(known.front()[0].objective_s) * LEAST_UNIT, math.ulp(1.0))
        self._judge = Evaluator(self.small)
        self._parts: list[_Part] = []  # what all of the problem was in at the limit before
        self._limit = -1

    def cover(self, limit: int) -> bool:
        """Close the gap at a limit by the stretches from its bound on; whether that was done."""
        known, floors = self.known, self.known.floors
        parts = self._parts_within(limit)
        floors.append(AnyOf(limit, ()))
        advances = 0
        while True:
            floors[-1] = AnyOf(limit, tuple(part.floor for part in parts))
            self._parts, self._limit = parts, limit
            is_open = known.slack_at(limit) > known.eps and known.gap_at(limit) is not None
            if not is_open or time.monotonic() > self.deadline:
                return not is_open
            part = min(parts, key=lambda one: one.low_s(limit))
            try:
                if advances == HARD:
                    if known.slack_at(limit) > LOOKED:
                        self._look(part.branch)
                    if self._rough is not None and known.spend(limit, self._rough):
                        return False
                advances += 1
                then = self._advance(part, limit, len(parts) < MOST_PARTS)
            except OutOfTime:
                return False
            self.share = max(part.share, FIRST)
            if not then:
                return False
            parts = [*(one for one in parts if one is not part), *then]

    def _parts_within(self, limit: int) -> list[_Part]:
        """What the problem is in: the parts of a larger limit, whose floors hold for this one, unless they are many."""
        if limit <= self._limit and len(self._parts) <= CARRIED:
            return [replace(part) for part in self._parts]
        whole = Branch(self.small, limit, by_byte={}, best_s=self.known.best_at(limit))
        return [_Part(branch=whole, floor=whole.floor(), share=self.share)]

    def _advance(self, part: _Part, limit: int, more: bool) -> list[_Part]:
        """One stretch of a part, or its parts where that gets farther and there may be more; nothing: neither does.

        Raises:
          OutOfTime: the deadline came first.
        """
        low_s, branch = part.low_s(limit), part.branch
        if branch.limit != limit:
            nearer = branch.within(limit, self.known.best_at(limit))
            return [_Part(branch=nearer, floor=nearer.floor(low_s), share=self.share)]
        if not branch.settled:
            branch.raise_bound()
            part.floor = branch.floor(low_s)
            return [part]
        unit_s = max(abs(low_s), self.unit_s)
        step_s = min(part.share * unit_s, (part.wide_s - low_s) / 2)
        if part.reached_s > self.known.best_at(limit):
            # merging hid it, or the tables left out a time step at which what they have is too large
            part.merged *= FINER
            if part.merged < FINER**2 / 2:
                return []
            target_s = part.reached_s
        elif step_s < EFFORTS[part.effort][2] * unit_s * (1 - 1e-9):
            if part.effort == len(EFFORTS) - 1:
                return []
            part.effort, part.share, part.wide_s = part.effort + 1, FIRST, math.inf
            return [part]
        else:
            # no farther than half the way to what was too wide
            target_s = low_s + step_s
        try:
            floor = self._stretch(part, target_s)
            # what merging hides is no reason to forget what was known
            part.floor = replace(floor, seconds=np.maximum(floor.seconds, low_s))
        except TooWide:
            part.wide_s = target_s
        else:
            part.reached_s = target_s
            if self.known.best_at(limit) <= target_s:
                return [part]
            step_s = part.share * unit_s
        # nothing was found: the bound is not near what there is
        low_s = part.low_s(limit)
        enough_s = low_s + LEAST_RAISE * step_s
        parts = branch.parted(enough_s, low_s + step_s, self.deadline) if more else None
        if parts:
            return [_Part(branch=one, floor=one.floor(low_s), share=part.share) for one in parts]
        if part.wide_s <= target_s:
            part.share = max(part.share * SHORTER, SHORTEST)
        elif self.sums < FEW_SUMS:
            part.share = min(part.share * LONGER, LONGEST)
        return [part]

    def _look(self, branch: Branch) -> None:
        """Find something within a branch's limit that is near its bound, by tables too coarse to prove much.

        Raises:
          OutOfTime: the deadline came first.
        """
        share, wide, low_s = LOOK, math.inf, branch.bound_s
        for _ in range(LOOKS):
            target_s = low_s + share * max(abs(low_s), self.unit_s)
            if self.known.best_at(branch.limit) <= target_s:
                return
            part = _Part(branch=branch, floor=branch.floor(), share=share, merged=COARSER)
            try:
                self._stretch(part, target_s)
                share = min(LONGER * share, (share + wide) / 2)
            except TooWide:
                wide, share = share, SHORTER * share

    def _stretch(self, part: _Part, target_s: float) -> Floor:
        """Note the points of a part within its limit that are no slower than a target; what is proved of the others.

        Raises:
          TooWide: the tables would be.  OutOfTime: the deadline came first.
        """
        branch, dual, limit = part.branch, part.branch.dual, part.branch.limit
        self.sums, nothing = 0, replace(branch.floor(), target_s=target_s)
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
        for _ in range(2 * LAST_SWEEPS):
            inner.sweep()
        price_s = sum(inner.price.values()) / max(limit, 1)
        nothing = replace(nothing, price_s=price_s)
        inside = inner.core(target_s)
        if inside is None:
            return nothing
        core, kept = inside
        rest, lacking_s = inner.shifted(kept, core)

        def lift(assignment: Sequence[int]) -> list[int]:
            middle = again.lift([int(own[s]) for own, s in zip(kept, assignment, strict=True)])
            chosen = [int(own[s]) for own, s in zip(cut[1], middle, strict=True)]
            return chosen

        rows = [row for row in dict.fromkeys([*dual.price, *self.rows]) if row in step_of][:MOST_ROWS]
        proved: Floor | None = None
        while True:
            carried = Rows(rest, np.array([step_of[row] for row in rows], dtype=np.int64))
            by_row = np.array([inner.price.get(step_of[row], 0.0) / max(limit, 1) for row in rows])
            taken = carried.less_least()
            paid_s = taken @ by_row
            nodes = tuple(replace(n, costs_s=n.costs_s + s) for n, s in zip(rest.nodes, paid_s, strict=True))
            slack = Slack(
                price_s=by_row,
                slack_s=target_s - inner.bound_s(),
                spare_bytes=np.int64(limit) - taken.sum(axis=0),
            )
            step_s = min(MERGED * self.known.eps * abs(target_s), MERGED_SLACK * slack.slack_s) * part.merged
            width = MERGED_BYTES * self.known.eps * part.merged
            # near the least peak all that is left over is far less than what lies between the ends
            spare_bytes = int(slack.spare_bytes.min(initial=self.known.span_bytes))
            base = max(1.0, MERGED_SPAN * spare_bytes)
            elimination = Elimination(
                replace(rest, nodes=nodes), carried, width, base=base, step_s=step_s,
                deadline=self.deadline, most_pairs=EFFORTS[part.effort][0], most_work=EFFORTS[part.effort][1],
                slack=slack,
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
            over = self._note(final, seconds, lift, len(rest.nodes), taken.sum(axis=0))
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
        parted = _parted(sizes, seconds, self.known.eps * PARTED)
        assignments = assignments_of(final, np.array(parted, np.int64), count).tolist()
        for index, assignment in zip(parted, assignments, strict=True):
            chosen = lift(assignment)
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
