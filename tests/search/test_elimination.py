"""The compiled kernels, against all assignments in turn: bounds hold, eliminations are exact where they may be."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from jaxplan.search import StrategyProblem, Termination, evaluate, ilp, rounds
from jaxplan.search.alarm import NEVER, Alarm
from jaxplan.search.base import Incumbent
from jaxplan.search.dual import DualAscent, ascend
from jaxplan.search.elimination import assign_window
from jaxplan.search.exhaustive import solve as exhaustive
from jaxplan.search.flat import Flat, flatten
from jaxplan.search.moves import alive_bytes, repair, settle, total_cost
from jaxplan.search.priced import PricedSearch
from tests.search.problems import grid, random_problem

UNLIMITED = math.log(1e9)


def eliminate(
    flat: Flat, chosen: np.ndarray, most_log: float, *, relaxed: bool, window: np.ndarray | None = None, seed: int = 1,
    stop: NDArray[np.uint8] = NEVER,
) -> float:
    """All nodes, or a window, at their own prices, on a pool of the test's own."""
    pool_s = np.concatenate([flat.matrix_s, np.empty(1 << 16)])
    window = np.arange(flat.size.size) if window is None else window
    state = np.array([seed, 0], dtype=np.uint64)
    # The kernel takes each edge from its node that comes first in the window.
    return assign_window(
        flat, flat.unary_s, flat.near_own, pool_s, flat.matrix_s.size, window, np.full(flat.size.size, -1),
        chosen, most_log, 0.0, relaxed, state, stop,
    )  # fmt: skip


def unlimited(seed: int) -> tuple[StrategyProblem, float]:
    """A random problem without its limit, and its optimum (infinite when the edges forbid everything)."""
    problem = replace(random_problem(seed), limit_bytes=None)
    return problem, exhaustive(problem).objective_s


@pytest.mark.parametrize("relaxed", [False, True])
def test_with_room_for_every_table_the_result_is_the_optimum(relaxed: bool) -> None:
    for seed in range(150):
        problem, optimum_s = unlimited(seed)
        flat = flatten(problem)
        chosen = np.zeros(flat.size.size, dtype=np.int64)
        bound_s = eliminate(flat, chosen, UNLIMITED, relaxed=relaxed)
        if math.isinf(optimum_s):
            assert bound_s >= flat.forbidden_s, seed
            continue
        found = evaluate(problem, chosen)
        assert found.feasible, seed
        assert found.objective_s == pytest.approx(optimum_s, rel=1e-9, abs=1e-12), seed
        assert bound_s == pytest.approx(optimum_s, rel=1e-9, abs=1e-12), seed


@pytest.mark.parametrize("sums", [2.0, 10.0, 60.0])
def test_short_of_room_a_relaxation_is_a_bound_and_a_conditioned_one_never_worse(sums: float) -> None:
    loose = 0
    for seed in range(150):
        problem, optimum_s = unlimited(seed)
        if math.isinf(optimum_s):
            continue
        flat = flatten(problem)
        chosen = np.zeros(flat.size.size, dtype=np.int64)
        bound_s = eliminate(flat, chosen, math.log(sums), relaxed=True)
        assert bound_s <= optimum_s + 1e-9 * abs(optimum_s) + 1e-15 * flat.forbidden_s, seed
        loose += bound_s < optimum_s * (1 - 1e-6)
        rng = np.random.default_rng(seed)
        for again in range(3):
            start = np.array([rng.integers(size) for size in flat.size])
            window = rng.permutation(flat.size.size)[: int(rng.integers(1, flat.size.size + 1))]
            chosen = start.copy()
            eliminate(flat, chosen, math.log(sums), relaxed=False, window=window, seed=again + 1)
            assert total_cost(flat, chosen) <= total_cost(flat, start) * (1 + 1e-12) + 1e-12, seed
            outside = np.setdiff1d(np.arange(flat.size.size), window)
            assert (chosen[outside] == start[outside]).all()
    # With room for everything the bound would prove nothing about groups.
    assert loose > (5 if sums < 60 else -1)


def test_flat_costs_and_bytes_are_those_of_the_problem() -> None:
    for seed in range(100):
        problem = random_problem(seed)
        flat, rng = flatten(problem), np.random.default_rng(seed)
        chosen = np.array([rng.integers(node.costs_s.size) for node in problem.nodes])
        found = evaluate(problem, chosen)
        if not found.forbidden:
            assert total_cost(flat, chosen) == pytest.approx(found.objective_s, rel=1e-12, abs=1e-15)
        assert alive_bytes(flat, chosen).max(initial=0) == found.peak_bytes


def test_repaired_is_feasible_and_settling_keeps_it_so_at_no_higher_cost() -> None:
    repaired = 0
    for seed in range(200):
        problem = random_problem(seed)
        flat, rng = flatten(problem), np.random.default_rng(seed)
        chosen = np.array([rng.integers(node.costs_s.size) for node in problem.nodes])
        over = evaluate(problem, chosen)
        load = alive_bytes(flat, chosen)
        if not repair(flat, chosen, load):
            continue
        found = evaluate(problem, chosen)
        assert problem.limit_bytes is None or found.peak_bytes <= problem.limit_bytes, seed
        repaired += not over.feasible and not found.forbidden
        cost_s = total_cost(flat, chosen)
        settle(flat, chosen, load, 20)
        settled = evaluate(problem, chosen)
        assert total_cost(flat, chosen) <= cost_s
        assert problem.limit_bytes is None or settled.peak_bytes <= problem.limit_bytes, seed
        assert (load == alive_bytes(flat, chosen)).all()
    assert repaired > 10


def test_rounds_at_prices_find_optima_and_never_bound_above_them() -> None:
    found = tried = 0
    for seed in range(120):
        problem = random_problem(seed)
        optimum = exhaustive(problem)
        best = Incumbent(problem)
        dual = DualAscent(problem)
        search = PricedSearch(dual, list, best, relative_gap=0.0, deadline=math.inf, seed=0)
        search.offer(ascend(dual, best, 0.0, math.inf))
        search.run(patience=6)
        if optimum.termination is Termination.INFEASIBLE:
            assert not best.assignment
            continue
        assert best.bound_s <= optimum.objective_s * (1 + 1e-9) + 1e-15
        tried += 1
        found += best.objective_s <= optimum.objective_s * (1 + 1e-9)
    # It is no exact method; problems this small it should all but solve.
    assert found > 0.9 * tried > 50


def test_rounds_that_creep_end_where_exact_ones_can_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a search within reach of exact programs, each round of which closes a fiftieth of the gap."""
    problem = grid(6, 4, 0)
    rounded: list[float] = []

    def creeping(search: PricedSearch, patience: float = math.inf, **settings: float) -> None:
        def creep(search: PricedSearch) -> tuple[float, int, np.ndarray]:
            rounded.append(search.best.bound_s)
            search.best.raise_bound(search.best.bound_s + 0.02 * (search.best.objective_s - search.best.bound_s))
            return search.best.bound_s, 0, np.zeros(search.flat.peaks, dtype=np.int64)

        if patience == rounds.CLOSE_PATIENCE:
            search.best.bound_s = 0.995 * search.best.objective_s
            with monkeypatch.context() as patches:
                patches.setattr(PricedSearch, "round", creep)
                patches.setattr(PricedSearch, "_settle_prices", lambda *settled: 0)
                patches.setattr(PricedSearch, "_stray", creep)
                patches.setattr(PricedSearch, "_refine", lambda *work: None)
                run(search, patience=patience, **settings)
        else:
            # it goes on after this, whatever it has closed
            run(search, patience=patience, **settings)
            search.best.bound_s = 0.995 * search.best.objective_s

    run = PricedSearch.run
    monkeypatch.setattr(rounds, "MOST_COLUMNS", 0)
    monkeypatch.setattr(PricedSearch, "run", creeping)
    found = ilp.solve(problem)
    assert len(rounded) == rounds.CLOSE_PATIENCE
    assert found.termination is Termination.OPTIMAL and evaluate(problem, found.assignment).feasible


def test_a_time_limit_leaves_the_best_so_far_of_a_large_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "MOST_COLUMNS", 0)
    problem = grid(20, 12, 0)
    result = ilp.solve(problem, time_limit_s=3.0, relative_gap=0.0)
    assert result.assignment and evaluate(problem, result.assignment).feasible
    assert result.termination in (Termination.TIME_LIMIT, Termination.OPTIMAL)
    assert 0 < result.bound_s <= result.objective_s
    assert result.wall_s < 30


def test_large_problems_give_the_same_answer_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "MOST_COLUMNS", 0)
    for problem in (grid(6, 4, 0), grid(5, 5, 1)):
        first, again = (ilp.solve(problem, seed=3) for _ in range(2))
        assert first.termination is Termination.OPTIMAL
        assert (first.assignment, first.bound_s) == (again.assignment, again.bound_s)


@pytest.mark.parametrize("seed", range(20))
def test_a_climb_bounds_from_below_and_ends_at_the_optimum_without_a_limit(seed: int) -> None:
    problem = random_problem(seed)
    for limit in (None, problem.limit_bytes):
        within = replace(problem, limit_bytes=limit)
        least = exhaustive(within)
        best = Incumbent(within)
        search = PricedSearch(DualAscent(within), list, best, relative_gap=1e-9, deadline=math.inf, seed=seed)
        search.climb()
        if not least.assignment:
            assert not best.assignment
            continue
        assert best.bound_s <= least.objective_s + 1e-9 * abs(least.objective_s)
        assert best.objective_s >= least.objective_s - 1e-9 * abs(least.objective_s)
        if limit is None:
            assert best.objective_s == pytest.approx(least.objective_s)
            assert best.bound_s == pytest.approx(least.objective_s)


@pytest.mark.parametrize("relaxed", [False, True])
def test_a_raised_alarm_ends_the_kernel_and_changes_nothing(relaxed: bool) -> None:
    problem, _ = unlimited(3)
    flat = flatten(problem)
    chosen = np.zeros(flat.size.size, dtype=np.int64)
    assert math.isnan(eliminate(flat, chosen, UNLIMITED, relaxed=relaxed, stop=np.ones(1, dtype=np.uint8)))
    assert not chosen.any()
    before = eliminate(flat, chosen.copy(), UNLIMITED, relaxed=relaxed)
    assert not math.isnan(before)


def test_an_alarm_stops_a_kernel_that_runs() -> None:
    flat = flatten(grid(40, strategies=12, seed=0))
    pool_s = np.concatenate([flat.matrix_s, np.empty(1 << 25)])
    count, alarm = flat.size.size, Alarm()
    chosen = np.zeros(count, dtype=np.int64)
    with alarm.until(time.monotonic() + 0.3):
        # some seconds of eliminations
        least_s = assign_window(
            flat, flat.unary_s, flat.near_own, pool_s, flat.matrix_s.size, np.arange(count), np.full(count, -1),
            chosen, math.log(1e7), 0.0, False, np.array([1, 0], dtype=np.uint64), alarm.flag,
        )  # fmt: skip
    assert math.isnan(least_s)
    assert not chosen.any()
