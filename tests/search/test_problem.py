"""Problems as values: what is refused, what is written, what the contest's files mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxplan.errors import ArgumentError, PlanFileError
from jaxplan.search import Edge, Node, StrategyProblem, Usage, evaluate
from tests.search.problems import random_problem

A = Node(name="a", costs_s=np.zeros(2))
B = Node(name="b", costs_s=np.zeros(3))


@pytest.mark.parametrize("seed", range(50))
def test_round_trip_byte_for_byte(seed: int) -> None:
    problem = random_problem(seed, most_nodes=9)
    text = problem.to_json()
    again = StrategyProblem.from_json(text)
    assert again.to_json() == text
    rng = np.random.default_rng(seed)
    for _ in range(5):
        chosen = [int(rng.integers(node.costs_s.size)) for node in problem.nodes]
        assert evaluate(again, chosen) == evaluate(problem, chosen)


def test_equal_arrays_are_written_once_and_read_back_shared() -> None:
    edges = tuple(Edge(tail=0, head=1, costs_s=np.ones((2, 3))) for _ in range(50))
    problem = StrategyProblem(nodes=(A, B), edges=edges)
    text = problem.to_json()
    assert text.count("[1.0,1.0,1.0]") == 2  # the two rows of one matrix
    assert len({id(edge.costs_s) for edge in StrategyProblem.from_json(text).edges}) == 1


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"schema": 99}', random_problem(3).to_json()[:-40]])
def test_a_broken_file_is_refused(text: str) -> None:
    with pytest.raises(PlanFileError, match="schema"):
        StrategyProblem.from_json(text)


def joined(**edge: object) -> StrategyProblem:
    return StrategyProblem(
        nodes=(A, B), edges=(replace(Edge(tail=0, head=1, costs_s=np.zeros((2, 3))), **edge),)
    )


def using(**usage: object) -> StrategyProblem:
    alive = Usage(node=0, start=0, stop=2, bytes=np.zeros(2, dtype=np.int64))
    return StrategyProblem(nodes=(A,), usages=(replace(alive, **usage),))


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        (StrategyProblem(nodes=(Node(name="x", costs_s=np.zeros(0)),)), "`x`"),
        (StrategyProblem(nodes=(Node(name="x", costs_s=np.array([np.inf])),)), "finite"),
        (joined(head=0), "edge 0"),
        (joined(head=5), "5"),
        (joined(costs_s=np.zeros((3, 2))), "`a` -> `b`"),
        (joined(allowed=np.ones((3, 2), dtype=np.bool_)), "`a` -> `b`"),
        (joined(costs_s=np.full((2, 3), np.inf)), "mask"),
        (using(stop=0), "empty"),
        (using(node=1), "usage 0"),
        (using(bytes=np.zeros(3, dtype=np.int64)), "usage 0"),
        (using(bytes=np.array([0, -1])), "`a`"),
        (using(bytes=np.zeros(2)), "int64"),
        (StrategyProblem(nodes=(A,), limit_bytes=-1), "limit_bytes"),
    ],
)
def test_a_malformed_problem_is_refused(problem: StrategyProblem, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        problem.verify()


def test_all_faults_are_told_at_once() -> None:
    bad = StrategyProblem(nodes=(Node(name="x", costs_s=np.zeros(0)), Node(name="y", costs_s=np.zeros(0))))
    with pytest.raises(ArgumentError, match=r"`x`.*`y`"):
        bad.verify()
