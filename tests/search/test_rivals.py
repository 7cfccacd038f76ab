"""Where the rivals of the exact search are exact, they find the optimum; everywhere they keep to their time."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxplan.search import SEARCHES, Edge, Node, StrategyProblem, Termination, Usage, evaluate
from tests.search.problems import grid, random_problem

RELATIVE = 1e-9
TIMED = ("ilp", "fold", "ft", "optcnn", "dp", "mcmc", "lambda", "random", "templates")


def chain(seed: int) -> StrategyProblem:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 7, 9).tolist()
    return StrategyProblem(
        nodes=tuple(Node(name=f"n{i}", costs_s=rng.random(size)) for i, size in enumerate(sizes)),
        edges=tuple(
            Edge(tail=i, head=i + 1, costs_s=3 * rng.random((a, b)), allowed=rng.random((a, b)) < 0.8)
            for i, (a, b) in enumerate(itertools.pairwise(sizes))
        ),
    )


@pytest.mark.parametrize("name", ["ft", "optcnn", "lambda"])
def test_elimination_is_exact_where_memory_does_not_bind(name: str) -> None:
    for seed in range(800, 830):
        problem = replace(random_problem(seed), limit_bytes=None)
        optimum = SEARCHES["exhaustive"](problem)
        result = SEARCHES[name](problem)
        assert result.objective_s == pytest.approx(optimum.objective_s, rel=RELATIVE, abs=0)
        if optimum.termination is Termination.OPTIMAL:
            assert result.bound_s == pytest.approx(optimum.objective_s, rel=RELATIVE, abs=1e-12)


def test_layer_dynamic_programming_is_exact_on_chains() -> None:
    found = 0
    for seed in range(20):
        problem = chain(seed)
        exact = SEARCHES["ilp"](problem, relative_gap=0.0)
        result = SEARCHES["dp"](problem)
        assert result.objective_s == pytest.approx(exact.objective_s, rel=RELATIVE)
        found += bool(exact.assignment)
    assert found > 10


def test_the_frontier_is_exact_within_its_width_where_memory_binds() -> None:
    bound = 0
    for seed in range(830, 860):
        problem = random_problem(seed)
        optimum = SEARCHES["exhaustive"](problem)
        result = SEARCHES["ft"](problem)
        assert bool(result.assignment) >= (optimum.termination is Termination.OPTIMAL and not result.reason)
        assert result.bound_s <= optimum.objective_s * (1 + RELATIVE)
        free = SEARCHES["exhaustive"](replace(problem, limit_bytes=None))
        bound += optimum.objective_s > free.objective_s and result.bound_s > free.objective_s * (1 + RELATIVE)
    assert bound > 3  # the bound knows of the limit


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMED)
def test_a_time_limit_is_kept_within_a_twentieth(name: str) -> None:
    limit_s = 5.0
    problem = grid(14, 12, seed=3)
    hint = SEARCHES["descend"](problem).assignment
    SEARCHES[name](problem, time_limit_s=0.5, hint=hint)  # the solver's process is started, kernels loaded
    began = time.monotonic()
    result = SEARCHES[name](problem, time_limit_s=limit_s, hint=hint)
    assert time.monotonic() - began <= 1.05 * limit_s
    assert evaluate(problem, result.assignment).feasible
    assert result.objective_s <= evaluate(problem, hint).objective_s


FIRST_CALL = """
import sys, time
from jaxplan.search import SEARCHES
from jaxplan.search.warm import warmed
from tests.search.problems import grid
problem, (name, module) = grid(14, 12, seed=3), sys.argv[1:]
hint = SEARCHES["descend"](problem).assignment
warmed(module)
began = time.monotonic()
SEARCHES[name](problem, time_limit_s=4.0, hint=hint)
assert time.monotonic() - began <= 1.05 * 4.0
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "module"),
    [("ft", "ft"), ("optcnn", "optcnn"), ("dp", "layer_dp"), ("mcmc", "mcmc"), ("lambda", "scalarised"),
     ("random", "random_choice")],
)  # fmt: skip
def test_a_time_limit_is_kept_by_the_first_call_of_a_process_too(name: str, module: str) -> None:
    subprocess.run([sys.executable, "-c", FIRST_CALL, name, module], check=True, cwd=Path(__file__).parents[2])


def test_one_price_misses_what_lies_between_the_corners() -> None:
    # (seconds, bytes) of the three choices: the middle one is above the line between the others, and fits
    node = Node(name="n", costs_s=np.array([1.0, 1.9, 2.0]))
    usage = np.array([100, 60, 10])
    problem = StrategyProblem(nodes=(node,), limit_bytes=70)
    problem = replace(problem, usages=(Usage(node=0, start=0, stop=1, bytes=usage),)).verify()
    assert SEARCHES["ilp"](problem).assignment == (1,)
    assert SEARCHES["ft"](problem).assignment == (1,)
    assert SEARCHES["lambda"](problem).assignment in ((1,), (2,))
