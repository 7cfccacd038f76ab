"""Bounds without a linear program, and the cores they leave: valid for every feasible assignment."""

from __future__ import annotations

import numpy as np
import pytest

from jaxplan.search import Edge, Node, StrategyProblem, Termination, evaluate, ilp, rounds
from jaxplan.search.dual import DualAscent
from jaxplan.search.exhaustive import solve as exhaustive
from jaxplan.search.moves import alive_bytes
from jaxplan.search.reduce import reduce
from tests.search.problems import grid, random_problem


def test_the_bound_never_exceeds_the_optimum_and_the_core_keeps_it() -> None:
    priced = 0
    for seed in range(450):
        problem = random_problem(seed)
        reduction = reduce(problem)
        optimum = exhaustive(problem)
        if reduction.infeasible or optimum.termination is Termination.INFEASIBLE:
            continue
        dual = DualAscent(reduction.problem)
        slack = 1e-9 * (abs(optimum.objective_s) + 1e-9)
        for _ in range(8):
            chosen = dual.sweep()
            assert dual.bound_s() <= optimum.objective_s + slack, seed
            dual.reprice(alive_bytes(dual.flat, chosen), optimum.objective_s - dual.bound_s())
        dual.sweep()
        priced += any(price > 0 for price in dual.price.values())
        cut = dual.core(optimum.objective_s + slack)
        assert cut is not None, seed
        core, left = cut
        inside = exhaustive(core)
        assert inside.objective_s == pytest.approx(optimum.objective_s, rel=1e-9, abs=1e-15), seed
        whole = [int(kept[strategy]) for kept, strategy in zip(left, inside.assignment, strict=True)]
        assert evaluate(reduction.problem, whole).objective_s == pytest.approx(
            inside.objective_s, rel=1e-12, abs=1e-15
        )
    # Without a price the memory side of the bound would go untested.
    assert priced > 10


def test_on_a_tree_the_bound_is_the_optimum() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        nodes = tuple(Node(name=f"n{i}", costs_s=rng.random(4)) for i in range(6))
        edges = tuple(
            Edge(tail=int(rng.integers(i)), head=i, costs_s=rng.random((4, 4))) for i in range(1, 6)
        )
        problem = StrategyProblem(nodes=nodes, edges=edges)
        dual = DualAscent(problem)
        for _ in range(20):
            dual.sweep()
        assert dual.bound_s() == pytest.approx(exhaustive(problem).objective_s, rel=1e-6)


@pytest.mark.parametrize("block", range(4))
def test_cores_lead_to_the_optimum(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "MOST_COLUMNS", 0)
    for seed in range(800 + block * 50, 850 + block * 50):
        problem = random_problem(seed)
        optimum, result = exhaustive(problem), ilp.solve(problem, relative_gap=0.0)
        assert result.termination is optimum.termination, seed
        assert result.objective_s == pytest.approx(optimum.objective_s, rel=1e-9, abs=0), seed
        assert result.bound_s <= optimum.objective_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_with_and_without_cores_the_same_optimum(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = grid(5, 4, seed)
    direct = ilp.solve(problem, relative_gap=0.0)
    monkeypatch.setattr(rounds, "MOST_COLUMNS", 0)
    by_cores = ilp.solve(problem, relative_gap=0.0)
    assert direct.termination is by_cores.termination is Termination.OPTIMAL
    assert by_cores.objective_s == pytest.approx(direct.objective_s, rel=1e-9)
    assert by_cores.bound_s == pytest.approx(direct.bound_s, rel=1e-6)
