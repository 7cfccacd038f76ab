"""Where the rivals of the exact search work: the reduced problem in flat arrays, with room for tables.

The reduction (reduce.py) is exact, so that searching the smaller problem gives nothing away; a search whose worth is in
its own decisions gets the contracted problem, in which nothing is decided by cost.  All of them begin from the same
place, repair what overflows in the same way, and have what they find priced by the same judge.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from . import moves
from .alarm import NEVER
from .base import Incumbent, Progress, Search, SearchResult, Termination
from .contract import Keep
from .dual import ROUNDING
from .elimination import assign_window
from .flat import Flat, flatten
from .priced import SCRATCH
from .problem import Floats, Ints, StrategyProblem
from .program import OutOfTime
from .reduce import Reduction, reduce
from .tables import random

#: Sweeps that lead a start out of forbidden pairs.
MOST_SETTLING = 20


class Arena:
    """One reduced problem, the best assignment so far, and the clock.

    Attributes:
      flat: of the reduced problem; best: of the original one; deadline: in `time.monotonic` seconds.
      start: an assignment of the reduced problem to begin from: the hint's, else every node's cheapest strategy.
      random: what chance there is comes from here.
      note: what in the search was not exact, in words.
    """

    def __init__(
        self, reduction: Reduction, best: Incumbent, *, deadline: float, relative_gap: float, seed: int,
        hint: Sequence[int] | None,
    ) -> None:  # fmt: skip
        self.reduction, self.best, self.deadline, self.relative_gap = reduction, best, deadline, relative_gap
        self.flat = flatten(reduction.problem)
        self.note = ""
        self.random = np.random.default_rng(seed)
        self.state = np.array([self.random.integers(1, 2**63), 0], dtype=np.uint64)
        count = self.flat.size.size
        self._every, self._local = np.arange(count), np.full(count, -1, dtype=np.int64)
        self._pool_s: Floats | None = None
        self.start = self._cheapest() if hint is None else self._projected(hint)

    def check_clock(self) -> None:
        """Raise OutOfTime after the deadline."""
        if time.monotonic() > self.deadline:
            raise OutOfTime

    def cost_s(self, chosen: Ints, unary_s: Floats | None = None) -> float:
        """What an assignment of the reduced problem costs, perhaps at other prices of the strategies; a forbidden
        pair at `flat.forbidden_s`."""
        flat = self.flat if unary_s is None else self.flat._replace(unary_s=unary_s)
        return moves.total_cost(flat, chosen)

    def fits(self, chosen: Ints) -> bool:
        """Whether all that is alive stays within the limit."""
        if self.flat.limit_bytes < 0 or not self.flat.peaks:
            return True
        return int(moves.alive_bytes(self.flat, chosen).max()) <= self.flat.limit_bytes

    def repaired(self, chosen: Ints) -> Ints | None:
        """The assignment brought within the limit, the cheapest change a byte first; None where that fails."""
        chosen = chosen.copy()
        load = moves.alive_bytes(self.flat, chosen)
        return chosen if moves.repair(self.flat, chosen, load) else None

    def offer(self, chosen: Ints) -> bool:
        """Have an assignment of the reduced problem judged, and kept if it is the cheapest; whether it is feasible."""
        if not allowed(self.flat, chosen) or not self.fits(chosen):
            return False
        return self.best.offer(self.reduction.lift(chosen.tolist()))

    def eliminate(self, chosen: Ints, unary_s: Floats, sums: float, *, relaxed: bool) -> float:
        """Minimise all nodes out at some prices of their strategies, with one number an entry of a table.

        `relaxed` assigns `chosen` anew and returns a lower bound, -inf where tables had no room; else `chosen` is
        improved, nodes whose tables would take more than `sums` sums keeping their strategies.
        """
        if self._pool_s is None:
            self._pool_s = np.empty(self.flat.matrix_s.size + SCRATCH)
            self._pool_s[: self.flat.matrix_s.size] = self.flat.matrix_s
        least_s = assign_window(
            self.flat, unary_s, self.flat.near_own, self._pool_s, self.flat.matrix_s.size, self._every, self._local,
            chosen, math.log(sums), 0.0 if relaxed else 1.0, relaxed, self.state, NEVER,
        )  # fmt: skip
        return -math.inf if math.isnan(least_s) else least_s - ROUNDING * self.flat.forbidden_s

    def by_chance(self) -> Ints:
        """A random assignment within the limit where repair gets it there: every node in turn takes one of the
        strategies that those before it allow."""
        chosen = np.zeros(self.flat.size.size, dtype=np.int64)
        draw(self.flat, chosen, self.state)
        fitting = self.repaired(chosen)
        return chosen if fitting is None else fitting

    def _cheapest(self) -> Ints:
        chosen = np.array([int(np.argmin(node.costs_s)) for node in self.reduction.problem.nodes], dtype=np.int64)
        return self._settled(chosen)

    def _settled(self, chosen: Ints) -> Ints:
        load = moves.alive_bytes(self.flat, chosen)
        moves.repair(self.flat, chosen, load)
        if not allowed(self.flat, chosen):
            moves.settle(self.flat, chosen, load, MOST_SETTLING)
        return chosen

    def _projected(self, assignment: Sequence[int]) -> Ints:
        """The reduced problem's assignment nearest to one of the original: what the reduction deleted is chosen
        anew."""
        chosen = [int(strategy) for strategy in assignment]
        for step in self.reduction.graph.trail:
            if isinstance(step, Keep) and chosen[step.node] >= 0:
                place = int(np.searchsorted(step.kept, chosen[step.node]))
                found = place < step.kept.size and step.kept[place] == chosen[step.node]
                chosen[step.node] = place if found else -1
        small = np.array([*(chosen[node] for node in self.reduction.kept), 0], dtype=np.int64)
        return self._settled(complete(self.flat, small))


@njit(cache=True, nogil=True)
def allowed(flat: Flat, chosen: Ints) -> bool:
    """Whether no chosen pair is forbidden."""
    for n in range(flat.size.size):
        for e in range(flat.near_start[n], flat.near_start[n + 1]):
            other = flat.near_node[e]
            if other > n and (
                flat.matrix_s[flat.near_own[e] + chosen[n] * flat.size[other] + chosen[other]] >= flat.forbidden_s
            ):
                return False
    return True


@njit(cache=True, nogil=True)
def complete(flat: Flat, chosen: Ints) -> Ints:
    """Give every node without a strategy (-1), in turn, the one that costs least with its neighbours that have one."""
    for n in range(flat.size.size):
        if chosen[n] >= 0:
            continue
        best, least = 0, np.inf
        for s in range(flat.size[n]):
            cost = flat.unary_s[flat.at[n] + s]
            for e in range(flat.near_start[n], flat.near_start[n + 1]):
                other = flat.near_node[e]
                if chosen[other] >= 0:
                    cost += flat.matrix_s[flat.near_own[e] + s * flat.size[other] + chosen[other]]
            if cost < least:
                best, least = s, cost
        chosen[n] = best
    return chosen


@njit(cache=True, nogil=True)
def draw(flat: Flat, chosen: Ints, state: NDArray[np.uint64]) -> None:
    """Every node in turn takes a random one of the strategies that its earlier neighbours allow, of all if none."""
    allowed = np.empty(flat.size.max(), np.int64)
    for n in range(flat.size.size):
        count = 0
        for s in range(flat.size[n]):
            free = True
            for e in range(flat.near_start[n], flat.near_start[n + 1]):
                other = flat.near_node[e]
                if other < n:
                    pair_s = flat.matrix_s[flat.near_own[e] + s * flat.size[other] + chosen[other]]
                    free = free and pair_s < flat.forbidden_s
            if free:
                allowed[count] = s
                count += 1
        pick = random(state)
        if count:
            chosen[n] = allowed[pick % np.uint64(count)]
        else:
            chosen[n] = np.int64(pick % np.uint64(flat.size[n]))


def searcher(work: Callable[[Arena], None], *, contract_only: bool = False) -> Search:
    """The search of which `work` is all that is its own, on problems reduced or, `contract_only`, contracted."""

    def solve(
        problem: StrategyProblem,
        *,
        time_limit_s: float | None = None,
        relative_gap: float = 1e-4,
        seed: int = 0,
        on_progress: Progress | None = None,
        hint: Sequence[int] | None = None,
    ) -> SearchResult:
        best = Incumbent(problem.verify(), on_progress)
        deadline = math.inf if time_limit_s is None else best.started + time_limit_s
        termination, note = Termination.FEASIBLE, ""
        try:
            if hint is not None:
                best.offer(hint)
            reduction = reduce(problem, contract_only=contract_only)
            if reduction.infeasible:
                return best.result(Termination.INFEASIBLE, reduction.infeasible)
            arena = Arena(reduction, best, deadline=deadline, relative_gap=relative_gap, seed=seed, hint=hint)
            work(arena)
            note = arena.note
        except OutOfTime:
            termination = Termination.TIME_LIMIT
        except KeyboardInterrupt:
            return best.result(Termination.INTERRUPTED)
        if best.closed(relative_gap):
            return best.result(Termination.OPTIMAL)
        if not best.found:
            return best.result(Termination.TIME_LIMIT, "the search reached nothing feasible")
        return best.result(termination, note)

    return solve
