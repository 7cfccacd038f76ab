"""Parts of a problem within a budget: bounds that hold, nothing left out, and what prices leave open closed."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from jaxplan.search import Edge, Node, StrategyProblem, Usage, exhaustive
from jaxplan.search.branches import Branch
from jaxplan.search.evaluate import Evaluator
from jaxplan.search.narrow import narrow
from jaxplan.search.program import OutOfTime
from jaxplan.search.reduce import reduce

from .problems import random_problem


def optimum(problem: StrategyProblem, limit: int) -> float:
    return exhaustive.solve(replace(problem, limit_bytes=limit)).objective_s


def either_or() -> StrategyProblem:
    """One choice overflows early, the other late; half of each would fit, and only a third, slow one does.

    None overflows by itself: another node, which pays for using less, decides with it.
    """
    return StrategyProblem(
        nodes=(
            Node(name="choice", costs_s=np.array([1.0, 1.0, 5.0])), Node(name="beside", costs_s=np.array([0.0, 9.0])),
        ),
        usages=(
            Usage(node=0, start=0, stop=1, bytes=np.array([90, 20, 50])),
            Usage(node=0, start=1, stop=2, bytes=np.array([20, 90, 50])),
            Usage(node=1, start=0, stop=2, bytes=np.array([45, 5])),
        ),
    )


def left(part: Branch, node: int) -> list[int]:
    """The strategies of a node that a part has."""
    at = part.dual.flat.at[node]
    return np.flatnonzero(part.left[at : at + part.dual.flat.size[node]]).tolist()


def kept(part: Branch) -> dict[int, np.ndarray]:
    """The same of all nodes."""
    return {node: np.array(left(part, node)) for node in range(part.dual.flat.size.size)}


def test_parting_closes_what_prices_leave_open() -> None:
    problem = either_or()
    whole = Branch(problem, 100, by_byte={}, best_s=5.0)
    assert whole.bound_s == pytest.approx(1.0)
    parts = whole.parted(4.9, 5.0)
    assert parts is not None
    assert min(part.bound_s for part in parts) == pytest.approx(5.0)
    assert sorted(one for part in parts for one in left(part, 0)) == [0, 1, 2]


def test_what_overflows_alone_is_in_no_mixture() -> None:
    # half of each would fit, none of them does, whatever the other one does
    problem = StrategyProblem(
        nodes=(Node(name="choice", costs_s=np.array([1.0, 5.0])), Node(name="beside", costs_s=np.array([0.0, 0.5]))),
        usages=(
            Usage(node=0, start=0, stop=1, bytes=np.array([101, 0])),
            Usage(node=1, start=0, stop=1, bytes=np.array([20, 10])),
        ),
    )
    whole = Branch(problem, 100, by_byte={}, best_s=9.0)
    assert whole.bound_s == pytest.approx(5.0)
    assert left(whole, 0) == [1]
    # nor is what then overflows beside it
    assert left(whole.within(15, 9.0), 1) == [1]


def test_where_nothing_is_gained_nothing_is_parted() -> None:
    whole = Branch(either_or(), 100, by_byte={}, best_s=5.0)
    assert whole.parted(5.1, 6.0) is None
    # nor is it tried again
    assert whole.parted(1.0, 6.0) is None


def test_parting_ends_with_the_time() -> None:
    whole = Branch(either_or(), 100, by_byte={}, best_s=5.0)
    with pytest.raises(OutOfTime):
        whole.parted(4.9, 5.0, time.monotonic() - 1.0)


def test_bounds_hold_for_parts_and_smaller_budgets() -> None:
    parted = 0
    for seed in range(700, 760):
        problem = random_problem(seed)
        reduction = reduce(problem, for_peak=True)
        if reduction.infeasible:
            continue
        small = reduction.problem
        judge = Evaluator(small)
        rng = np.random.default_rng(seed)
        peaks = [judge([int(rng.integers(n.costs_s.size)) for n in small.nodes]).peak_bytes for _ in range(8)]
        limit = int(np.median(peaks))
        best_s = optimum(small, limit)
        whole = Branch(small, limit, by_byte={}, best_s=best_s)
        assert whole.bound_s <= best_s * (1 + 1e-9) + 1e-12
        parts = whole.parted(whole.bound_s + 1e-3 * abs(best_s - whole.bound_s), best_s)
        if not np.isfinite(best_s) or parts is None:
            continue
        parted += 1
        found = []
        for part in parts:
            one_s = optimum(narrow(small, kept(part)), limit)
            found.append(one_s)
            assert part.bound_s <= one_s * (1 + 1e-9) + 1e-12
            tighter = int(limit * 0.9)
            least_s = optimum(narrow(small, kept(part)), tighter)
            assert part.floor().at(np.array([tighter]))[0] <= least_s * (1 + 1e-9) + 1e-12
            # gone on with in a smaller budget, nothing is lost of what was proved
            nearer = part.within(tighter, least_s)
            assert (nearer.left <= part.left).all()
            assert part.floor().at(np.array([tighter]))[0] <= nearer.bound_s * (1 + 1e-9) + 1e-12
            assert nearer.bound_s <= least_s * (1 + 1e-9) + 1e-12
        assert min(found) == pytest.approx(best_s)
    assert parted > 5


def test_what_messages_leave_open_is_parted_whatever_is_held_in_memory() -> None:
    # of three that want to differ, two strategies each, two are alike: messages see half of each and no cost
    differ = np.array([[1.0, 0.0], [0.0, 1.0]])
    problem = StrategyProblem(
        nodes=tuple(Node(name=f"n{i}", costs_s=np.zeros(2)) for i in range(3)),
        edges=tuple(Edge(tail=tail, head=head, costs_s=differ) for tail, head in ((0, 1), (1, 2), (0, 2))),
        usages=(Usage(node=0, start=0, stop=1, bytes=np.array([1, 1])),),
    )
    whole = Branch(problem, 100, by_byte={}, best_s=1.0)
    assert whole.bound_s < 0.5
    parts = whole.parted(0.9, 1.0)
    assert parts is not None
    assert min(part.bound_s for part in parts) == pytest.approx(1.0)
    (node,) = (n for n in range(3) if len(left(parts[0], n)) == 1)
    assert sorted(one for part in parts for one in left(part, node)) == [0, 1]
