"""Frontiers against enumeration: every point there is, none that isn't, and a floor that holds for every budget."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from jaxplan.errors import SolverError
from jaxplan.search import (
    Edge,
    Node,
    SearchResult,
    StrategyProblem,
    Termination,
    Usage,
    evaluate,
    exhaustive,
    least_peak,
    stretches,
)
from jaxplan.search import frontier as frontier_module
from jaxplan.search.frontier import TooWide, Tradeoff, trace_frontier
from jaxplan.search.stretches import walk_frontier
from jaxplan.search.sweep import sweep_frontier

from .problems import random_problem

ALL_STEPS = 16
"""More than a random problem has: every step that can bind is carried, so that the frontier is exact."""


def enumerated(problem: StrategyProblem) -> tuple[np.ndarray, np.ndarray]:
    """Objective and peak of every assignment that no edge forbids, all at once."""
    sizes = [node.costs_s.size for node in problem.nodes]
    choices = np.stack([axis.reshape(-1) for axis in np.indices(sizes)])
    seconds = np.zeros(choices.shape[1])
    possible = np.ones(choices.shape[1], bool)
    for node, chosen in zip(problem.nodes, choices, strict=True):
        seconds += node.costs_s[chosen]
    for edge in problem.edges:
        seconds += edge.costs_s[choices[edge.tail], choices[edge.head]]
        if edge.allowed is not None:
            possible &= edge.allowed[choices[edge.tail], choices[edge.head]]
    alive = np.zeros((max((u.stop for u in problem.usages), default=1), choices.shape[1]), np.int64)
    for usage in problem.usages:
        alive[usage.start : usage.stop] += usage.bytes[choices[usage.node]]
    return seconds[possible], alive.max(axis=0)[possible]


def staircase(seconds: np.ndarray, peaks: np.ndarray) -> list[tuple[int, float]]:
    kept: list[tuple[int, float]] = []
    for index in np.lexsort((seconds, peaks)):
        if not kept or seconds[index] < kept[-1][1] * (1 - 1e-12) - 1e-300:
            kept.append((int(peaks[index]), float(seconds[index])))
    return kept


def check_exact(seed: int) -> None:
    problem = random_problem(seed)
    seconds, peaks = enumerated(problem)
    if not seconds.size:
        with pytest.raises(SolverError):
            trace_frontier(problem)
        return
    found = trace_frontier(problem, most_rows=ALL_STEPS)
    check_points(problem, found)
    for size, best_s in staircase(seconds, peaks):
        point = found.at_memory(size)
        assert point is not None
        assert point.objective_s == pytest.approx(best_s, rel=1e-9)
        assert found.bound_at(size) == pytest.approx(best_s, rel=1e-9)
    assert found.at_memory(int(peaks.min()) - 1) is None
    assert found.regret_bound < 1e-9


def check_points(problem: StrategyProblem, found: Tradeoff) -> None:
    """Every point is what its assignment costs, and each beats all before it in time, all after it in memory."""
    for point in found.points:
        result = evaluate(problem, point.assignment)
        assert (result.objective_s, result.peak_bytes) == (point.objective_s, point.peak_bytes)
        assert not result.forbidden
    sizes, times = [p.peak_bytes for p in found.points], [p.objective_s for p in found.points]
    assert sizes == sorted(set(sizes))
    assert times == sorted(set(times), reverse=True)


@pytest.mark.parametrize("seeds", [range(start, start + 20) for start in range(0, 120, 20)])
def test_the_frontier_is_what_enumeration_finds(seeds: range) -> None:
    for seed in seeds:
        check_exact(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(start, start + 100) for start in range(120, 1120, 100)])
def test_a_thousand_frontiers_are_what_enumeration_finds(seeds: range) -> None:
    for seed in seeds:
        check_exact(seed)


@pytest.mark.parametrize(("width", "most_rows"), [(0.3, ALL_STEPS), (0.0, 1), (0.1, 1), (0.05, 2)])
def test_what_is_merged_or_left_out_is_covered_by_the_bound(width: float, most_rows: int) -> None:
    loose = 0
    for seed in range(200, 260):
        problem = random_problem(seed)
        seconds, peaks = enumerated(problem)
        if not seconds.size:
            continue
        found = trace_frontier(problem, width=width, most_rows=most_rows)
        check_points(problem, found)
        for size, best_s in staircase(seconds, peaks):
            point = found.at_memory(size)
            assert found.bound_at(size) <= best_s * (1 + 1e-9)
            if point is not None and math.isfinite(found.regret_bound):
                assert point.objective_s <= best_s * (1 + found.regret_bound) * (1 + 1e-9)
        loose += found.regret_bound > 1e-9
    assert loose, "no case in which the bound has anything to say"


def check_walk(seed: int) -> None:
    """Stretches found under prices and bounds are together the frontier that enumeration finds."""
    problem = random_problem(seed)
    seconds, peaks = enumerated(problem)
    if not seconds.size:
        return
    least = SearchResult(
        assignment=exhaustive.solve(replace(problem, limit_bytes=int(peaks.min()))).assignment,
        objective_s=0.0, bound_s=-math.inf, termination=Termination.OPTIMAL, peak_bytes=int(peaks.min()), wall_s=0.0,
    )  # fmt: skip
    found, left = walk_frontier(
        problem, lambda limited, start: exhaustive.solve(limited, hint=start or None), least, eps=0.0
    )
    check_points(problem, found)
    assert left == 0, "a walk over so small a problem goes all the way"
    assert [(p.peak_bytes, pytest.approx(p.objective_s, rel=1e-9)) for p in found.points] == staircase(
        seconds, peaks
    )
    for size, best_s in staircase(seconds, peaks):
        assert found.bound_at(size) <= best_s * (1 + 1e-9) + 1e-18


@pytest.mark.parametrize("seeds", [range(start, start + 20) for start in (0, 400, 420)])
def test_a_walk_in_stretches_is_the_frontier_too(seeds: range) -> None:
    for seed in seeds:
        check_walk(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(start, start + 100) for start in range(1000, 2000, 100)])
def test_a_thousand_walks_are_the_frontier_too(seeds: range) -> None:
    for seed in seeds:
        check_walk(seed)


def test_what_a_coarse_walk_leaves_to_a_sweep_is_covered_by_both_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walk_on = stretches._Stretches.next_limit

    def one_stretch(walk: stretches._Stretches, limit: int) -> int:
        # as where time is over, or tables are too wide, after the first
        return walk_on(walk, limit) if not walk.largest else limit

    monkeypatch.setattr(stretches._Stretches, "next_limit", one_stretch)
    swept = 0
    for seed in range(340, 400):
        problem = random_problem(seed)
        seconds, peaks = enumerated(problem)
        if not seconds.size:
            continue

        def search(limited: StrategyProblem, start: tuple[int, ...]) -> SearchResult:
            return exhaustive.solve(limited, hint=start or None)

        least = least_peak(problem)
        found, left = walk_frontier(problem, search, least, eps=0.05)
        if left and found.largest:
            swept += 1
            found = sweep_frontier(problem, search, least, eps=0.05, known=found, known_from=left)
        check_points(problem, found)
        for size, best_s in staircase(seconds, peaks):
            assert found.bound_at(size) <= best_s * (1 + 1e-9)
    assert swept, "no walk was left to a sweep"


def test_a_sweep_is_the_frontier_too() -> None:
    for seed in range(300, 340):
        problem = random_problem(seed)
        seconds, peaks = enumerated(problem)
        if not seconds.size:
            continue
        told: list[int] = []
        found = sweep_frontier(
            problem,
            lambda limited, start: exhaustive.solve(limited, hint=start or None),
            least_peak(problem),
            eps=0.0,
            on_point=lambda count, _, told=told: told.append(count),  # type: ignore[misc]
        )
        check_points(problem, found)
        assert [(p.peak_bytes, pytest.approx(p.objective_s, rel=1e-9)) for p in found.points] == staircase(
            seconds, peaks
        )
        assert found.regret_bound < 1e-6
        assert told == sorted(told)


def test_a_coarse_sweep_says_how_coarse_it_is() -> None:
    for seed in range(340, 370):
        problem = random_problem(seed)
        seconds, peaks = enumerated(problem)
        if not seconds.size:
            continue
        found = sweep_frontier(
            problem,
            lambda limited, start: exhaustive.solve(limited, hint=start or None),
            least_peak(problem),
            eps=0.5,
        )
        for size, best_s in staircase(seconds, peaks):
            assert found.bound_at(size) <= best_s * (1 + 1e-9)


def chain(length: int, strategies: int, seed: int) -> StrategyProblem:
    """Layers in a row, all alive at once: the paper's case."""
    rng = np.random.default_rng(seed)
    return StrategyProblem(
        nodes=tuple(Node(name=f"l{i}", costs_s=rng.lognormal(0, 0.5, strategies)) for i in range(length)),
        edges=tuple(
            Edge(tail=i, head=i + 1, costs_s=rng.lognormal(-1, 0.7, (strategies, strategies)))
            for i in range(length - 1)
        ),
        usages=tuple(
            Usage(node=i, start=0, stop=1, bytes=(rng.lognormal(0, 0.5, strategies) * 1e6).astype(np.int64))
            for i in range(length)
        ),
    )


def test_a_long_chain_is_exact_and_no_scalarisation_finds_more() -> None:
    problem = chain(24, 8, 0)
    found = trace_frontier(problem)
    check_points(problem, found)
    assert found.regret_bound < 1e-9
    for price_s in np.geomspace(1e-9, 1e-4, 25):
        # the best sum of seconds and priced bytes, by dynamic programming along the chain
        best = problem.nodes[0].costs_s + price_s * problem.usages[0].bytes
        for i, edge in enumerate(problem.edges, 1):
            step = (best[:, None] + edge.costs_s).min(axis=0)
            best = step + problem.nodes[i].costs_s + price_s * problem.usages[i].bytes
        reached = min(p.objective_s + price_s * p.peak_bytes for p in found.points)
        assert reached == pytest.approx(best.min(), rel=1e-9)


def test_a_graph_that_is_too_dense_is_refused_before_its_table_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frontier_module, "MOST_ENTRIES", 10)
    rng = np.random.default_rng(0)
    dense = StrategyProblem(
        nodes=tuple(Node(name=f"n{i}", costs_s=rng.random(4)) for i in range(6)),
        edges=tuple(Edge(tail=i, head=j, costs_s=rng.random((4, 4))) for i in range(6) for j in range(i)),
        usages=tuple(Usage(node=i, start=0, stop=2, bytes=rng.integers(0, 99, 4)) for i in range(6)),
    )
    with pytest.raises(TooWide, match=r"frontier tables over \d nodes together would have"):
        trace_frontier(dense)


def test_a_budget_that_nothing_keeps_has_no_point_and_an_infinite_bound() -> None:
    found = trace_frontier(chain(3, 3, 1))
    assert found.at_memory(0) is None
    assert found.bound_at(0) == math.inf
