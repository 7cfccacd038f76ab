"""The engine of the exact search: HiGHS in a process of its own, with a deadline and a seed."""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from .. import child
from ..errors import SolverError
from .highs import LinearProgram, Solution
from .program import Answer, OutOfTime, Program

#: Seconds that the engine is given beyond its own time limit before its process is ended.
GRACE_S = 1.0

_NONE = np.zeros(0)


class Engine:
    """HiGHS with a deadline (`time.monotonic` seconds) and a seed."""

    def __init__(self, *, deadline: float, seed: int) -> None:
        self.deadline, self.seed = deadline, seed

    def until(self, deadline: float) -> Engine:
        """The same engine with another deadline."""
        return Engine(deadline=deadline, seed=self.seed)

    def run(
        self, program: Program, *, unit: float, relative_gap: float = 0.0, relaxed: bool = False
    ) -> Answer:
        """Solve a program whose prices are divided by `unit`; OutOfTime when the deadline brings no values.

        Raises:
          SolverError: HiGHS fails, or its process can't be started or ends.
        """
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise OutOfTime
        request = _linear_program(
            program, unit, relaxed=relaxed, relative_gap=relative_gap, seed=self.seed,
            time_limit_s=None if math.isinf(left_s) else left_s,
        )  # fmt: skip
        solution = _process(os.getpid()).solve(request, self.deadline + GRACE_S)
        reason = solution.reason
        # Every column is bounded, so that "infeasible or unbounded" can only be the former.
        if reason in ("INFEASIBLE", "INFEASIBLE_OR_UNBOUNDED"):
            return Answer(values=_NONE, prices=_NONE, bound=math.inf, proved=True, infeasible=True)
        if reason not in ("OPTIMAL", "FEASIBLE", "NO_SOLUTION_FOUND"):
            raise SolverError(f"HiGHS stopped with {reason}: {solution.detail or 'no detail'}")
        if solution.values is None or (relaxed and reason != "OPTIMAL"):
            raise OutOfTime
        prices = _NONE if solution.row_prices is None else -solution.row_prices * unit
        return Answer(
            values=solution.values, prices=prices, bound=solution.bound * unit,
            proved=reason == "OPTIMAL", infeasible=False,
        )  # fmt: skip


def _linear_program(
    program: Program, unit: float, *, relaxed: bool, relative_gap: float, seed: int, time_limit_s: float | None
) -> LinearProgram:
    blocks = program.blocks
    first = np.cumsum([0] + [block.lower.size for block in blocks])
    rows = np.concatenate([block.row + at for block, at in zip(blocks, first, strict=False)])
    columns = np.concatenate([block.column for block in blocks])
    values = np.concatenate([block.coefficient for block in blocks])
    order = np.lexsort((columns, rows))
    order = order[values[order] != 0]
    upper = np.ones(program.columns)
    upper[program.ones :] = math.inf
    return LinearProgram(
        prices=program.prices / unit, column_upper=upper, n_integers=0 if relaxed else program.choices,
        row_lower=np.concatenate([block.lower for block in blocks]),
        row_upper=np.concatenate([block.upper for block in blocks]),
        rows=rows[order], columns=columns[order], values=values[order], n_wanted=program.choices,
        wants_prices=relaxed, time_limit_s=time_limit_s, relative_gap=relative_gap, seed=seed,
    )  # fmt: skip


def start_solver() -> None:
    """Start the solver's process, which takes it half a second, so that it is ready when the first program comes."""
    # Where it can't be started, whoever has a program for it is told.
    with contextlib.suppress(SolverError):
        _process(os.getpid()).start()


@functools.cache
def _process(pid: int) -> _Process:
    """The one solver process of the process `pid`: a fork must not write into its parent's."""
    process = _Process()

    def end() -> None:
        if os.getpid() == pid:
            process.end()

    # A child in the middle of a long search would go on alone.
    atexit.register(end)
    return process


class _Process:
    """highs.py as a child, started when it is first needed and again after it was ended."""

    def __init__(self) -> None:
        self._child: child.Child | None = None
        self._lock = threading.Lock()

    def solve(self, program: LinearProgram, deadline: float) -> Solution:
        """The solution; OutOfTime, and the child is ended, when none has come by `deadline` (`time.monotonic`)."""
        with self._lock:
            try:
                running = self._running()
                _send(running, vars(program))
                answer = _receive(running, deadline)
            except (OutOfTime, KeyboardInterrupt, SolverError):
                self.end()
                raise
        if isinstance(answer, str):
            raise SolverError(f"HiGHS failed: {answer}")
        return Solution(**answer)

    def start(self) -> None:
        """Start the child, unless it runs already."""
        with self._lock:
            self._running()

    def _running(self) -> child.Child:
        if self._child is not None and self._child.poll() is not None:
            self.end()
        if self._child is None:
            try:
                self._child = child.start(Path(__file__).with_name("highs.py"))
            except OSError as error:
                raise SolverError(
                    f"the solver's process can't be started: {error}.  It runs {sys.executable!r} (sys.executable) on "
                    "jaxplan/search/highs.py"
                ) from error
        return self._child

    def end(self) -> None:
        """Kill the child; the next program starts another."""
        if self._child is not None:
            child.end(self._child)
            self._child = None


def _send(running: child.Child, fields: dict[str, Any]) -> None:
    try:
        child.send(running, fields)
    except BrokenPipeError:
        raise _ended(running) from None


def _receive(running: child.Child, deadline: float) -> Any:
    if not child.has_said(running, None if math.isinf(deadline) else max(deadline - time.monotonic(), 0.0)):
        raise OutOfTime
    try:
        return child.receive(running)
    except EOFError:
        raise _ended(running) from None


def _ended(running: child.Child) -> SolverError:
    return SolverError(
        f"the solver's process ended by itself with status {running.wait()}; what it said stands above.  It needs "
        f"ortools in {sys.executable}"
    )
