"""The search for large problems: memory at a price, near-exact assignments at that price, repaired into the limit.

A round begins with the shifted costs of the dual bound (dual.py) at the present prices of the peaks:

  1. Relaxed elimination over all nodes (elimination.py) gives a bound, and an assignment that starts from nothing.
  2. Conditioned elimination, again and again with other nodes given up, improves that assignment at the same prices.
  3. What overflows is repaired by single changes; the result is improved within the limit, by single changes and by
     conditioned eliminations at rising prices.
  4. Parts of the best assignment so far are assigned anew within the limit (windows.py).
  5. The prices move along the overflow of the assignment of step 2 (subgradient, Polyak's step).

Rounds that gain nothing make the next ones more thorough, up to an amount of work, and disturb their order.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from . import messages, moves
from .alarm import Alarm
from .base import Incumbent
from .dual import DualAscent, ascend
from .elimination import assign_window
from .problem import Floats, Ints
from .windows import Windows

#: Entries of tables that one elimination may hold (half a GiB, of which only what is used takes memory).
SCRATCH = 1 << 26

#: Sums that one elimination of a node may take: at first, and growing by this factor after a round without gain.
FIRST_SUMS, SUMS_GROWTH = 1e4, 3.0

#: ... up to this many, relaxed and conditioned (a conditioned one is run many times a round).
MOST_RELAXED_SUMS, MOST_CONDITIONED_SUMS = 3e7, 3e4

#: A climb's relaxations grow by this factor, up to this many sums of one node, and in all: some seconds' worth.
CLIMB, MOST_CLIMBED_SUMS, MOST_CLIMBED_WORK = 10.0, 1e8, 4e9

#: The sums of a whole relaxation are raised in any case up to some tenths of a second's, and never over some seconds'.
EASY_WORK, MOST_WORK = 1e8, 1e9

#: Sweeps before each round; conditioned eliminations at the round's prices, and within the limit.
SWEEPS, AT_PRICES, WITHIN_LIMIT = 10, 3, 8

#: Prices rise by this factor while a conditioned elimination leaves the limit beyond repair.
RISE = 1.1

#: Polyak's step: first, shortened after so many rounds without a better bound, and at least.
FIRST_STEP, SHORTER, PATIENCE, LEAST_STEP = 0.1, 0.7, 5, 0.01

#: Sweeps over all nodes that change one at a time.
MOST_SETTLING = 20

#: The logarithms of the prices of a round that strays from the present ones spread up to this much.
STRAY = 0.5

#: ... and it is up to so many growths less thorough.
STRAY_LESS = 3

#: Windows take as much work as the round before them, twice that after a gain (as below), half of it after none,
#: between these shares.
MOST_SHARE, LEAST_SHARE = 4.0, 0.125

#: A round gains if it closes this share of the gap.
LEAST_GAIN = 0.01


class PricedSearch:
    """Rounds on one problem; what they find goes to `best`, lifted."""

    def __init__(
        self,
        dual: DualAscent,
        lift: Callable[[Sequence[int]], Sequence[int]],
        best: Incumbent,
        *,
        relative_gap: float,
        deadline: float,
        seed: int,
    ) -> None:
        self.dual, self.flat, self.lift, self.best = dual, dual.flat, lift, best
        self.relative_gap, self.deadline = relative_gap, deadline
        flat, count = self.flat, self.flat.size.size
        entries = sum(edge.costs_s.size for edge in dual.problem.edges)
        self._scratch = flat.matrix_s.size + entries
        self._pool_s = np.empty(self._scratch + SCRATCH)
        self._pool_s[: flat.matrix_s.size] = flat.matrix_s
        self._edge_at = np.zeros(flat.near_node.size, dtype=np.int64)
        self._unary_s = flat.unary_s.copy()
        self._all, self._local = np.arange(count), np.full(count, -1, dtype=np.int64)
        self._random = np.random.default_rng(seed)
        self.chosen = np.zeros(count, dtype=np.int64)
        self.kept: Ints | None = None
        self._alarm = Alarm()
        self.kept_s = math.inf
        self.sums, self.most_sums, self.noise, self.step = FIRST_SUMS, FIRST_SUMS, 0.0, FIRST_STEP
        self._since_bound, self._hopeless, self._top_s = 0, 0, -math.inf
        self._windows = Windows(flat, self._pool_s, self._scratch, self._random, self._alarm.flag)
        self._share, self._work = 1.0, 0

    @property
    def cost_s(self) -> float:
        """What the assignment of the last round costs."""
        return moves.total_cost(self.flat, self.chosen)

    def run(
        self, *, patience: float = math.inf, relative_gap: float | None = None, least_gain: float = LEAST_GAIN
    ) -> None:
        """Rounds until a gap is reached, the deadline is near, or `patience` of them in a row gained too little."""
        with self._alarm.until(self.deadline):
            self._run(patience, self.relative_gap if relative_gap is None else relative_gap, least_gain)

    def _run(self, patience: float, relative_gap: float, least_gain: float) -> None:
        since, took_s = 0, 0.0
        while since < patience and not self.best.closed(relative_gap):
            began = time.monotonic()
            if began + took_s > self.deadline:
                # No round would end in time, but windows do, where nothing else comes after.
                if math.isinf(patience):
                    self._refine(math.inf)
                break
            gap_s = self.best.objective_s - self.best.bound_s
            growth = 1.0
            if since % 2 and self.kept is not None:
                self._stray()
            else:
                self.sums, self.noise = self.most_sums, 0.0
                work = self._settle_prices(*self.round())
                if work < EASY_WORK or (since and work < MOST_WORK):
                    self.most_sums = min(self.most_sums * SUMS_GROWTH, MOST_RELAXED_SUMS)
                    growth = SUMS_GROWTH
            # The next round takes as long again, at most.
            took_s = max(took_s, growth * (time.monotonic() - began))
            self._refine(self._share * self._work)
            left_s = self.best.objective_s - self.best.bound_s
            since = 0 if left_s < (1 - least_gain) * gap_s else since + 1

    def _stray(self) -> None:
        """A round at prices away from the present ones, in disturbed order, as thorough as chance has it."""
        kept = self.dual.price
        self.sums = max(self.most_sums / SUMS_GROWTH ** (STRAY_LESS * self._random.random()), FIRST_SUMS)
        self.noise = 1.0
        luck = np.exp(STRAY * self._random.random() * self._random.standard_normal(len(kept)))
        self.dual.set_prices({peak: price * by for (peak, price), by in zip(kept.items(), luck.tolist(), strict=True)})
        self.round()
        self.dual.set_prices(kept)

    def _refine(self, work: float) -> None:
        """Windows of the best so far, until they took so much work, or to the deadline."""
        if self.kept is None:
            return
        before_s, gap_s = self.kept_s, max(self.kept_s - self._top_s, 0.0)
        found = self._windows.improve(self.kept, before_s, self._prices(), work, self.deadline)
        self.keep(found.chosen)
        gained = before_s - found.cost_s > LEAST_GAIN * gap_s
        self._share = min(2 * self._share, MOST_SHARE) if gained else max(self._share / 2, LEAST_SHARE)
        self._work = 0

    def round(self) -> tuple[float, int, Ints]:
        """One round at the present prices: its bound, the sums that its relaxation took, and what it left alive."""
        for _ in range(SWEEPS):
            self.offer(self.dual.sweep())
        self.best.raise_bound(self.dual.bound_s())
        bound_s, work = self._relax()
        self.best.raise_bound(bound_s)
        prices = self._prices()
        for _ in range(AT_PRICES):
            self._condition(self.chosen, prices)
        load = moves.alive_bytes(self.flat, self.chosen)
        self.improve(self.chosen, prices)
        return bound_s, work, load

    def _settle_prices(self, bound_s: float, work: int, load: Ints) -> int:
        """Move the prices after a round; its work."""
        if self._since_bound == PATIENCE:
            self.step, self._since_bound = max(self.step * SHORTER, LEAST_STEP), 0
        self._since_bound = 0 if bound_s > self._top_s else self._since_bound + 1
        self._top_s = max(self._top_s, bound_s)
        if self.kept is not None:
            open_s = max(self.kept_s - bound_s, 0.0)
        else:
            # Nothing fits yet: the prices rise faster and faster.
            open_s, self._hopeless = abs(self.cost_s) * 2.0**self._hopeless, self._hopeless + 1
        self.dual.reprice(load, self.step * open_s)
        return work

    def climb(self) -> None:
        """Relaxations at the present prices, each more thorough, while they are cheap: at the end they may be exact.

        A relaxation that takes one table for every node is an optimum at these prices.  In problems of some hundred
        nodes that comes within seconds, where branching on a linear relaxation takes half a minute.
        """
        self.offer(ascend(self.dual, self.best, self.relative_gap, self.deadline))
        with self._alarm.until(self.deadline):
            self._climb()

    def _climb(self) -> None:
        sums, work, took_s = FIRST_SUMS, 0, 0.0
        while sums <= MOST_CLIMBED_SUMS and CLIMB * work <= MOST_CLIMBED_WORK:
            began = time.monotonic()
            if began + CLIMB * took_s > self.deadline:
                return
            self.sums = sums
            bound_s, work = self._relax()
            self.best.raise_bound(bound_s)
            self.improve(self.chosen, self._prices())
            if self.best.closed(self.relative_gap):
                return
            sums, took_s = CLIMB * sums, time.monotonic() - began

    def run_beside(self, other: PricedSearch) -> None:
        """Run until the gap is closed or the deadline is near, with `other`, which has a `best` of its own, beside.

        The kernels hold no lock of Python's: the two take a core each.
        """
        thread = threading.Thread(target=other.run, daemon=True, name="jaxplan-search")
        thread.start()
        try:
            self.run()
        finally:
            other.deadline = -math.inf
            other._alarm.ring()
            thread.join()
            if other.best.found:
                self.best.offer(other.best.assignment)
            self.best.raise_bound(other.best.bound_s)

    def improve(self, chosen: Ints, prices: Floats) -> None:
        """Bring an assignment within the limit, if that can be done, make it cheaper there, and offer it."""
        flat = self.flat
        chosen = chosen.copy()
        load = moves.alive_bytes(flat, chosen)
        if not moves.repair(flat, chosen, load):
            return
        moves.settle(flat, chosen, load, MOST_SETTLING)
        self.keep(chosen)
        cost_s = moves.total_cost(flat, chosen)
        for _ in range(WITHIN_LIMIT):
            if time.monotonic() > self.deadline:
                return
            other = chosen.copy()
            self._condition(other, prices)
            load = moves.alive_bytes(flat, other)
            if not moves.repair(flat, other, load):
                prices = prices * RISE
                continue
            moves.settle(flat, other, load, MOST_SETTLING)
            other_s = moves.total_cost(flat, other)
            if other_s < cost_s:
                chosen, cost_s = other, other_s
        self.keep(chosen)

    def offer(self, chosen: Ints) -> None:
        """Keep an assignment after repair and single changes."""
        chosen = chosen.copy()
        load = moves.alive_bytes(self.flat, chosen)
        if moves.repair(self.flat, chosen, load):
            moves.settle(self.flat, chosen, load, MOST_SETTLING)
            self.keep(chosen)

    def keep(self, chosen: Ints) -> None:
        """Offer an assignment that fits, if it is the cheapest so far."""
        cost_s = moves.total_cost(self.flat, chosen)
        if cost_s < min(self.kept_s, self.flat.forbidden_s) and self.best.offer(self.lift(chosen.tolist())):
            self.kept, self.kept_s = chosen.copy(), cost_s

    def _relax(self) -> tuple[float, int]:
        """Assign all nodes anew at the present prices; the bound, and the sums that it took."""
        dual = self.dual
        messages.shifted_matrices(
            self.flat, dual.sent_s, dual.sent_at, self._edge_at, self._pool_s, self.flat.matrix_s.size
        )
        state = self._state()
        least_s = assign_window(
            self.flat, dual.node_s, self._edge_at, self._pool_s, self._scratch, self._all, self._local,
            self.chosen, math.log(self.sums), self.noise, True, state, self._alarm.flag,
        )  # fmt: skip
        if math.isnan(least_s):
            # The tables did not fit, or time is over: less thorough from now on, and no bound this time.
            self.most_sums = max(self.sums / SUMS_GROWTH, FIRST_SUMS)
            return -math.inf, int(MOST_WORK)
        self._work += int(state[1])
        return least_s - dual.refund_s - dual.noise_s, int(state[1])

    def _condition(self, chosen: Ints, prices: Floats) -> None:
        """Improve an assignment of all nodes at some prices of a byte at each peak."""
        moves.price_window(self.flat, self._all, prices, self._unary_s)
        sums, state = min(self.sums, MOST_CONDITIONED_SUMS), self._state()
        assign_window(
            self.flat, self._unary_s, self.flat.near_own, self._pool_s, self._scratch, self._all, self._local,
            chosen, math.log(sums), 1.0, False, state, self._alarm.flag,
        )  # fmt: skip
        self._work += int(state[1])

    def _prices(self) -> Floats:
        """Of a byte at each peak."""
        prices = np.zeros(self.flat.peaks)
        for peak, price in self.dual.price.items():
            prices[peak] = price / max(self.flat.limit_bytes, 1)
        return prices

    def _state(self) -> np.ndarray:
        return np.array([self._random.integers(1, 2**63), 0], dtype=np.uint64)
