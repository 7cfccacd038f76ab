"""The exact search where random tiny problems do not reach: time, interruption, scale, infeasibility."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace
from unittest.mock import ANY

import numpy as np
import pytest

from jaxplan.search import Edge, Node, StrategyProblem, Termination, Usage, evaluate, least_peak, solve
from jaxplan.search.exhaustive import solve as exhaustive
from jaxplan.search.ilp import solve_with_room
from tests.search.problems import grid, random_problem


def test_the_time_limit_is_kept_and_leaves_something() -> None:
    problem = grid(9, 7, 0)
    start = time.monotonic()
    result = solve(problem, time_limit_s=3.0, relative_gap=0.0)
    assert time.monotonic() - start < 3.0 + 3.0
    assert result.termination is Termination.TIME_LIMIT
    assert evaluate(problem, result.assignment).feasible
    assert 0 < result.bound_s <= result.objective_s
    assert result.gap < 1


def test_a_time_limit_of_nothing_says_so() -> None:
    result = solve(grid(4, 3, 0), time_limit_s=1e-9)
    assert result.termination is Termination.TIME_LIMIT


@pytest.mark.slow
def test_the_last_percent_is_not_proved_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plan that was there after 6 s the gap came from 0.64 to 0.43 % in 110 s more, and no better plan."""
    monkeypatch.setattr("jaxplan.search.rounds.MOST_COLUMNS", 0)
    monkeypatch.setattr("jaxplan.search.rounds.NEAR_GAP", 1.0)  # this one is far from proved
    result = solve(grid(9, 7, 0), time_limit_s=30.0, relative_gap=0.0, proof_s=0.5)
    assert result.termination is Termination.TIME_LIMIT
    assert result.found and result.wall_s < 20.0


def test_a_large_problem_ends_within_its_gap_and_claims_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = grid(6, 4, 0)
    optimum = solve(problem, relative_gap=0.0)
    assert solve(problem, large_gap=0.05).gap <= 1e-4  # a small problem is proved
    monkeypatch.setattr("jaxplan.search.rounds.MOST_COLUMNS", 0)
    near = solve(problem, large_gap=0.05)
    assert near.termination is Termination.FEASIBLE
    assert 1e-4 < near.gap <= 0.05
    assert near.bound_s <= optimum.objective_s <= near.objective_s
    assert solve(problem, large_gap=0.05) == replace(near, wall_s=ANY, history=ANY)


def test_ctrl_c_returns_the_best_so_far() -> None:
    problem = grid(9, 7, 1)
    # Compilers are loaded when they are first needed, and an interrupt inside of them is theirs to handle.
    solve(problem, time_limit_s=1.0, relative_gap=0.0)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(3.0, lambda: signal.pthread_kill(main, signal.SIGINT))
    # A job in a shell's background inherits an interrupt that is ignored.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        result = solve(problem, time_limit_s=8.0, relative_gap=0.0)
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, inherited)
    assert result.termination is Termination.INTERRUPTED
    assert result.wall_s < 6.0
    assert evaluate(problem, result.assignment).feasible
    assert np.isfinite(result.bound_s)


def test_the_gap_asked_for_is_the_gap_given() -> None:
    problem = grid(5, 4, 2)
    exact = solve(problem, relative_gap=0.0)
    loose = solve(problem, relative_gap=0.2)
    assert exact.termination is loose.termination is Termination.OPTIMAL
    assert loose.gap <= 0.2
    assert exact.gap <= 1e-9
    assert exact.objective_s <= loose.objective_s <= exact.objective_s * 1.2 + 1e-12


@pytest.mark.parametrize("exponent", [-9, -3, 0, 6])
def test_the_scale_of_the_costs_changes_nothing(exponent: int) -> None:
    problem = grid(4, 4, 3)
    scale = 10.0**exponent
    scaled = replace(
        problem,
        nodes=tuple(replace(node, costs_s=node.costs_s * scale) for node in problem.nodes),
        edges=tuple(replace(edge, costs_s=edge.costs_s * scale) for edge in problem.edges),
    )
    plain, result = solve(problem, relative_gap=0.0), solve(scaled, relative_gap=0.0)
    assert evaluate(problem, result.assignment).objective_s == pytest.approx(plain.objective_s, rel=1e-9)


def test_parts_that_nothing_joins_are_solved_apart() -> None:
    one = grid(3, 4, 4)
    count = len(one.nodes)
    nodes = tuple(replace(node, name=node.name + "'") for node in one.nodes)
    edges = tuple(replace(e, tail=e.tail + count, head=e.head + count) for e in one.edges)
    usages = tuple(replace(u, node=u.node + count, start=u.start + 99, stop=u.stop + 99) for u in one.usages)
    twice = StrategyProblem(
        nodes=one.nodes + nodes,
        edges=one.edges + edges,
        usages=one.usages + usages,
        limit_bytes=one.limit_bytes,
    )
    single, double = solve(one, relative_gap=0.0), solve(twice, relative_gap=0.0)
    assert double.objective_s == pytest.approx(2 * single.objective_s, rel=1e-9)
    assert double.bound_s == pytest.approx(2 * single.bound_s, rel=1e-6)


def test_without_nodes_there_is_nothing_to_pay() -> None:
    result = solve(StrategyProblem(nodes=()))
    assert (result.assignment, result.objective_s, result.termination) == ((), 0.0, Termination.OPTIMAL)
    assert result.found


def test_a_free_optimum_that_overruns_the_limit_is_not_handed_on() -> None:
    problem = StrategyProblem(
        nodes=(Node(name="n", costs_s=np.array([1.0, 2.0])),),
        usages=(Usage(node=0, start=0, stop=1, bytes=np.array([20, 10])),),
        limit_bytes=10,
    )
    ended, bound = solve_with_room(problem, enough_s=0.5)
    assert bound and not ended.found
    assert (ended.assignment, ended.objective_s, ended.peak_bytes) == ((), np.inf, -1)
    assert solve_with_room(problem)[0].assignment == (1,)


@pytest.mark.parametrize("seed", range(60))
def test_the_least_peak_is_reachable_and_least(seed: int) -> None:
    problem = random_problem(seed)
    found = least_peak(problem, relative_gap=0.0)
    if found.termination is Termination.INFEASIBLE:
        assert exhaustive(replace(problem, limit_bytes=None)).termination is Termination.INFEASIBLE
        return
    assert found.termination is Termination.OPTIMAL
    assert evaluate(problem, found.assignment).peak_bytes == found.peak_bytes
    assert exhaustive(replace(problem, limit_bytes=found.peak_bytes)).termination is Termination.OPTIMAL
    # The engine's own tolerance on rows is 1e-6.
    less = int(found.peak_bytes * (1 - 2e-6)) - 1
    if less >= 0:
        assert exhaustive(replace(problem, limit_bytes=less)).termination is Termination.INFEASIBLE


def test_infeasible_by_memory_alone() -> None:
    # Each choice fits by itself and every peak could fit; the pair forces both large ones.
    two = Node(name="a", costs_s=np.zeros(2))
    problem = StrategyProblem(
        nodes=(two, replace(two, name="b"), replace(two, name="c")),
        edges=(
            Edge(tail=0, head=1, costs_s=np.zeros((2, 2)), allowed=np.array([[True, True], [True, False]])),
            Edge(tail=1, head=2, costs_s=np.zeros((2, 2)), allowed=np.array([[True, True], [True, False]])),
            Edge(tail=0, head=2, costs_s=np.zeros((2, 2)), allowed=np.array([[True, True], [True, False]])),
        ),
        usages=tuple(Usage(node=n, start=0, stop=1, bytes=np.array([6, 1])) for n in range(3)),
        limit_bytes=12,
    )
    result = solve(problem)
    assert result.termination is Termination.INFEASIBLE
    assert "12 bytes" in result.reason
    assert least_peak(problem).peak_bytes == 13


@pytest.mark.parametrize("seed", range(12))
def test_a_search_ends_once_nothing_is_as_cheap_as_wanted(seed: int) -> None:
    problem = random_problem(seed)
    least = exhaustive(problem)
    if not least.assignment:
        assert not solve(problem, enough_s=1.0).assignment
        return
    wanted_s = least.objective_s - 0.2 * abs(least.objective_s)
    ended = solve(problem, enough_s=wanted_s)
    # What it says holds, and it never says that something is cheaper than the least.
    assert ended.bound_s <= least.objective_s + 1e-9 * abs(least.objective_s)
    assert ended.bound_s >= wanted_s or ended.objective_s == pytest.approx(least.objective_s)
    assert solve(problem, enough_s=least.objective_s + abs(least.objective_s)).objective_s == pytest.approx(
        least.objective_s, rel=2e-4
    )


@pytest.mark.parametrize("seed", range(4))
def test_what_is_far_dearer_than_wanted_is_known_within_the_gap_that_is_enough(seed: int) -> None:
    problem = grid(5, 4, seed)
    least = solve(problem, relative_gap=0.0)
    far = solve(problem, relative_gap=0.0, enough_s=0.5 * least.objective_s, enough_gap=0.2)
    # unlike without that gap, something is found; and it is proved no farther than need be
    assert evaluate(problem, far.assignment).feasible
    assert 0.5 * least.objective_s <= far.bound_s <= least.objective_s <= far.objective_s
    assert far.gap <= 0.2
    assert far.bound_s < least.bound_s
    # what is a little dearer is known in proportion, and what may be cheaper as well as asked
    beside = solve(problem, relative_gap=0.0, enough_s=0.97 * least.objective_s, enough_gap=0.2)
    assert beside.gap <= 0.0312
    near = solve(problem, relative_gap=0.0, enough_s=2 * least.objective_s, enough_gap=0.2)
    assert near.gap <= 1e-9
