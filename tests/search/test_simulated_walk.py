"""The walk on the simulator: feasible, never slower than its start nor faster than possible, the same each time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxplan.search import StrategyProblem, evaluate
from jaxplan.search.simulated_walk import walk_simulated
from jaxplan.simulator import Between, Choices, StrategySimulator
from tests.search.problems import random_problem


def choices_of(problem: StrategyProblem) -> Choices:
    return Choices(
        compute_s=tuple(node.costs_s for node in problem.nodes),
        between=tuple(
            Between(tail=e.tail, head=e.head, seconds_s=e.costs_s, axes=(e.costs_s > 0).astype(np.int64))
            for e in problem.edges
        ),
        mesh=(4,), links=(0,),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(904, 910))
def test_the_walk_keeps_to_what_is_possible(seed: int) -> None:
    problem = random_problem(seed, most_nodes=4)
    choices = choices_of(problem)
    everything = itertools.product(*(range(node.costs_s.size) for node in problem.nodes))
    feasible = [list(chosen) for chosen in everything if evaluate(problem, chosen).feasible]
    if not feasible:
        return
    simulated = {tuple(chosen): StrategySimulator(choices, chosen).step_s for chosen in feasible}
    hint = feasible[seed % len(feasible)]
    walks = [
        walk_simulated(problem, StrategySimulator(choices, hint), time_limit_s=60.0, seed=1, hint=hint)
        for _ in range(2)
    ]
    assert walks[0].result.assignment == walks[1].result.assignment
    walk = walks[0]
    assert walk.simulated_s == simulated[walk.result.assignment]
    assert min(simulated.values()) <= walk.simulated_s <= simulated[tuple(hint)]
    assert walk.history[-1][1] == walk.simulated_s
