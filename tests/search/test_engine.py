"""The solver's process: what it leaves out of the user's, and what happens when it ends."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxplan.search.engine as engine
from jaxplan.errors import SolverError
from jaxplan.search.engine import Engine, start_solver
from jaxplan.search.problem import StrategyProblem
from jaxplan.search.program import OutOfTime, Program
from tests.search.problems import grid

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small() -> Iterator[Program]:
    """A program that takes milliseconds, and a solver's process that no other test has seen."""
    engine._process(os.getpid()).end()
    problem = grid(3, 3, 0)
    yield Program(StrategyProblem(nodes=problem.nodes, edges=problem.edges), range(len(problem.nodes)))
    engine._process(os.getpid()).end()


def pid() -> int:
    child = engine._process(os.getpid())._child
    assert child is not None
    return child.pid


def test_the_solver_is_never_imported_beside_the_users_program() -> None:
    """OR-Tools and TensorFlow break one another in one process, in either order."""
    program = (
        "import os, runpy, sys\nfrom jaxplan.search import engine, solve\n"
        f"grid = runpy.run_path({str(ROOT / 'tests/search/problems.py')!r})['grid']\n"
        "found = solve(grid(5, 4, 2), relative_gap=0.0)\n"
        "assert engine._process(os.getpid())._child is not None, 'no program was left to the solver'\n"
        "print(found.termination.name, [m for m in sys.modules if m.split('.')[0] == 'ortools'])"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert finished.stdout.strip() == "OPTIMAL []", finished.stderr


def test_a_solver_that_was_started_ahead_is_the_one_that_serves(small: Program) -> None:
    start_solver()
    ahead = pid()
    start_solver()
    assert Engine(deadline=math.inf, seed=0).run(small, unit=1.0).proved
    assert pid() == ahead


def test_a_solver_that_cannot_be_started_is_told_by_who_needs_it(
    small: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    start_solver()
    with pytest.raises(SolverError, match="/no/such/python"):
        Engine(deadline=math.inf, seed=0).run(small, unit=1.0)


def test_one_process_serves_many_programs_and_a_killed_one_is_replaced(small: Program) -> None:
    runs = Engine(deadline=math.inf, seed=0)
    first = runs.run(small, unit=1.0)
    before = pid()
    again = runs.run(small, unit=1.0)
    assert pid() == before
    os.kill(before, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while engine._process(os.getpid())._child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    after = runs.run(small, unit=1.0)
    assert pid() != before
    assert first.bound == again.bound == after.bound


def test_a_process_that_is_not_done_in_time_is_ended(small: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Engine(deadline=math.inf, seed=0)
    runs.run(small, unit=1.0)
    before = pid()
    os.kill(before, signal.SIGSTOP)
    monkeypatch.setattr(engine, "GRACE_S", 0.1)
    with pytest.raises(OutOfTime):
        Engine(deadline=time.monotonic() + 0.2, seed=0).run(small, unit=1.0)
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    assert runs.run(small, unit=1.0).proved


def test_a_process_that_cannot_work_is_named(small: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(SolverError, match=r"can't be started: .*'/no/such/python' \(sys\.executable\)"):
        Engine(deadline=math.inf, seed=0).run(small, unit=1.0)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SolverError, match=r"ended by itself with status 1.*needs ortools in /bin/false"):
        Engine(deadline=math.inf, seed=0).run(small, unit=1.0)
