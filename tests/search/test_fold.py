"""Folding: what it finds is the original's, what it proves holds for the original, and depth costs next to nothing."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from jaxplan.search import (
    SEARCHES,
    Edge,
    Folds,
    Node,
    StrategyProblem,
    Termination,
    Usage,
    evaluate,
    solve_folded,
)
from jaxplan.search.alike import Contents, colours
from jaxplan.search.base import Incumbent
from jaxplan.search.contract import Matrices
from jaxplan.search.fold import _bound_whole, overflow
from jaxplan.search.lifted import LiftedAscent, ascend
from jaxplan.search.quotient import Quotient
from jaxplan.search.tied import tie


def layered(seed: int, depth: int, width: int = 3, strategies: int = 3) -> StrategyProblem:
    """`depth` equal layers of `width` nodes in a chain, a node that all layers share, and ends of their own.

    Edges are tables, followers (some of them from layer to layer) and sums of a row and a column.
    """
    rng = np.random.default_rng(seed)
    square = (strategies, strategies)

    def matrix() -> tuple[np.ndarray, np.ndarray | None]:
        kind = rng.integers(0, 4)
        if kind == 0:
            allowed = np.zeros(square, dtype=np.bool_)
            allowed[np.arange(strategies), rng.permutation(strategies)] = True
            return rng.random(square), allowed
        if kind == 1:
            return rng.random(strategies)[:, None] + rng.random(strategies), None
        return rng.random(square), None

    unary = [rng.random(strategies) for _ in range(width)]
    inside = [(a, b, matrix()) for a in range(width) for b in range(a + 1, width) if rng.random() < 0.7]
    across = [
        (int(rng.integers(width)), int(rng.integers(width)), matrix()) for _ in range(1 + rng.integers(2))
    ]
    shared = [(int(rng.integers(width)), rng.random(square)) for _ in range(rng.integers(2))]
    held = [rng.integers(0, 100, strategies) for _ in range(width)]
    nodes, edges, usages = [Node(name="shared", costs_s=rng.random(strategies))], [], []
    for layer in range(depth):
        first = 1 + layer * width
        nodes += [Node(name=f"{layer}.{i}", costs_s=costs) for i, costs in enumerate(unary)]
        edges += [Edge(tail=first + a, head=first + b, costs_s=m[0], allowed=m[1]) for a, b, m in inside]
        edges += [Edge(tail=0, head=first + a, costs_s=m) for a, m in shared]
        if layer:
            edges += [
                Edge(tail=first - width + a, head=first + b, costs_s=m[0], allowed=m[1]) for a, b, m in across
            ]
        # Kept from the way there to the way back, as residuals are.
        usages += [
            Usage(node=first + i, start=layer, stop=2 * depth - layer, bytes=held[i]) for i in range(width)
        ]
    for end in (1, len(nodes) - 1):
        nodes.append(Node(name=f"end{end}", costs_s=rng.random(strategies)))
        edges.append(Edge(tail=end, head=len(nodes) - 1, costs_s=rng.random(square)))
    return StrategyProblem(nodes=tuple(nodes), edges=tuple(edges), usages=tuple(usages)).verify()


def quotient_of(problem: StrategyProblem, steps: int) -> Quotient:
    matrices = Matrices()
    contents = Contents(problem, matrices)
    return Quotient(problem, contents, colours(problem, contents, steps), matrices).contract()


def middling_limit(problem: StrategyProblem, seed: int) -> int:
    """A limit that some assignments keep and others don't."""
    rng = np.random.default_rng(seed)
    peaks = [
        evaluate(problem, [int(rng.integers(node.costs_s.size)) for node in problem.nodes]).peak_bytes
        for _ in range(20)
    ]
    return int(np.quantile(peaks, 0.1))


def brute_force(problem: StrategyProblem) -> float:
    return SEARCHES["exhaustive"](problem).objective_s


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_tied_assignment_is_one_of_the_original_at_the_same_cost_and_peak(steps: int) -> None:
    tried = 0
    for seed in range(40):
        problem = layered(seed, 12)
        tied = tie(quotient_of(problem, steps))
        if tied is None:
            continue
        tried += 1
        assert len(tied.problem.nodes) < len(problem.nodes)
        rng = np.random.default_rng(seed)
        for _ in range(10):
            chosen = [int(rng.integers(node.costs_s.size)) for node in tied.problem.verify().nodes]
            small, whole = evaluate(tied.problem, chosen), evaluate(problem, tied.lift(chosen))
            assert small.feasible == whole.feasible
            assert small.peak_bytes == whole.peak_bytes
            if small.feasible:
                assert small.objective_s == pytest.approx(whole.objective_s, rel=1e-12)
    assert tried > 20


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_the_lifted_bound_is_under_every_assignment_of_the_original(steps: int) -> None:
    for seed in range(15):
        problem = layered(seed, 4, width=2)
        optimum_s = brute_force(problem)
        if not np.isfinite(optimum_s):
            continue
        best = Incumbent(problem)
        dual = LiftedAscent(quotient_of(problem, steps))
        ascend(dual, best, 0.0, np.inf)
        assert best.bound_s <= optimum_s * (1 + 1e-9)
        assert best.bound_s > 0


def test_the_bound_holds_at_any_price_of_memory() -> None:
    binding = 0
    for seed in range(20):
        free = layered(seed, 4, width=2)
        problem = replace(free, limit_bytes=middling_limit(free, seed))
        optimum_s = brute_force(problem)
        if not np.isfinite(optimum_s):
            continue
        binding += optimum_s > brute_force(free)
        rng = np.random.default_rng(seed)
        prices_s = {2: float(rng.random() * 1e-2), 4: float(rng.random() * 1e-3)}
        best = Incumbent(problem)
        ascend(LiftedAscent(quotient_of(problem, 1), prices_s), best, 0.0, np.inf)
        assert best.bound_s <= optimum_s * (1 + 1e-9)
    assert binding > 3


def test_more_sweeps_without_daring_never_lower_the_bound() -> None:
    for seed in range(10):
        dual = LiftedAscent(quotient_of(layered(seed, 8), 2))
        dual.sweep(0.0)
        last_s = dual.bound_s()
        for _ in range(5):
            dual.sweep(0.0)
            assert dual.bound_s() >= last_s - 1e-9 * abs(last_s)
            last_s = dual.bound_s()


def test_what_hardly_repeats_is_not_folded_unasked() -> None:
    deep, shallow = Folds(layered(0, 64)), Folds(layered(0, 3))
    assert deep.repeats and not shallow.repeats
    assert deep.quotient(3, None) is not None


def test_the_bound_is_never_under_what_caution_alone_proves() -> None:
    """Daring can end far below: what kinds can spare on average is far from what each of them can."""
    for seed in range(12):
        problem = layered(seed, 12, width=4, strategies=4)
        cautious = LiftedAscent(quotient_of(problem, 3))
        for _ in range(8):
            cautious.sweep(0.0)
        best = Incumbent(problem)
        ascend(LiftedAscent(quotient_of(problem, 3)), best, 0.0, np.inf)
        assert best.bound_s >= cautious.bound_s() * (1 - 1e-12)


@pytest.mark.parametrize("tight", [False, True])
def test_a_folded_search_agrees_with_the_whole(tight: bool) -> None:
    equal = 0
    for seed in range(15):
        problem = layered(seed, 8 if tight else 16)
        if tight:
            problem = replace(problem, limit_bytes=middling_limit(problem, seed))
        whole, folded = SEARCHES["ilp"](problem, relative_gap=0.0), solve_folded(problem)
        if whole.termination is Termination.INFEASIBLE:
            assert folded.termination is Termination.INFEASIBLE
            continue
        assert evaluate(problem, folded.assignment).feasible
        assert folded.objective_s >= whole.objective_s * (1 - 1e-9)
        assert folded.bound_s <= whole.objective_s * (1 + 1e-9)
        equal += folded.objective_s <= whole.objective_s * (1 + 1e-3)
        unfolded = solve_folded(problem, unfold_gap=0.0)
        assert unfolded.objective_s <= whole.objective_s * (1 + 1e-4)
        assert unfolded.folded_s is None or unfolded.objective_s <= unfolded.folded_s
    assert equal >= (3 if tight else 8)


@pytest.mark.parametrize("tight", [False, True])
def test_the_whole_is_bounded_from_what_a_fold_found(tight: bool) -> None:
    raised = 0
    for seed in range(8):
        problem = layered(seed, 8)
        if tight:
            problem = replace(problem, limit_bytes=middling_limit(problem, seed))
        exact = SEARCHES["ilp"](problem, relative_gap=0.0)
        best = Incumbent(problem)
        if exact.found:
            best.offer(exact.assignment)
        _bound_whole(problem, Folds(problem), best, 0.005, time.monotonic() + 60.0)
        assert best.bound_s <= exact.objective_s * (1 + 1e-9)
        raised += best.closed(0.005)
    assert raised >= (1 if tight else 6)


def test_the_best_of_what_is_alike_under_pins_is_no_dearer_than_any_other_of_it() -> None:
    beaten = 0
    for seed in range(12):
        problem, rng = layered(seed, 40), np.random.default_rng(seed)
        tied = Folds(problem).tied(3, None)
        if tied is None:
            continue
        # what some tied assignment chooses, and one strategy more, is left to every third node
        model = tied.lift([int(rng.integers(node.costs_s.size)) for node in tied.problem.nodes])
        sizes = [node.costs_s.size for node in problem.nodes]
        kept = {n: np.unique([model[n], int(rng.integers(sizes[n]))]) for n in range(0, len(sizes), 3)}
        found = Folds(problem).alike(None, kept)
        assert found is not None
        if not evaluate(problem, model).feasible:
            continue
        beaten += 1
        assert found.termination is Termination.FEASIBLE
        assert found.bound_s == -np.inf
        assert evaluate(problem, found.assignment).objective_s == found.objective_s == found.folded_s
        assert all(found.assignment[node] in left for node, left in kept.items())
        assert found.objective_s <= evaluate(problem, model).objective_s * (1 + 1e-4)
    assert beaten >= 4


def test_pins_that_tell_equal_nodes_apart_leave_nothing_alike() -> None:
    problem = layered(3, 20)
    folds = Folds(problem)
    tied = folds.tied(3, None)
    assert tied is not None
    first, *_, last = np.flatnonzero(tied.colour == np.bincount(tied.colour).argmax())
    assert folds.alike(None, {int(first): np.array([0]), int(last): np.array([1])}) is None


def test_depth_does_not_grow_the_tied_problem() -> None:
    sizes = set()
    for depth in (20, 40, 80):
        tied = tie(quotient_of(layered(3, depth), 2))
        assert tied is not None
        sizes.add(len(tied.problem.nodes))
    assert len(sizes) == 1


def test_a_folded_search_of_four_times_the_depth_takes_little_longer() -> None:
    def seconds(depth: int) -> float:
        problem = layered(5, depth, width=6, strategies=8)
        started = time.process_time()
        assert solve_folded(problem).folded_s is not None
        return time.process_time() - started

    seconds(100)  # imports and caches
    assert min(seconds(400) for _ in range(3)) < 2.0 * min(seconds(100) for _ in range(3)) + 0.2


def test_colours_tell_apart_what_costs_differ_and_never_the_same_twice() -> None:
    problem = layered(0, 30)
    contents = Contents(problem, Matrices())
    coarse, fine = (colours(problem, contents, steps) for steps in (1, 4))
    assert len({(a, b) for a, b in zip(coarse.tolist(), fine.tolist(), strict=True)}) == fine.max() + 1
    for colour in range(int(fine.max()) + 1):
        alike = np.flatnonzero(fine == colour)
        assert len({problem.nodes[int(n)].costs_s.tobytes() for n in alike}) == 1


def test_an_overflow_of_the_least_choices_is_a_proof() -> None:
    for seed in range(20):
        problem = layered(seed, 4)
        least = StrategyProblem(
            nodes=problem.nodes,
            usages=tuple(replace(u, bytes=np.full_like(u.bytes, u.bytes.min())) for u in problem.usages),
        )
        peak = evaluate(least, [0] * len(problem.nodes)).peak_bytes
        assert overflow(replace(problem, limit_bytes=peak)) == ""
        assert str(peak - 1) in overflow(replace(problem, limit_bytes=peak - 1))
