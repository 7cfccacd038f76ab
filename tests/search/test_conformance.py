"""What every search algorithm keeps, on random problems and against all assignments."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest

from jaxplan.search import SEARCHES, Search, SearchResult, StrategyProblem, Termination, evaluate
from tests.search.problems import random_problem

RELATIVE = 1e-9
BLOCKS = 10
BLOCK = 60


def cheapest_by_hand(problem: StrategyProblem) -> float:
    """The least cost of all assignments, in plain loops that share nothing with the package; inf if none is
    feasible.
    """
    best = math.inf
    steps = range(max((u.stop for u in problem.usages), default=0))
    for chosen in itertools.product(*(range(len(node.costs_s)) for node in problem.nodes)):
        if any(
            e.allowed is not None and not e.allowed[chosen[e.tail], chosen[e.head]] for e in problem.edges
        ):
            continue
        cost = math.fsum(
            [float(node.costs_s[s]) for node, s in zip(problem.nodes, chosen, strict=True)]
            + [float(e.costs_s[chosen[e.tail], chosen[e.head]]) for e in problem.edges]
        )
        if cost >= best:
            continue
        if problem.limit_bytes is None or all(
            sum(int(u.bytes[chosen[u.node]]) for u in problem.usages if u.start <= step < u.stop)
            <= problem.limit_bytes
            for step in steps
        ):
            best = cost
    return best


def check_claims(problem: StrategyProblem, result: SearchResult) -> None:
    if result.assignment:
        found = evaluate(problem, result.assignment)
        assert found.feasible
        assert result.objective_s == found.objective_s
        assert result.peak_bytes == found.peak_bytes
        assert result.bound_s <= result.objective_s
        assert result.gap >= 0
    else:
        assert result.objective_s == math.inf
        assert result.reason or result.termination is not Termination.INFEASIBLE
    # What is reported on the way only gets better.
    for (_, worse_s, weaker_s), (_, better_s, stronger_s) in itertools.pairwise(result.history):
        assert better_s <= worse_s and stronger_s >= weaker_s


@pytest.mark.parametrize("block", range(BLOCKS))
def test_exact_searches_agree_on_random_problems(block: int) -> None:
    seen = set()
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        problem = random_problem(seed)
        oracle = SEARCHES["exhaustive"](problem)
        result = SEARCHES["ilp"](problem, relative_gap=0.0)
        seen.add(oracle.termination)
        assert result.termination is oracle.termination, seed
        check_claims(problem, result)
        check_claims(problem, oracle)
        if oracle.termination is Termination.OPTIMAL:
            assert result.objective_s == pytest.approx(oracle.objective_s, rel=RELATIVE, abs=0), seed
            assert result.bound_s == pytest.approx(oracle.objective_s, rel=1e-6, abs=0), seed
    # The generator would be at fault if only one side were ever tried.
    assert seen == {Termination.OPTIMAL, Termination.INFEASIBLE}


@pytest.mark.parametrize("seed", range(20))
def test_exhaustive_is_the_minimum_over_all_assignments(seed: int) -> None:
    problem = random_problem(seed, most_nodes=4)
    assert SEARCHES["exhaustive"](problem).objective_s == pytest.approx(
        cheapest_by_hand(problem), rel=1e-12, abs=0
    )


@pytest.mark.parametrize("name", sorted(SEARCHES))
def test_never_under_the_optimum_and_infeasible_only_with_proof(name: str) -> None:
    for seed in range(600, 640):
        problem = random_problem(seed)
        optimum = SEARCHES["exhaustive"](problem)
        result = SEARCHES[name](problem)
        check_claims(problem, result)
        assert result.objective_s >= optimum.objective_s * (1 - RELATIVE)
        assert result.bound_s <= optimum.objective_s * (1 + RELATIVE)
        if result.termination is Termination.INFEASIBLE:
            assert optimum.termination is Termination.INFEASIBLE
        if result.termination is Termination.OPTIMAL:
            assert result.gap <= 1e-4


@pytest.mark.parametrize("name", sorted(SEARCHES))
def test_the_same_problem_gives_the_same_answer(name: str) -> None:
    for seed in range(640, 660):
        first, again = (SEARCHES[name](random_problem(seed), seed=7) for _ in range(2))
        assert first.assignment == again.assignment
        assert (first.objective_s, first.bound_s) == (again.objective_s, again.bound_s)
        assert first.termination is again.termination


@pytest.mark.parametrize("name", sorted(SEARCHES))
def test_never_worse_than_the_hint(name: str) -> None:
    tried = 0
    for seed in range(660, 700):
        problem = random_problem(seed)
        rng = np.random.default_rng(seed)
        hint = [int(rng.integers(node.costs_s.size)) for node in problem.nodes]
        found = evaluate(problem, hint)
        if found.feasible:
            tried += 1
            assert SEARCHES[name](problem, hint=hint).objective_s <= found.objective_s
    assert tried > 5


@pytest.mark.parametrize("name", sorted(SEARCHES))
def test_progress_ends_at_the_result(name: str) -> None:
    search: Search = SEARCHES[name]
    for seed in range(700, 720):
        reports: list[tuple[float, float]] = []
        result = search(
            random_problem(seed), on_progress=lambda best_s, bound_s, to=reports: to.append((best_s, bound_s))
        )
        assert reports == [(best_s, bound_s) for _, best_s, bound_s in result.history]
        if result.assignment:
            assert reports[-1][0] == result.objective_s


def test_layer_dp_looks_at_the_clock_while_it_prepares(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxplan.search import layer_dp, warm

    search, swept = warm.warmed("layer_dp"), 0

    def slow(dual: layer_dp.DualAscent) -> None:
        nonlocal swept
        swept += 1
        time.sleep(0.05)

    monkeypatch.setattr(layer_dp.DualAscent, "sweep", slow)
    search(warm._ring(), time_limit_s=0.5)
    assert 1 <= swept <= 11
