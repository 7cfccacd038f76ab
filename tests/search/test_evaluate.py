"""The judge against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxplan.errors import ArgumentError
from jaxplan.search import Node, StrategyProblem, Usage, evaluate
from tests.search.problems import random_problem


@pytest.mark.parametrize("seed", range(100))
def test_equals_plain_loops(seed: int) -> None:
    problem = random_problem(seed, most_nodes=9)
    rng = np.random.default_rng(seed)
    chosen = [int(rng.integers(node.costs_s.size)) for node in problem.nodes]
    terms, forbidden = [float(node.costs_s[s]) for node, s in zip(problem.nodes, chosen, strict=True)], []
    for i, edge in enumerate(problem.edges):
        pair = chosen[edge.tail], chosen[edge.head]
        if edge.allowed is None or edge.allowed[pair]:
            terms.append(float(edge.costs_s[pair]))
        else:
            forbidden.append(i)
    alive = [
        sum(int(u.bytes[chosen[u.node]]) for u in problem.usages if u.start <= step < u.stop)
        for step in range(max((u.stop for u in problem.usages), default=0))
    ]
    found = evaluate(problem, chosen)
    assert found.objective_s == pytest.approx(math.fsum(terms), rel=1e-12)
    assert found.forbidden == tuple(forbidden)
    assert found.peak_bytes == max(alive, default=0)
    assert not alive or alive[found.peak_time] == max(alive)
    fits = problem.limit_bytes is None or max(alive, default=0) <= problem.limit_bytes
    assert found.feasible == (fits and not forbidden)


def test_memory_is_exact_where_floats_are_not() -> None:
    big = 2**53 + 1  # not a float64
    problem = StrategyProblem(
        nodes=(Node(name="a", costs_s=np.zeros(1)),),
        usages=(Usage(node=0, start=0, stop=1, bytes=np.array([big], dtype=np.int64)),),
        limit_bytes=big - 1,
    )
    assert evaluate(problem, [0]).peak_bytes == big
    assert not evaluate(problem, [0]).feasible


@pytest.mark.parametrize(
    ("assignment", "told"), [((0,), "1 choices|\\(1,\\) choices"), ((0, 2), "`b`"), ((0, -1), "`b`")]
)
def test_a_wrong_assignment_is_refused(assignment: tuple[int, ...], told: str) -> None:
    problem = StrategyProblem(
        nodes=(Node(name="a", costs_s=np.zeros(1)), Node(name="b", costs_s=np.zeros(2)))
    )
    with pytest.raises(ArgumentError, match=told):
        evaluate(problem, assignment)
