"""As much of a cheaper plan that overruns its budget as fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxplan.api import Found, Pipeline
from jaxplan.api.between import differing, nearer
from jaxplan.api.found import assignment_in
from jaxplan.ir import trace
from jaxplan.search import Evaluator, decide


def step(weights: Any, batch: Any) -> Any:
    for name in sorted(weights):
        batch = jnp.tanh(batch @ weights[name])
    return batch


def test_between_two_plans_the_parts_that_fit_are_taken(planner_for: Callable[..., Pipeline]) -> None:
    weights = {name: jax.ShapeDtypeStruct((4096, 4096), jnp.float32) for name in "abcd"}
    traced = trace(step, (weights, jax.ShapeDtypeStruct((32768, 4096), jnp.float32)), {})
    planner = planner_for(traced, (8,), "h100", 2**36)
    space = planner.space({})

    def whole(found: Any) -> Found:
        """The same decision in the space without pins."""
        assert isinstance(found, Found)
        assignment = assignment_in(space, found)
        assert assignment is not None
        decision, objective_s = decide(space, assignment), Evaluator(space.problem)(assignment).objective_s
        result = dataclasses.replace(
            found.result, assignment=tuple(assignment), objective_s=objective_s, bound_s=0.0
        )
        return Found(space=space, result=result, decision=decision, memory=planner.simulate(decision))

    rows = {4: lambda places: (places == 0).any(axis=1)}
    cut = {position: lambda places: (places >= 0).any(axis=1) for position in range(4)}
    kept = {position: lambda places: (places < 0).all(axis=1) for position in range(4)}
    small, large = whole(planner.search(rows | cut)), whole(planner.search(rows | kept))
    assert large.result.objective_s < small.result.objective_s
    assert large.memory.peak_bytes > small.memory.peak_bytes
    parts = list(differing(small, large))
    assert len(parts) >= 4, "each weight is a part"
    apart = np.concatenate(parts)
    assert (
        len(apart)
        == len(set(apart.tolist()))
        == sum(a != b for a, b in zip(small.result.assignment, large.result.assignment, strict=True))
    )
    planner.budget_bytes = (small.memory.peak_bytes + large.memory.peak_bytes) // 2
    between = nearer(planner, small, large)
    assert large.result.objective_s < between.result.objective_s < small.result.objective_s
    assert between.memory.peak_bytes <= planner.budget_bytes
    again = Evaluator(space.problem)(between.result.assignment)
    assert again.feasible and again.objective_s == between.result.objective_s
    assert planner.simulate(between.decision).peak_bytes == between.memory.peak_bytes
    planner.budget_bytes = small.memory.peak_bytes
    assert nearer(planner, small, small) is small
