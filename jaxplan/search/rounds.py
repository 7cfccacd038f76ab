"""The rounds of the exact search: relaxations, cores, exact programs, each with more memory rows than the last.

First come relaxations, for the bound and a rounding.  What is fractional in them is solved exactly, each part
apart from the others where no edge and no memory row joins them.  A large problem is first searched at prices on
memory (priced.py), then cut down to a core: to what may still cost little more than a bound that needs no linear
program (dual.py).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..errors import SolverError
from .base import Incumbent
from .descend import Descent
from .evaluate import evaluate
from .measures import columns, cost_within, entries, least_sum, parts_apart
from .problem import Bools, Floats, Ints, StrategyProblem
from .program import Answer, OutOfTime, Program, Timeline, one_hot
from .reduce import reduce

if TYPE_CHECKING:
    from .dual import DualAscent

#: Rows (4) added a round.
ROWS_A_ROUND = 5

#: Rounds of relaxations that only add rows; what still overflows then is left to the exact rounds.
RELAXATION_ROUNDS = 12

#: HiGHS works to absolute tolerances of 1e-6 and 1e-7: the objective is scaled to about this many units.
OBJECTIVE_UNITS = 1e5

#: ... but not a unit so small, against a cost that was reached, that a bound near zero would ask for.
LEAST_UNIT = 1e-6

#: A value of a relaxation this close to 1 is taken as 1: HiGHS' own tolerance on integers.
INTEGRAL = 1e-6

#: Relaxations of more columns than this take HiGHS long enough to look for a core first.
MOST_COLUMNS = 40_000

#: The first core reaches this far over the bound, relatively; each next one four times as far.
CORE_REACH, CORE_GROWTH = 1e-5, 4.0

#: A core with more of the pairs than this is not worth the detour.
CORE_SHARE = 0.5

#: Rounds of the first ascent of the dual bound.
FIRST_ASCENT = 50

#: The search at prices ends after so many rounds without gain, or where it is as close as cores need: a larger gap
#: leaves too much in a core, unless the whole has no more columns than HiGHS takes minutes for.  Exact rounds then
#: have this part of the time that is left, before the search goes on.
SEARCH_PATIENCE, CORES_GAP, EXACT_COLUMNS, CORES_TIME = 8, 0.02, 200_000, 0.4

#: ... but where it is that close it goes on while it gains: its rounds take tenths of a second, exact ones many.
CLOSE_PATIENCE = 2

#: ... and where the whole has no more than `EXACT_COLUMNS`, only while each closes this share of the gap: of
#: Inception-v3 on 4 x 4 devices the optimum was there after a second, and rounds of 2 % took thirty more to prove what
#: cores of it proved in one.
CLOSE_GAIN = 0.05

#: What `Rounds.proof_s` counts from: a gap of which little comes but a better bound.  The search at prices has this
#: part of it.
NEAR_GAP, CLOSE_TIME = 0.01, 0.5

#: What has more columns is first tried by elimination, where branching begins: that takes some tenths of a second.
CLIMB_COLUMNS = 3_000

#: With less time left than this it is not: its kernels may have to be compiled first.
CLIMB_LEAST_S = 5.0

#: After so many cores the whole is solved: where nothing is feasible, no core ever tells.
MOST_CORES = 8


class Solver(Protocol):
    """What the rounds ask of an engine; `deadline` in seconds of `time.monotonic`."""

    deadline: float
    seed: int

    def until(self, deadline: float) -> Solver:
        """The same engine with another deadline."""
        ...

    def run(
        self, program: Program, *, unit: float, relative_gap: float = 0.0, relaxed: bool = False
    ) -> Answer:
        """Solve a program, its prices divided by `unit`; OutOfTime when the deadline brings no values."""
        ...


class Rounds:
    """The state that the relaxations hand on to the exact rounds, for the whole reduced problem or a core of
    it.

    Bounds found in a core hold for the whole up to `ceiling_s`, the cost that the core was cut at.  A large problem's
    search ends within `large_gap`, and `proof_s` seconds after it came within `NEAR_GAP`.
    """

    def __init__(
        self,
        small: StrategyProblem,
        lift: Callable[[Sequence[int]], Sequence[int]],
        best: Incumbent,
        engine: Solver,
        relative_gap: float,
        ceiling_s: float = math.inf,
        proof_s: float = math.inf,
        large_gap: float = 0.0,
    ) -> None:
        self.small, self.lift = small, lift
        self.proof_s, self.large_gap = proof_s, max(large_gap, relative_gap)
        #: Whether `run` ended within `large_gap` alone.
        self.near = False
        self.best, self.engine, self.relative_gap, self.ceiling_s = best, engine, relative_gap, ceiling_s
        self.timeline = Timeline(small)
        self.rows: list[int] = []
        self.prices: dict[int, float] = {}
        self.unit_s = 1.0
        # What assignments cost by order of magnitude.
        self._reached_s = 1.0

    @functools.cached_property
    def descent(self) -> Descent:
        """The local search that rounds relaxations."""
        return Descent(self.small)

    def run(self) -> bool:
        """Close the gap; False when nothing is feasible."""
        self._raise_bound(least_sum(self.small))
        if math.isinf(self.ceiling_s) and columns(self.small) > MOST_COLUMNS:
            return self._search()
        self._offer_near([int(np.argmin(node.costs_s)) for node in self.small.nodes])
        if self.best.closed(self.relative_gap):
            return True
        self._reached_s = abs(evaluate(self.small, self.descent.chosen).objective_s) or 1.0
        return self._relax(Program(self.small, range(len(self.small.nodes))))

    def _search(self) -> bool:
        """A large problem: search at prices on memory while that gains, then cores; False when nothing is feasible."""
        # Imported where it is used: most problems are small, and the compiler takes a second to import.
        from .dual import DualAscent, ascend
        from .priced import LEAST_GAIN, PricedSearch

        dual, deadline = DualAscent(self.small), self.engine.deadline
        search = PricedSearch(
            dual, self.lift, self.best, relative_gap=self.relative_gap, deadline=deadline, seed=self.engine.seed
        )
        # The first ascent knows nothing of what is open, the second does.
        search.offer(ascend(dual, self.best, self.relative_gap, deadline, FIRST_ASCENT))
        search.offer(ascend(dual, self.best, self.relative_gap, deadline))
        search.run(patience=SEARCH_PATIENCE, relative_gap=max(CORES_GAP, self.relative_gap))
        if self.best.closed(CORES_GAP):
            least_gain = CLOSE_GAIN if columns(self.small) <= EXACT_COLUMNS else LEAST_GAIN
            gap = max(NEAR_GAP, self.large_gap)
            search.run(patience=CLOSE_PATIENCE, relative_gap=gap, least_gain=least_gain)
            if self.best.closed(NEAR_GAP):
                began = time.monotonic()
                deadline = min(deadline, began + self.proof_s)
                # What is left of that time is for cores.
                search.deadline = min(deadline, began + CLOSE_TIME * self.proof_s)
                search.run(patience=CLOSE_PATIENCE, relative_gap=self.large_gap, least_gain=least_gain)
                search.deadline = deadline
        if self.best.closed(self.large_gap):
            self.near = not self.best.closed(self.relative_gap)
            return True
        self._reached_s = abs(search.cost_s) or 1.0
        left_s = deadline - time.monotonic()
        try:
            if math.isinf(left_s):
                return self._narrow(dual)
            if self.best.closed(CORES_GAP) or columns(self.small) <= EXACT_COLUMNS:
                self.engine = self.engine.until(deadline - (1 - CORES_TIME) * left_s)
                return self._narrow(dual)
        except OutOfTime:
            pass
        other = PricedSearch(
            dual.copy(), self.lift, self.best.aside(), relative_gap=self.relative_gap, deadline=deadline,
            seed=self.engine.seed + 1,
        )  # fmt: skip
        search.run_beside(other)
        if self.best.closed(self.relative_gap):
            return True
        raise OutOfTime

    def _narrow(self, dual: DualAscent) -> bool:
        """Solve ever larger cores, until one holds a solution under the cost that it was cut at; else the
        whole.
        """
        from .dual import ascend

        reach = max(CORE_REACH, self.relative_gap / 2)
        for _ in range(MOST_CORES):
            ascend(dual, self.best, self.relative_gap, self.engine.deadline)
            if self.best.closed(self.relative_gap):
                return True
            if time.monotonic() > self.engine.deadline:
                raise OutOfTime
            bound_s = dual.bound_s()
            target_s = min(
                bound_s + reach * max(abs(bound_s), LEAST_UNIT * self._reached_s), self.best.objective_s
            )
            cut = dual.core(target_s)
            if cut is not None and entries(cut[0]) > CORE_SHARE * entries(self.small):
                break
            if cut is None or not self._solve_core(dual, *cut, target_s):
                self._raise_bound(target_s)
            if self.best.closed(self.relative_gap):
                return True
            if time.monotonic() > self.engine.deadline:
                raise OutOfTime
            reach *= CORE_GROWTH
        if self._climbed(dual):
            return True
        return self._relax(Program(self.small, range(len(self.small.nodes))))

    def _solve_core(self, dual: DualAscent, core: StrategyProblem, left: list[Ints], target_s: float) -> bool:
        """Solve a core and take over its memory prices; False when it has no solution."""
        reduction = reduce(core)
        if reduction.infeasible:
            return False
        if time.monotonic() > self.engine.deadline:
            raise OutOfTime

        def lift(chosen: Sequence[int]) -> Sequence[int]:
            inside = reduction.lift(chosen)
            return self.lift([int(kept[strategy]) for kept, strategy in zip(left, inside, strict=True)])

        search = Rounds(reduction.problem, lift, self.best, self.engine, self.relative_gap, target_s)
        feasible = search.run()
        if search.prices:
            dual.settled = True
            dual.set_prices({int(reduction.time_steps[peak]): s for peak, s in search.prices.items()})
        if feasible:
            # Solved to the end: what costs less than the target is optimal, else nothing costs less.
            self._raise_bound(min(target_s, self.best.objective_s * (1 - self.relative_gap)))
        return feasible

    def _relax(self, program: Program) -> bool:
        """Relaxations with ever more memory rows, then the exact rounds; False when nothing is feasible."""
        self.unit_s = self._reached_s / OBJECTIVE_UNITS
        fixed = sum(block.lower.size for block in program.blocks)
        for _ in range(RELAXATION_ROUNDS):
            answer = self.engine.run(program, unit=self.unit_s, relaxed=True)
            if answer.infeasible:
                return False
            self._raise_bound(answer.bound)
            self.prices = dict(zip(self.rows, answer.prices[fixed:].tolist(), strict=True))
            # A local search may start far above the optimum: the relaxation is the better measure of the
            # objective.
            self.unit_s = max(answer.bound, self._reached_s * LEAST_UNIT) / OBJECTIVE_UNITS
            chosen = program.choice(answer.values)
            self._offer_near(chosen.tolist())
            if self.best.closed(self.relative_gap):
                return True
            new = [peak for peak in self._overflows(answer.values) if peak not in self.rows]
            if not new:
                break
            for peak in new:
                program.add_memory(peak)
            self.rows += new
        if answer.bound >= self.ceiling_s:
            # A core without a solution under its cost has told all it can: that, and its prices.
            return True
        integral = answer.values[program.offset + chosen] > 1 - INTEGRAL
        if columns(self.small) > CLIMB_COLUMNS and self._climbed():
            return True
        # Rows added after the last relaxation are unknown to it.
        seen = frozenset(peak for peak in self.rows if peak not in new)
        return self._exact(chosen, integral, seen)

    def _climbed(self, dual: DualAscent | None = None) -> bool:
        """Whether elimination closes the gap, perhaps up to the ceiling: from a `dual`, or at the prices of memory."""
        if self.engine.deadline - time.monotonic() < CLIMB_LEAST_S:
            return False
        from .dual import DualAscent
        from .priced import PricedSearch

        if dual is None:
            dual = DualAscent(self.small)
            dual.set_prices(self.prices)
        own = self.best.aside()
        search = PricedSearch(
            dual, self.lift, own, relative_gap=self.relative_gap, deadline=self.engine.deadline, seed=self.engine.seed
        )
        search.climb()
        if own.found:
            self.best.offer(own.assignment)
        self._raise_bound(own.bound_s)
        return self.best.closed(self.relative_gap) or own.bound_s >= self.ceiling_s

    def _exact(self, relaxed: Ints, integral: Bools, seen: frozenset[int]) -> bool:
        """Solve each part exactly unless its relaxation is integral; again with more rows while a peak
        overflows.
        """
        covers: list[tuple[int, Ints]] = []
        known: dict[tuple[object, ...], Answer] = {}
        while True:
            chosen, bound, proved = relaxed.copy(), 0.0, True
            for part in parts_apart(self.small, self.rows):
                program = Program(self.small, part)
                binding = [peak for peak in self.rows if program.add_memory(peak)]
                if integral[part].all() and seen.issuperset(binding) and not covers:
                    bound += cost_within(self.small, part, chosen)
                    continue
                key = (tuple(part), tuple(binding), len(covers) if binding else 0)
                if key not in known:
                    for peak, overflowing in covers:
                        program.add_cover(peak, overflowing)
                    try:
                        known[key] = self.engine.run(
                            program, unit=self.unit_s, relative_gap=self.relative_gap
                        )
                    except OutOfTime:
                        proved, bound = False, -math.inf
                        continue
                if known[key].infeasible:
                    return False
                chosen[part] = program.choice(known[key].values)
                bound += known[key].bound
                proved &= known[key].proved
            self._raise_bound(bound)
            over = self._overflows(one_hot(self.small, chosen))
            if not over and proved:
                self._offer(chosen.tolist())
                return True
            self._offer_near(chosen.tolist())
            if not proved:
                raise OutOfTime
            if self.best.closed(self.relative_gap):
                return True
            # A row that is there and overflows all the same was met within the engine's tolerance only.
            covers += [(peak, chosen) for peak in over if peak in self.rows]
            self.rows += [peak for peak in over if peak not in self.rows]

    def _raise_bound(self, bound_s: float) -> None:
        self.best.raise_bound(min(bound_s, self.ceiling_s))

    def _offer(self, chosen: Sequence[int]) -> None:
        claimed_s = evaluate(self.small, chosen).objective_s
        if not self.best.offer(self.lift(chosen), claimed_s):
            raise SolverError("HiGHS returned an assignment that breaks the problem's own rules")

    def _offer_near(self, chosen: Sequence[int]) -> None:
        self.best.offer(self.lift(self.descent.descend(chosen, self.engine.deadline)))

    def _overflows(self, values: Floats) -> list[int]:
        if self.small.limit_bytes is None:
            return []
        alive = self.timeline.bytes_at_peaks(values)
        return self.timeline.worst(alive, self.small.limit_bytes, ROWS_A_ROUND)
