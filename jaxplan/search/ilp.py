"""Exact search: an integer program over the reduced problem, solved by HiGHS through OR-Tools.

Sets.       Nodes n with strategies S_n; edges (m, n) with their allowed pairs P_mn; peaks p: the time steps of
            the reduced problem, at which the usages u alive have bytes b_u.
Variables.  x_n,i in {0, 1}: node n takes strategy i.  e_mn,ij >= 0: edge (m, n) takes the pair (i, j); it is
            continuous, because it is integral as soon as x is.  A forbidden pair has no variable.
Objective.  minimise  sum_n sum_i cost_n,i x_n,i + sum_mn sum_ij cost_mn,ij e_mn,ij.
Constraints.
  (1) sum_i x_n,i = 1                                    for each node        `Program.add_one_choice`
  (2) sum_j e_mn,ij = x_m,i                              for each edge and i  `Program.add_links`
  (3) sum_i e_mn,ij = x_n,j                              for each edge and j  `Program.add_links`
  (4) sum_u alive at p sum_i b_u,i x_n(u),i <= limit     for some peaks       `Program.add_memory`
  (5) sum over a cover C of x_n,i <= nodes in C - 1      for some peaks       `Program.add_cover`

(2) and (3) together are far tighter than e_ij >= x_i + x_j - 1: on the contest's problem B that form gives a
bound of 37,946 under an optimum of 532,843.  Rows (4) are added when a solution breaks them, at the worst peaks:
a few of tens of thousands ever bind.  Rows (5) stand in where (4) was met within the solver's tolerance only.
rounds.py says in which order relaxations, cores and exact programs are solved.

Engine: MathOpt's HiGHS, because at its time limit it still tells its best solution and bound, which OR-Tools'
model_builder does not (9.15).  It can neither be interrupted nor told a first solution: it runs in a thread, and
on Ctrl-C the best known assignment is returned while the thread runs out.
"""

from __future__ import annotations

import atexit
import datetime
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import SolverError
from .base import Incumbent, Progress, SearchResult, Termination
from .problem import StrategyProblem
from .program import Answer, OutOfTime, Program
from .reduce import reduce
from .rounds import Rounds

#: Seconds that the engine is given beyond its own time limit before it is left to itself.
GRACE_S = 1.0

#: Seconds that the end of the process waits for an engine that was left to itself.
EXIT_WAIT_S = 10.0

_NONE = np.zeros(0)


class Engine:
    """HiGHS with a deadline (`time.monotonic` seconds) and a seed."""

    def __init__(self, *, deadline: float, seed: int) -> None:
        self.deadline, self.seed = deadline, seed

    def run(
        self, program: Program, *, unit: float, relative_gap: float = 0.0, relaxed: bool = False
    ) -> Answer:
        """Solve a program whose prices are divided by `unit`; OutOfTime when the deadline brings no values."""
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
        if not Rounds(reduction.problem, reduction.lift, best, engine, relative_gap).run():
            reason = f"no assignment keeps every time step within {problem.limit_bytes} bytes"
            return best.result(Termination.INFEASIBLE, reason)
        return best.result(Termination.OPTIMAL)
    except OutOfTime:
        return best.result(Termination.TIME_LIMIT)
    except KeyboardInterrupt:
        return best.result(Termination.INTERRUPTED)
