"""Exact search: an integer program over the reduced problem, solved by HiGHS through OR-Tools.

Sets.       Nodes n with strategies S_n; edges (m, n) with their allowed pairs P_mn; peaks p: the time steps
of the
            reduced problem, at which the usages u alive have bytes b_u.
Variables.  x_n,i in {0, 1}: node n takes strategy i.  e_mn,ij >= 0: edge (m, n) takes the pair (i, j);
continuous, because it is
            integral as soon as x is.  A forbidden pair has no variable.
Objective.  minimise  sum_n sum_i cost_n,i x_n,i + sum_mn sum_ij cost_mn,ij e_mn,ij.
Constraints.
  (1) sum_i x_n,i = 1                                    for each node        `Program.add_one_choice`
  (2) sum_j e_mn,ij = x_m,i                              for each edge and i  `Program.add_links`
  (3) sum_i e_mn,ij = x_n,j                              for each edge and j  `Program.add_links`
  (4) sum_u alive at p sum_i b_u,i x_n(u),i <= limit     for some peaks       `Program.add_memory`
  (5) sum over a cover C of x_n,i <= number of nodes in C - 1, where (4) held by a solver's tolerance only
                                                                              `Program.add_cover`

(2) and (3) together are far tighter than e_ij >= x_i + x_j - 1: on the contest's problem B that form gives a
bound of 37,946 under an optimum of 532,843.  Rows (4) are added when a solution breaks them, at the worst
peaks: a few of tens of thousands ever bind.  First come relaxations, for the bound and a rounding; what is
fractional in them is then solved exactly, each part apart from the others where no edge and no memory row
joins them.

Engine: MathOpt's HiGHS, because at its time limit it still tells its best solution and bound, which OR-Tools'
model_builder does not (9.15).  It can neither be interrupted nor told a first solution: it runs in a thread,
and on Ctrl-C the best known assignment is returned while the thread runs out.
"""

from __future__ import annotations

import atexit
import datetime
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import SolverError
from .base import Incumbent, Progress, SearchResult, Termination
from .descend import Descent
from .dual import DualAscent, ascend, one_hot
from .evaluate import evaluate
from .problem import Bools, Floats, Ints, StrategyProblem
from .program import Program, Timeline
from .reduce import reduce

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

#: Seconds that the engine is given beyond its own time limit before it is left to itself.
GRACE_S = 1.0

#: Seconds that the end of the process waits for an engine that was left to itself.
EXIT_WAIT_S = 10.0

#: Relaxations of more columns than this take HiGHS long enough to look for a core first.
MOST_COLUMNS = 40_000

#: The first core reaches this far over the bound, relatively; each next one four times as far.
CORE_REACH, CORE_GROWTH = 1e-5, 4.0

#: A core with more of the pairs than this is not worth the detour.
CORE_SHARE = 0.5

#: After so many cores the whole is solved: where nothing is feasible, no core ever tells.
MOST_CORES = 8

_NONE = np.zeros(0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """What one run of the engine said: values of the x columns, a bound in the objective's own unit.

    `proved` says that the values are optimal within the gap asked for; `infeasible` that there are none.
    `prices` are what one unit more in each row would save (relaxations only).
    """

    values: Floats
    prices: Floats
    bound: float
    proved: bool
    infeasible: bool


class OutOfTime(Exception):
    """The time of the search is over, and the engine has nothing to show for it."""


class Engine:
    """HiGHS with a deadline (`time.monotonic` seconds) and a seed."""

    def __init__(self, *, deadline: float, seed: int) -> None:
        self.deadline, self.seed = deadline, seed

    def run(
        self, program: Program, *, unit: float, relative_gap: float = 0.0, relaxed: bool = False
    ) -> Answer:
        """Solve a program whose prices are divided by `unit`; OutOfTime when the deadline brings no
        values.
        """
        # Imported where it is used: planning by template needs no solver, and importing it takes half a
        # second.
        from ortools.math_opt.python import mathopt
        from ortools.math_opt.solvers import highs_pb2

        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise OutOfTime
        model = mathopt.Model.from_model_proto(_proto(program, unit, relaxed))
        variables = [model.get_variable(column) for column in range(program.choices)]
        parameters = mathopt.SolveParameters(
            time_limit=None if math.isinf(left_s) else datetime.timedelta(seconds=left_s),
            relative_gap_tolerance=relative_gap,
            random_seed=self.seed,
            # Its worker threads gain nothing on these programs, and don't outlive an exit.
            highs=highs_pb2.HighsOptionsProto(int_options={"threads": 1}, string_options={"parallel": "off"}),
        )
        wanted = mathopt.ModelSolveParameters(
            variable_values_filter=mathopt.VariableFilter(filtered_items=variables),
        )
        result = self._in_thread(
            lambda: mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters, model_params=wanted)
        )
        reason, reasons = result.termination.reason, mathopt.TerminationReason
        # Every column is bounded, so that "infeasible or unbounded" can only be the former.
        if reason in (reasons.INFEASIBLE, reasons.INFEASIBLE_OR_UNBOUNDED):
            return Answer(values=_NONE, prices=_NONE, bound=math.inf, proved=True, infeasible=True)
        if reason not in (reasons.OPTIMAL, reasons.FEASIBLE, reasons.NO_SOLUTION_FOUND):
            raise SolverError(f"HiGHS stopped with {reason.name}: {result.termination.detail or 'no detail'}")
        if not result.has_primal_feasible_solution() or (relaxed and reason is not reasons.OPTIMAL):
            raise OutOfTime
        values = np.array(result.variable_values(variables))
        bound = float(result.termination.objective_bounds.dual_bound) * unit
        prices = -np.array(result.dual_values(list(model.linear_constraints()))) * unit if relaxed else _NONE
        proved = reason is reasons.OPTIMAL
        return Answer(values=values, prices=prices, bound=bound, proved=proved, infeasible=False)

    def _in_thread(self, call: Any) -> Any:
        """Run a blocking call so that Ctrl-C and the deadline are still heeded here, if not by the call."""
        box: list[Any] = []

        def work() -> None:
            try:
                box.append(call())
            # Whatever it is, it is raised again by the caller.
            except BaseException as error:
                box.append(error)

        thread = threading.Thread(target=work, daemon=True, name="jaxplan-highs")
        thread.start()
        try:
            while thread.is_alive():
                thread.join(0.05)
                if time.monotonic() > self.deadline + GRACE_S:
                    raise OutOfTime
        except (OutOfTime, KeyboardInterrupt):
            # A process that ends under a running HiGHS aborts: let it come to its own time limit, within reason.
            atexit.register(thread.join, EXIT_WAIT_S)
            raise
        if isinstance(box[0], BaseException):
            raise SolverError(f"HiGHS failed: {box[0]!r}") from box[0]
        return box[0]


def _proto(program: Program, unit: float, relaxed: bool) -> Any:
    from ortools.math_opt import model_pb2

    columns, blocks = program.columns, program.blocks
    first = np.cumsum([0] + [block.lower.size for block in blocks])
    rows = np.concatenate([block.row + at for block, at in zip(blocks, first, strict=False)])
    cols = np.concatenate([block.column for block in blocks])
    values = np.concatenate([block.coefficient for block in blocks])
    # The proto wants each row's columns together, in ascending order, and no zeros.
    order = np.lexsort((cols, rows))
    order = order[values[order] != 0]
    proto = model_pb2.ModelProto()
    proto.variables.ids.extend(range(columns))
    proto.variables.lower_bounds.extend([0.0] * columns)
    proto.variables.upper_bounds.extend([1.0] * program.ones + [math.inf] * (columns - program.ones))
    proto.variables.integers.extend([not relaxed] * program.choices + [False] * (columns - program.choices))
    prices = program.prices / unit
    priced = np.flatnonzero(prices)
    proto.objective.linear_coefficients.ids.extend(priced.tolist())
    proto.objective.linear_coefficients.values.extend(prices[priced].tolist())
    proto.linear_constraints.ids.extend(range(int(first[-1])))
    proto.linear_constraints.lower_bounds.extend(np.concatenate([block.lower for block in blocks]).tolist())
    proto.linear_constraints.upper_bounds.extend(np.concatenate([block.upper for block in blocks]).tolist())
    proto.linear_constraint_matrix.row_ids.extend(rows[order].tolist())
    proto.linear_constraint_matrix.column_ids.extend(cols[order].tolist())
    proto.linear_constraint_matrix.coefficients.extend(values[order].tolist())
    return proto


def solve(
    problem: StrategyProblem,
    *,
    time_limit_s: float | None = None,
    relative_gap: float = 1e-4,
    seed: int = 0,
    on_progress: Progress | None = None,
    hint: Sequence[int] | None = None,
) -> SearchResult:
    """The cheapest feasible assignment, within `relative_gap` of the bound; see `jaxplan.search.base.Search`.

    INFEASIBLE comes without an assignment; `least_peak` says how many bytes are needed.
    """
    best = Incumbent(problem.verify(), on_progress)
    deadline = math.inf if time_limit_s is None else best.started + time_limit_s
    try:
        if hint is not None:
            best.offer(hint)
        reduction = reduce(problem)
        if reduction.infeasible:
            return best.result(Termination.INFEASIBLE, reduction.infeasible)
        engine = Engine(deadline=deadline, seed=seed)
        if not _Search(reduction.problem, reduction.lift, best, engine, relative_gap).run():
            reason = f"no assignment keeps every time step within {problem.limit_bytes} bytes"
            return best.result(Termination.INFEASIBLE, reason)
        return best.result(Termination.OPTIMAL)
    except OutOfTime:
        return best.result(Termination.TIME_LIMIT)
    except KeyboardInterrupt:
        return best.result(Termination.INTERRUPTED)


class _Search:
    """The state that the relaxations hand on to the exact rounds, for the whole reduced problem or a core of
    it.

    Bounds found in a core hold for the whole up to `ceiling_s`, the cost that the core was cut at.
    """

    def __init__(
        self,
        small: StrategyProblem,
        lift: Callable[[Sequence[int]], Sequence[int]],
        best: Incumbent,
        engine: Engine,
        relative_gap: float,
        ceiling_s: float = math.inf,
    ) -> None:
        self.small, self.lift = small, lift
        self.best, self.engine, self.relative_gap, self.ceiling_s = best, engine, relative_gap, ceiling_s
        self.descent, self.timeline = Descent(small), Timeline(small)
        self.rows: list[int] = []
        self.prices: dict[int, float] = {}
        self.unit_s = 1.0

    def run(self) -> bool:
        """Close the gap; False when nothing is feasible."""
        self._raise_bound(_least_sum(self.small))
        self._offer_near([int(np.argmin(node.costs_s)) for node in self.small.nodes])
        if self.best.closed(self.relative_gap):
            return True
        program = Program(self.small, range(len(self.small.nodes)))
        if program.columns > MOST_COLUMNS and math.isinf(self.ceiling_s):
            return self._narrow(program)
        return self._relax(program)

    def _narrow(self, program: Program) -> bool:
        """Solve ever larger cores, until one holds a solution under the cost that it was cut at; else the whole."""
        reached = abs(evaluate(self.small, self.descent.chosen).objective_s) or 1.0
        dual, reach = DualAscent(self.small), max(CORE_REACH, self.relative_gap / 2)
        for _ in range(MOST_CORES):
            chosen = ascend(dual, self.best, self.relative_gap, self.engine.deadline)
            self._offer_near(chosen)
            if self.best.closed(self.relative_gap):
                return True
            bound_s = dual.bound_s()
            target_s = min(bound_s + reach * max(abs(bound_s), LEAST_UNIT * reached), self.best.objective_s)
            cut = dual.core(target_s)
            if cut is not None and _entries(cut[0]) > CORE_SHARE * _entries(self.small):
                break
            if cut is None or not self._solve_core(dual, *cut, target_s):
                self._raise_bound(target_s)
            if self.best.closed(self.relative_gap):
                return True
            if time.monotonic() > self.engine.deadline:
                raise OutOfTime
            reach *= CORE_GROWTH
        return self._relax(program)

    def _solve_core(self, dual: DualAscent, core: StrategyProblem, left: list[Ints], target_s: float) -> bool:
        """Solve a core and take over its memory prices; False when it has no solution."""
        reduction = reduce(core)
        if reduction.infeasible:
            return False

        def lift(chosen: Sequence[int]) -> Sequence[int]:
            inside = reduction.lift(chosen)
            return self.lift([int(kept[strategy]) for kept, strategy in zip(left, inside, strict=True)])

        search = _Search(reduction.problem, lift, self.best, self.engine, self.relative_gap, target_s)
        feasible = search.run()
        if search.prices:
            dual.settled = True
            for peak in dual.price.keys() - {int(reduction.time_steps[peak]) for peak in search.prices}:
                dual.set_price(peak, 0.0)
            for peak, price_s in search.prices.items():
                dual.set_price(int(reduction.time_steps[peak]), price_s)
        if feasible:
            # Solved to the end: what costs less than the target is optimal, else nothing costs less.
            self._raise_bound(min(target_s, self.best.objective_s * (1 - self.relative_gap)))
        return feasible

    def _relax(self, program: Program) -> bool:
        """Relaxations with ever more memory rows, then the exact rounds; False when nothing is feasible."""
        reached = abs(evaluate(self.small, self.descent.chosen).objective_s) or 1.0
        self.unit_s = reached / OBJECTIVE_UNITS
        fixed = sum(block.lower.size for block in program.blocks)
        for _ in range(RELAXATION_ROUNDS):
            answer = self.engine.run(program, unit=self.unit_s, relaxed=True)
            if answer.infeasible:
                return False
            self._raise_bound(answer.bound)
            self.prices = dict(zip(self.rows, answer.prices[fixed:].tolist(), strict=True))
            # A local search may start far above the optimum: the relaxation is the better measure of the
            # objective.
            self.unit_s = max(answer.bound, reached * LEAST_UNIT) / OBJECTIVE_UNITS
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
        # Rows added after the last relaxation are unknown to it.
        seen = frozenset(peak for peak in self.rows if peak not in new)
        return self._exact(chosen, integral, seen)

    def _exact(self, relaxed: Ints, integral: Bools, seen: frozenset[int]) -> bool:
        """Solve each part exactly unless its relaxation is integral; again with more rows while a peak
        overflows.
        """
        covers: list[tuple[int, Ints]] = []
        known: dict[tuple[object, ...], Answer] = {}
        while True:
            chosen, bound, proved = relaxed.copy(), 0.0, True
            for part in _parts(self.small, self.rows):
                program = Program(self.small, part)
                binding = [peak for peak in self.rows if program.add_memory(peak)]
                if integral[part].all() and seen.issuperset(binding) and not covers:
                    bound += _cost_within(self.small, part, chosen)
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


def _parts(problem: StrategyProblem, rows: Sequence[int]) -> list[list[int]]:
    """The nodes, apart where neither an edge nor the memory row of one of the peaks `rows` joins them."""
    root = list(range(len(problem.nodes)))

    def find(node: int) -> int:
        while root[node] != node:
            root[node] = root[root[node]]
            node = root[node]
        return node

    for edge in problem.edges:
        root[find(edge.tail)] = find(edge.head)
    for peak in rows:
        live = [usage.node for usage in problem.usages if usage.start <= peak < usage.stop]
        for node in live[1:]:
            root[find(live[0])] = find(node)
    parts: dict[int, list[int]] = {}
    for node in range(len(root)):
        parts.setdefault(find(node), []).append(node)
    return list(parts.values())


def _entries(problem: StrategyProblem) -> int:
    """How many pairs the edges allow."""
    return sum(
        edge.costs_s.size if edge.allowed is None else int(edge.allowed.sum()) for edge in problem.edges
    )


def _least_sum(problem: StrategyProblem) -> float:
    """The cheapest strategy of every node and pair of every edge: a bound that is there at once."""
    least: dict[tuple[int, int], float] = {}
    for edge in problem.edges:
        key = (id(edge.costs_s), id(edge.allowed))
        if key not in least:
            least[key] = float((edge.costs_s if edge.allowed is None else edge.costs_s[edge.allowed]).min())
    edges_s = math.fsum(least[id(edge.costs_s), id(edge.allowed)] for edge in problem.edges)
    return math.fsum(float(node.costs_s.min()) for node in problem.nodes) + edges_s


def _cost_within(problem: StrategyProblem, part: list[int], chosen: Ints) -> float:
    """What an assignment pays for the nodes of a part and the edges between them."""
    inside = set(part)
    nodes_s = math.fsum(float(problem.nodes[node].costs_s[chosen[node]]) for node in part)
    edges_s = math.fsum(
        float(edge.costs_s[chosen[edge.tail], chosen[edge.head]])
        for edge in problem.edges
        if edge.tail in inside
    )
    return nodes_s + edges_s
