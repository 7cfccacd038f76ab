"""What is known of a frontier, and how fast a frontier of many layers is."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from jaxplan.search import (
    Folds,
    Node,
    SearchResult,
    StrategyProblem,
    Usage,
    evaluate,
    exhaustive,
    folded_tradeoff,
    known,
    stretches,
    tradeoff,
)
from jaxplan.search.known import Tradeoff, TradeoffPoint
from jaxplan.search.sweep import sweep_frontier
from jaxplan.search.tradeoff import BUDGET_S
from jaxplan.search.warm import load_walk

from .problems import layers


def test_the_front_is_kept_and_what_is_new_is_laid_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at, plainly = 0, known.staircase

    def counted(points: Iterable[TradeoffPoint]) -> tuple[TradeoffPoint, ...]:
        nonlocal looked_at
        given = tuple(points)
        looked_at += len(given)
        return plainly(given)

    many = 600
    line = np.arange(many)
    node = Node(name="n", costs_s=(many - line).astype(np.float64))
    problem = StrategyProblem(nodes=(node,), usages=(Usage(node=0, start=0, stop=1, bytes=line + 1),))
    so_far = known.Known(problem, 0.0)
    # one strategy in three is beaten by the one before it in both
    node.costs_s[2::3] += 3.0
    rng = np.random.default_rng(0)
    with monkeypatch.context() as patched:
        patched.setattr(known, "staircase", counted)
        for part in np.split(rng.permutation(many), 6):
            for choice in part.tolist():
                so_far.note((choice,))
            front = so_far.front()
            assert front == tuple(sorted(front, key=lambda p: p.peak_bytes))
            assert so_far.best_at(many // 2) == min(
                (p.objective_s for p in so_far.points.values() if p.peak_bytes <= many // 2), default=math.inf
            )
            so_far.tradeoff(1, rows=0, largest=0)
            so_far.gaps()
    assert so_far.front() == plainly(so_far.points.values())
    # a part beside what was there at each of six times, however often it is asked for
    assert looked_at <= 6 * many


@pytest.mark.slow
@pytest.mark.parametrize("alike", [False, True])
def test_ninety_six_layers_of_32_strategies_take_no_more_than_fifteen_seconds_of_one_core(
    alike: bool,
) -> None:
    problem = layers(96, 32, alike=alike)
    load_walk()
    began = time.process_time()
    found, _ = tradeoff(problem, eps=1e-3, time_limit_s=300.0)
    assert time.process_time() - began <= 15.0
    assert found.regret_bound <= 1e-3
    if alike:
        # blocks that repeat are decided once
        began = time.process_time()
        folded = folded_tradeoff(Folds(problem), eps=1e-3, time_limit_s=300.0)
        assert time.process_time() - began <= 2.0
        assert folded is not None
        assert folded[0].regret_bound <= 1e-3
    for point in found.points:
        result = evaluate(problem, point.assignment)
        assert (result.objective_s, result.peak_bytes) == (point.objective_s, point.peak_bytes)


def test_tables_for_one_budget_do_not_take_the_time_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    given_s: list[float] = []

    def swept(known: known.Known, search: known.BudgetSearch, *, deadline: float, **told: Any) -> int:
        monkeypatch.setattr(
            stretches.Stretches,
            "cover",
            lambda walk, limit: bool(given_s.append(walk.deadline - time.monotonic())),
        )
        told["first"](known.top_bytes)
        assert deadline - time.monotonic() > 2 * BUDGET_S
        return 0

    module = importlib.import_module("jaxplan.search.tradeoff")
    monkeypatch.setattr(module, "WHOLE_SUMS", 0)
    monkeypatch.setattr(module, "sweep_frontier", swept)
    tradeoff(layers(4, 4, alike=False), eps=1e-3, time_limit_s=100.0)
    assert len(given_s) == 1
    assert given_s[0] <= BUDGET_S


def test_what_is_steep_over_the_least_peak_is_swept_by_equal_factors() -> None:
    # ten times as long at the least peak, and almost as fast as can be a hundredth of the way from there
    extra = np.arange(0, 200_000, 50)
    node = Node(name="n", costs_s=1 + 9 / (1 + extra / 100))
    problem = StrategyProblem(nodes=(node,), usages=(Usage(node=0, start=0, stop=1, bytes=extra + 10_000),))
    so_far, asked, tried = known.Known(problem, 1e-3), list[int](), list[int]()
    so_far.note((0,))
    so_far.ask(lambda free, _: exhaustive.solve(free), None, ())

    class Enough(Exception):
        pass

    def search(limited: StrategyProblem, start: tuple[int, ...]) -> SearchResult:
        assert limited.limit_bytes is not None
        asked.append(limited.limit_bytes)
        if len(asked) == 2:
            raise Enough
        return exhaustive.solve(limited)

    with pytest.raises(Enough):
        sweep_frontier(so_far, search, first=lambda budget: bool(tried.append(budget)))
    # halves would have been at 100,000 bytes over the least peak, and at 50,000
    assert asked[0] - 10_000 < extra[-1] / 20
    assert so_far.best_at(asked[0]) < 1.5
    assert tried == asked, "what covers a budget is tried before it is searched"


@pytest.mark.parametrize("lighter", [False, True])
def test_what_weighs_more_than_something_faster_is_not_searched(lighter: bool) -> None:
    # a wall: from 10,500 bytes on hardly anything is gained, under them a step takes five times as long
    size = np.arange(10_000, 12_000, 25)
    node = Node(name="n", costs_s=np.where(size < 10_500, 5.0, 1.0) - size / 20_000)
    problem = StrategyProblem(nodes=(node,), usages=(Usage(node=0, start=0, stop=1, bytes=size),))

    def weigh(assignment: tuple[int, ...]) -> int:
        counted = int(size[assignment[0]])
        if lighter and 10_100 <= counted < 10_500:
            return counted
        return counted + (3_000 if counted < 10_500 else 0)

    asked, looked = list[int](), list[int]()

    def noting(budgets: list[int]) -> known.BudgetSearch:
        def search(limited: StrategyProblem, _: tuple[int, ...]) -> SearchResult:
            assert limited.limit_bytes is not None
            budgets.append(limited.limit_bytes)
            return exhaustive.solve(limited)

        return search

    so_far = known.Known(problem, 1e-3, weigh)
    so_far.note((0,))
    so_far.ask(lambda free, _: exhaustive.solve(free), None, ())
    sweep_frontier(so_far, noting(asked), rough=noting(looked))
    under = [budget for budget in asked if budget < 10_400]
    found = so_far.tradeoff(0, rows=0, largest=0)
    # a look at what is under the wall, and no more than that unless it finds what is lighter
    assert looked
    assert bool(under) is lighter
    assert so_far.spent_bytes < (10_100 if lighter else 10_500)
    assert lighter or so_far.spent_bytes >= 10_475
    # what is found over it is proved as before
    assert max(r for p, r in zip(found.points, found.regrets, strict=True) if p.peak_bytes >= 10_500) <= 1e-3


def test_points_that_are_not_missed_are_left_out_and_no_regret_is_over_eps() -> None:
    sizes, seconds = range(0, 1000, 10), [2.0 - 0.0004 * i for i in range(100)]
    points = tuple(
        TradeoffPoint(objective_s=step_s, peak_bytes=size, assignment=(size,))
        for size, step_s in zip(sizes, seconds, strict=True)
    )
    exact = Tradeoff(points=points, floor=tuple(zip(sizes, seconds, strict=True)), rows=1, largest=1)
    assert exact.thinned(0.0).points == points
    thin = exact.thinned(1e-3)
    assert {points[0], points[-1]} < set(thin.points)
    assert len(thin.points) <= 1 + len(points) // 4
    assert 0 < thin.regret_bound <= 1e-3


def test_of_points_within_half_a_grain_of_the_next_those_stay_that_are_proved() -> None:
    points = tuple(
        TradeoffPoint(objective_s=step_s, peak_bytes=size, assignment=(size,))
        for size, step_s in ((0, 9.0), (4, 8.0), (50, 3.0), (96, 2.5), (100, 1.0))
    )
    floor = ((0, 5.0), (4, 8.0), (50, 3.0), (96, 1.5), (100, 1.0))
    found = Tradeoff(points=points, floor=floor, rows=1, largest=1, grain_bytes=10).thinned(1e-3)
    assert [point.peak_bytes for point in found.points] == [4, 50, 100]
