"""Frontiers against enumeration: every point there is, none that isn't, and a floor that holds for every budget."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxplan.errors import SolverError
from jaxplan.search import (
    Edge,
    Node,
    SearchResult,
    StrategyProblem,
    Usage,
    evaluate,
    exhaustive,
    frontier_elimination,
    stretches,
    tradeoff,
)
from jaxplan.search.branches import Branch
from jaxplan.search.evaluate import Evaluator
from jaxplan.search.frontier import trace_frontier
from jaxplan.search.frontier_elimination import TooWide
from jaxplan.search.known import Known, Tradeoff, TradeoffPoint
from jaxplan.search.stretches import walk_frontier
from jaxplan.search.sweep import sweep_frontier

from .problems import random_problem

MOST_ENUMERATED = 200_000

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


def check_exact(problem: StrategyProblem) -> None:
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
        check_exact(random_problem(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(start, start + 200) for start in range(0, 2000, 200)])
def test_a_thousand_frontiers_are_what_enumeration_finds(seeds: range) -> None:
    checked = 0
    for seed in seeds:
        # up to ten nodes of six strategies, as far as all can be enumerated
        problem = random_problem(seed, most_nodes=10, most_strategies=6)
        if math.prod(node.costs_s.size for node in problem.nodes) <= MOST_ENUMERATED:
            check_exact(problem)
            checked += 1
    assert checked >= len(seeds) // 2


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


def exhaustively(limited: StrategyProblem, start: tuple[int, ...]) -> SearchResult:
    return exhaustive.solve(limited, hint=start or None)


def known_ends(problem: StrategyProblem, least_bytes: int, eps: float) -> Known:
    """What `tradeoff` begins from: both ends of the frontier."""
    known = Known(problem, eps)
    known.note(exhaustive.solve(replace(problem, limit_bytes=least_bytes)).assignment)
    known.ask(exhaustively, None, ())
    return known


def check_walk(seed: int) -> None:
    """Stretches found under prices and bounds are together the frontier that enumeration finds."""
    problem = random_problem(seed)
    seconds, peaks = enumerated(problem)
    if not seconds.size:
        return
    known = known_ends(problem, int(peaks.min()), eps=0.0)
    walk = walk_frontier(known, exhaustively)
    assert not known.gaps(), "a walk over so small a problem goes all the way"
    check_whole(problem, known.tradeoff(int(peaks.min()), rows=walk.rows_carried, largest=walk.largest), seconds, peaks)


def check_whole(problem: StrategyProblem, found: Tradeoff, seconds: np.ndarray, peaks: np.ndarray) -> None:
    check_points(problem, found)
    assert [(p.peak_bytes, pytest.approx(p.objective_s, rel=1e-9)) for p in found.points] == staircase(
        seconds, peaks
    )
    check_floor(found, seconds, peaks)
    assert found.regret_bound < 1e-6


def check_floor(found: Tradeoff, seconds: np.ndarray, peaks: np.ndarray) -> None:
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


@pytest.mark.parametrize("eps", [0.0, 0.05])
def test_what_a_walk_leaves_to_a_sweep_is_covered_by_both_bounds(
    eps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cover = stretches.Stretches.cover

    def one_stretch(walk: stretches.Stretches, limit: int) -> bool:
        # as where time is over, or tables are too wide, after the first
        if walk.largest:
            walk.deadline = 0.0
        return cover(walk, limit)

    monkeypatch.setattr(stretches.Stretches, "cover", one_stretch)
    monkeypatch.setattr(stretches, "FIRST", 0.001)
    left_over = 0
    for seed in range(340, 400):
        problem = random_problem(seed)
        seconds, peaks = enumerated(problem)
        if not seconds.size:
            continue
        known = known_ends(problem, int(peaks.min()), eps)
        walk = walk_frontier(known, lambda limited, start: replace(
            exhaustively(limited, start), assignment=(), objective_s=math.inf, bound_s=-math.inf
        ))  # fmt: skip
        rows, largest = walk.rows_carried, walk.largest
        check_floor(known.tradeoff(int(peaks.min()), rows=rows, largest=largest), seconds, peaks)
        left_over += largest > 0 and bool(known.gaps())
        sweep_frontier(known, exhaustively)
        found = known.tradeoff(int(peaks.min()), rows=rows, largest=largest)
        if eps:
            check_points(problem, found)
            check_floor(found, seconds, peaks)
            assert found.regret_bound <= eps * (1 + 1e-6)
        else:
            check_whole(problem, found, seconds, peaks)
    assert left_over > 5, "no walk was left to a sweep"


def test_a_smaller_budget_goes_on_with_the_parts_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, went_on = [0], [0]
    begin, within = Branch.__init__, Branch.within

    def counted(*given: Any, **named: Any) -> None:
        begun[0] += 1
        begin(*given, **named)

    def again(*given: Any) -> Branch:
        went_on[0] += 1
        return within(*given)

    monkeypatch.setattr(Branch, "__init__", counted)
    monkeypatch.setattr(Branch, "within", again)
    monkeypatch.setattr(stretches, "FIRST", 0.01)
    walks = 0
    for seed in range(340, 360):
        problem = random_problem(seed)
        seconds, peaks = enumerated(problem)
        if seconds.size:
            walk_frontier(known_ends(problem, int(peaks.min()), eps=0.0), exhaustively)
            walks += 1
    assert begun[0] <= walks, "a budget was begun with the whole problem again"
    assert went_on[0] > 3


@pytest.mark.parametrize("seed", range(3))
def test_budgets_far_smaller_than_what_lies_between_the_ends_are_closed(seed: int) -> None:
    count, rng = 80, np.random.default_rng(seed)
    chain = StrategyProblem(
        nodes=tuple(
            Node(name=f"n{i}", costs_s=np.array([0.0, rng.uniform(1, 2), rng.uniform(3, 60)])) for i in range(count)
        ),
        edges=tuple(Edge(tail=i, head=i + 1, costs_s=rng.random((3, 3))) for i in range(count - 1)),
        usages=tuple(
            Usage(node=i, start=0, stop=1, bytes=np.array([1_000_000, rng.integers(1, 1000), 0])) for i in range(count)
        ),
    )
    known = Known(chain, 1e-3)
    for strategy in (0, 2):
        known.note((strategy,) * count)
    limit = 3000
    assert stretches.Stretches(known, math.inf).cover(limit)
    assert known.slack_at(limit) <= 1e-3


def test_a_node_of_hundreds_of_neighbours_is_no_matter() -> None:
    leaves, strategies = 300, 16
    star = StrategyProblem(
        nodes=tuple(Node(name=f"n{i}", costs_s=np.arange(strategies, dtype=np.float64)) for i in range(leaves + 1)),
        edges=tuple(Edge(tail=0, head=i, costs_s=np.eye(strategies)) for i in range(1, leaves + 1)),
        usages=(Usage(node=0, start=0, stop=1, bytes=np.arange(strategies, 0, -1)),),
    )
    rows = frontier_elimination.Rows(star, np.zeros(0, np.int64))
    final, _ = frontier_elimination.Elimination(star, rows, 0.0).run()
    # the middle a step higher than its leaves, which then pay nothing
    assert final.points.seconds.tolist() == [1.0]


def all_joined(strategies: int, most_bytes: int, seed: int) -> StrategyProblem:
    """Six nodes with an edge between any two, all alive at once."""
    rng = np.random.default_rng(seed)
    count = 6
    return StrategyProblem(
        nodes=tuple(Node(name=f"n{i}", costs_s=rng.random(strategies)) for i in range(count)),
        edges=tuple(
            Edge(tail=i, head=j, costs_s=rng.random((strategies, strategies))) for i in range(count) for j in range(i)
        ),
        usages=tuple(
            Usage(node=i, start=0, stop=2, bytes=rng.integers(0, most_bytes, strategies)) for i in range(count)
        ),
    )


def test_a_walk_goes_where_whole_tables_would_be_too_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier_elimination, "MOST_ENTRIES", 10)
    dense = all_joined(strategies=5, most_bytes=999, seed=1)
    with pytest.raises(TooWide):
        trace_frontier(dense)
    seconds, peaks = enumerated(dense)
    known = known_ends(dense, int(peaks.min()), eps=0.0)
    walk = walk_frontier(known, lambda limited, start: replace(
        exhaustively(limited, start), assignment=(), objective_s=math.inf, bound_s=-math.inf
    ))  # fmt: skip
    assert walk.largest > 10
    check_whole(
        dense, known.tradeoff(int(peaks.min()), rows=walk.rows_carried, largest=walk.largest), seconds, peaks
    )


@pytest.mark.parametrize(("width", "base", "share"), [(0.0, 1.0, 0.1), (0.1, 1e4, 0.0), (0.05, 100.0, 0.05)])
@pytest.mark.parametrize("rows", [1, 2])
def test_every_assignment_has_a_point_that_stands_for_it(
    width: float, base: float, share: float, rows: int
) -> None:
    stand_ins = 0
    for seed in range(200, 240):
        problem = random_problem(seed)
        seconds, peaks = enumerated(problem)
        if not seconds.size:
            continue
        times = Evaluator(problem).times[:rows]
        elimination = frontier_elimination.Elimination(
            problem, frontier_elimination.Rows(problem, times), width, base=base, step_s=share * seconds.min()
        )
        points = elimination.run()[0].points
        low = points.low.max(axis=1, initial=0)
        for step_s, peak in zip(seconds.tolist(), peaks.tolist(), strict=True):
            assert ((points.early <= step_s * (1 + 1e-9)) & (low <= peak)).any()
        stand_ins += int(((points.early < points.seconds) | (low < points.bytes.max(axis=1, initial=0))).sum())
    assert stand_ins, "nothing was merged that says anything"


def test_a_sweep_is_the_frontier_too() -> None:
    for seed in range(300, 340):
        problem = random_problem(seed)
        seconds, peaks = enumerated(problem)
        if not seconds.size:
            continue
        told: list[int] = []
        known = known_ends(problem, int(peaks.min()), eps=0.0)
        searched = sweep_frontier(
            known, exhaustively, on_point=lambda count, _, told=told: told.append(count)
        )  # type: ignore[misc]
        check_whole(problem, known.tradeoff(int(peaks.min()), rows=0, largest=0), seconds, peaks)
        assert told == list(range(1, searched + 1))


def test_what_is_known_is_told_for_every_budget() -> None:
    """Floors and gaps against enumeration, budget by budget, where only few budgets were searched."""
    for seed in range(300, 360):
        problem = random_problem(seed)
        seconds, peaks = enumerated(problem)
        if not seconds.size or np.ptp(peaks) < 10:
            continue
        known = known_ends(problem, int(peaks.min()), eps=0.01)
        for part in (0.3, 0.7):
            known.ask(exhaustively, int(peaks.min() + part * np.ptp(peaks)), ())
        found, gaps = known.tradeoff(int(peaks.min()), rows=0, largest=0), known.gaps()
        for budget in np.linspace(peaks.min(), peaks.max(), 200).astype(np.int64).tolist():
            best_s = seconds[peaks <= budget].min()
            point, bound_s = found.at_memory(budget), found.bound_at(budget)
            assert point is not None
            assert bound_s <= best_s * (1 + 1e-9)
            in_gap = [gap for gap in gaps if gap.low_bytes <= budget <= gap.high_bytes]
            after = [p.peak_bytes for p in found.points if p.peak_bytes > budget]
            if in_gap:
                assert in_gap[0].slow_s == point.objective_s
                assert in_gap[0].fast_s <= best_s * (1 + 1e-9)
            elif not after or after[0] - budget > known.grain_bytes:
                assert point.objective_s <= 1.01 * bound_s * (1 + 1e-6)


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


def test_what_whole_tables_leave_open_is_no_worse_with_the_rest_of_the_time() -> None:
    problem = chain(24, 8, 0)
    whole = trace_frontier(problem, width=0.03)
    assert whole.regret_bound > 0.03
    found, how = tradeoff(problem, eps=0.03, time_limit_s=1.5)
    check_points(problem, found)
    assert how.startswith("by elimination of all")
    assert found.regret_bound <= whole.regret_bound
    exact = trace_frontier(problem)
    for point in exact.points:
        assert found.bound_at(point.peak_bytes) <= point.objective_s * (1 + 1e-9)


def test_without_time_both_ends_are_there() -> None:
    problem = chain(24, 8, 0)
    exact = trace_frontier(problem)
    found, _ = tradeoff(problem, eps=1e-3, time_limit_s=0.0)
    check_points(problem, found)
    assert found.points[-1].objective_s <= exact.points[-1].objective_s * 1.001
    assert found.points[0].peak_bytes <= exact.points[0].peak_bytes * 1.001
    assert math.isfinite(found.regret_bound)


def test_a_graph_that_is_too_dense_is_refused_before_its_table_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frontier_elimination, "MOST_ENTRIES", 10)
    dense = all_joined(strategies=4, most_bytes=99, seed=0)
    with pytest.raises(TooWide, match=r"frontier tables over \d nodes together would have"):
        trace_frontier(dense)


def test_a_budget_that_nothing_keeps_has_no_point_and_an_infinite_bound() -> None:
    found = trace_frontier(chain(3, 3, 1))
    assert found.at_memory(0) is None
    assert found.bound_at(0) == math.inf


def test_a_long_chain_is_walked_at_once() -> None:
    rng = np.random.default_rng(0)
    layers, strategies = 48, 16
    nodes, edges, usages = [], [], []
    for layer in range(layers):
        nodes.append(Node(name=str(layer), costs_s=rng.lognormal(size=strategies)))
        held = (rng.lognormal(size=strategies) * 1e6).astype(np.int64)
        usages.append(Usage(node=layer, start=0, stop=1, bytes=held))
        if layer:
            edges.append(Edge(tail=layer - 1, head=layer, costs_s=rng.lognormal(size=(strategies, strategies))))
    problem = StrategyProblem(nodes=tuple(nodes), edges=tuple(edges), usages=tuple(usages))
    found, method = tradeoff(problem, eps=1e-3, time_limit_s=120)
    # tables over all of it would be no nearer to a proof, and take longer
    assert method == "by elimination, stretch by stretch"
    assert found.regret_bound <= 1e-3


def test_a_slow_point_that_has_nothing_but_the_least_peak_is_no_end() -> None:
    fast, slow, end = (
        TradeoffPoint(objective_s=step_s, peak_bytes=size, assignment=(size,))
        for size, step_s in ((2000, 1.0), (1001, 2.0), (1000, 90.0))
    )
    found = Tradeoff(
        points=(end, slow, fast), floor=((1000, 1.9), (1001, 2.0), (2000, 1.0)), rows=1, largest=1, grain_bytes=2
    )
    assert found.thinned(1e-3).points == (slow, fast)
    # as fast as can be, or more than half a grain away: it stays
    assert replace(found, floor=((1000, 90.0), (1001, 2.0))).thinned(1e-3).points[0] is end
    assert replace(found, grain_bytes=0).thinned(1e-3).points[0] is end
