"""HiGHS in a process of its own: run as a program, reads linear programs from its input and writes their solutions.

OR-Tools can't share a process with other users of protobuf's and pybind11's C++ types: after `import tensorflow`, which
many input pipelines do, its solvers refuse their own messages, and after its solvers `import tensorflow` fails (9.15
with tensorflow 2.21, either order).  So nothing of it is ever imported beside the user's program.  A process can also
be ended, which a running HiGHS can't.

This file is run by its path, so that jaxplan, and jax with it, are not imported again: it must import neither.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import pickle
import sys
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearProgram:
    """minimise prices · x subject to row_lower <= A x <= row_upper and 0 <= x <= column_upper.

    A has `values` at (`rows`, `columns`), ordered by row, then column, without zeros.  The first `n_integers` columns
    are whole numbers; the values of the first `n_wanted` are sent back, those of the rows' prices if `wants_prices`.
    `time_limit_s`: None for none.
    """

    prices: np.ndarray
    column_upper: np.ndarray
    n_integers: int
    row_lower: np.ndarray
    row_upper: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray
    n_wanted: int
    wants_prices: bool
    time_limit_s: float | None
    relative_gap: float
    seed: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Solution:
    """What HiGHS says: `reason`, by the name MathOpt has for it, and its detail; no values: `values` is None.

    `bound` is on the objective, from below.
    """

    reason: str
    detail: str
    bound: float
    values: np.ndarray | None
    row_prices: np.ndarray | None


def solve(program: LinearProgram) -> Solution:
    """Solve one program; any error of OR-Tools comes through."""
    from ortools.math_opt.python import mathopt
    from ortools.math_opt.solvers import highs_pb2

    model = mathopt.Model.from_model_proto(_proto(program))
    variables = [model.get_variable(column) for column in range(program.n_wanted)]
    limit_s = program.time_limit_s
    parameters = mathopt.SolveParameters(
        time_limit=None if limit_s is None else datetime.timedelta(seconds=limit_s),
        relative_gap_tolerance=program.relative_gap,
        random_seed=program.seed,
        # Its worker threads gain nothing on these programs.
        highs=highs_pb2.HighsOptionsProto(int_options={"threads": 1}, string_options={"parallel": "off"}),
    )
    wanted = mathopt.ModelSolveParameters(
        variable_values_filter=mathopt.VariableFilter(filtered_items=variables)
    )
    result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters, model_params=wanted)
    reason = result.termination.reason
    has_values = result.has_primal_feasible_solution()
    with_prices = program.wants_prices and reason is mathopt.TerminationReason.OPTIMAL
    return Solution(
        reason=reason.name,
        detail=result.termination.detail,
        bound=float(result.termination.objective_bounds.dual_bound),
        values=np.array(result.variable_values(variables)) if has_values else None,
        row_prices=np.array(result.dual_values(list(model.linear_constraints()))) if with_prices else None,
    )


def _proto(program: LinearProgram) -> Any:
    from ortools.math_opt import model_pb2

    n_columns, n_rows = len(program.prices), len(program.row_lower)
    proto = model_pb2.ModelProto()
    proto.variables.ids.extend(range(n_columns))
    proto.variables.lower_bounds.extend([0.0] * n_columns)
    proto.variables.upper_bounds.extend(program.column_upper.tolist())
    proto.variables.integers.extend(
        [True] * program.n_integers + [False] * (n_columns - program.n_integers)
    )
    priced = np.flatnonzero(program.prices)
    proto.objective.linear_coefficients.ids.extend(priced.tolist())
    proto.objective.linear_coefficients.values.extend(program.prices[priced].tolist())
    proto.linear_constraints.ids.extend(range(n_rows))
    proto.linear_constraints.lower_bounds.extend(program.row_lower.tolist())
    proto.linear_constraints.upper_bounds.extend(program.row_upper.tolist())
    proto.linear_constraint_matrix.row_ids.extend(program.rows.tolist())
    proto.linear_constraint_matrix.column_ids.extend(program.columns.tolist())
    proto.linear_constraint_matrix.coefficients.extend(program.values.tolist())
    return proto


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer pickled fields of LinearPrograms with those of Solutions, or the text of an error, until the end."""
    while True:
        try:
            fields = pickle.load(requests)
        except EOFError:
            return
        try:
            answer: Any = vars(solve(LinearProgram(**fields)))
        except Exception as error:  # whatever it is, the search reports it
            answer = repr(error)
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    # What a solver prints must not end up between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # Loaded before the first program comes; what can't be loaded is told in answer to that.
    with contextlib.suppress(ImportError):
        importlib.import_module("ortools.math_opt.python.mathopt")
    _serve(sys.stdin.buffer, answers)
