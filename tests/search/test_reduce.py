"""The reduction changes the problem, never its answer."""

from __future__ import annotations

import numpy as np
import pytest

from jaxplan.search import Edge, Node, StrategyProblem, Termination, Usage, evaluate
from jaxplan.search.exhaustive import solve as exhaustive
from jaxplan.search.reduce import reduce
from tests.search.problems import random_problem


@pytest.mark.parametrize("block", range(8))
def test_the_reduced_optimum_lifts_to_the_optimum(block: int) -> None:
    left = 0
    for seed in range(block * 50, (block + 1) * 50):
        problem = random_problem(seed)
        optimum, reduction = exhaustive(problem), reduce(problem)
        if reduction.infeasible:
            assert optimum.termination is Termination.INFEASIBLE, seed
            continue
        reduced = exhaustive(reduction.problem)
        assert reduced.termination is optimum.termination, seed
        if optimum.assignment:
            lifted = evaluate(problem, reduction.lift(reduced.assignment))
            assert lifted.feasible, seed
            assert lifted.objective_s == pytest.approx(optimum.objective_s, rel=1e-12, abs=1e-18), seed
            left += len(reduction.kept) > 1
    # Were everything minimised out each time, the emitted problem would go untested.
    assert left > 0


def test_every_feasible_assignment_lifts_to_one_of_its_cost() -> None:
    rng = np.random.default_rng(0)
    compared = 0
    for seed in range(400, 600):
        problem = random_problem(seed)
        reduction = reduce(problem)
        if reduction.infeasible:
            continue
        small = reduction.problem
        for _ in range(5):
            chosen = [int(rng.integers(node.costs_s.size)) for node in small.nodes]
            inside = evaluate(small, chosen)
            if not inside.forbidden:
                outside = evaluate(problem, reduction.lift(chosen))
                assert outside.objective_s == pytest.approx(inside.objective_s, rel=1e-12, abs=1e-18)
                assert outside.feasible == inside.feasible, seed
                compared += 1
    assert compared > 300


def chain(length: int, strategies: int) -> StrategyProblem:
    """A chain of followers: each node copies the one before; only one is free."""
    rng = np.random.default_rng(1)
    costs = rng.random((length, strategies))
    same = np.zeros((strategies, strategies))
    return StrategyProblem(
        nodes=tuple(Node(name=f"n{i}", costs_s=costs[i]) for i in range(length)),
        edges=tuple(
            Edge(tail=i, head=i + 1, costs_s=same, allowed=np.eye(strategies, dtype=np.bool_))
            for i in range(length - 1)
        ),
        usages=tuple(
            Usage(node=i, start=i, stop=i + 2, bytes=np.arange(strategies, dtype=np.int64))
            for i in range(length)
        ),
        limit_bytes=4,
    )


def test_followers_fold_into_one_node() -> None:
    problem = chain(500, 6)
    reduction = reduce(problem)
    # Two usages are alive at a time, so that at most strategy 2 fits; then memory has no say, and the chain
    # is one sum.
    costs = sum(node.costs_s for node in problem.nodes)
    assert len(reduction.kept) <= 1
    lifted = exhaustive(reduction.problem)
    assert lifted.objective_s == pytest.approx(min(costs[:3]))
    assert len(set(reduction.lift(lifted.assignment))) == 1


def test_a_wipe_out_names_the_node() -> None:
    never = np.zeros((2, 2), dtype=np.bool_)
    problem = StrategyProblem(
        nodes=(Node(name="a", costs_s=np.zeros(2)), Node(name="kernel", costs_s=np.zeros(2))),
        edges=(Edge(tail=0, head=1, costs_s=np.zeros((2, 2)), allowed=never),),
    )
    reason = reduce(problem).infeasible
    assert "every strategy" in reason and ("`a`" in reason or "`kernel`" in reason)


def test_an_overflow_names_the_time_step_and_the_limit() -> None:
    problem = StrategyProblem(
        nodes=(Node(name="a", costs_s=np.zeros(2)),),
        usages=(Usage(node=0, start=3, stop=5, bytes=np.array([7, 9], dtype=np.int64)),),
        limit_bytes=6,
    )
    assert reduce(problem).infeasible == "at time step 3 the least choices already exceed 6 bytes"


def _beside(*, first: list[int], second: list[int], other: list[int]) -> StrategyProblem:
    """A node with bytes at two time steps, beside another at both, within ten bytes."""
    dear_first = np.arange(3, 0, -1, dtype=float)
    return StrategyProblem(
        nodes=(Node(name="a", costs_s=dear_first), Node(name="b", costs_s=dear_first[: len(other)])),
        usages=(
            Usage(node=0, start=0, stop=1, bytes=np.array(first, dtype=np.int64)),
            Usage(node=0, start=1, stop=2, bytes=np.array(second, dtype=np.int64)),
            Usage(node=1, start=0, stop=2, bytes=np.array(other, dtype=np.int64)),
        ),
        limit_bytes=10,
    )


def test_what_is_over_the_limit_beside_the_least_of_others_is_gone() -> None:
    # b keeps 4 at least, so that the cheapest of a, of 7 bytes, never fits
    problem = _beside(first=[1, 5, 7], second=[0, 1, 1], other=[4, 6])
    reduction = reduce(problem)
    assert max(node.costs_s.size for node in reduction.problem.nodes) == 2
    assert exhaustive(reduction.problem).objective_s == exhaustive(problem).objective_s == 5.0


def test_a_node_whose_strategies_are_all_too_large_is_named() -> None:
    assert "every strategy of node 0 `a` is over 10 bytes" in reduce(
        _beside(first=[0, 9, 9], second=[9, 0, 9], other=[4, 6])
    ).infeasible
