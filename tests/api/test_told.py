"""What a search is told of a plan that overran its budget: the copies at its peak, as memory of who reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxplan.api import Found, Pipeline
from jaxplan.api.told import Told
from jaxplan.ir import Traced, trace
from jaxplan.search import Evaluator


def test_copies_at_the_peak_are_counted_by_who_reads_them(
    planner_for: Callable[..., Pipeline], chain: Callable[[int, int], Traced]
) -> None:
    planner = planner_for(chain(3, 32768), (8,), "h100", 2**32)
    fsdp = planner.search(planner.template("fsdp") or {})
    assert isinstance(fsdp, Found)
    told = Told(planner, fsdp.space)
    assert told.tell(fsdp)
    assert not told.tell(fsdp), "once is enough"
    counted = Evaluator(told.space.problem)(fsdp.result.assignment)
    assert counted.objective_s == fsdp.result.objective_s
    at, chosen = fsdp.memory.peak_time, fsdp.result.assignment
    new = told.space.problem.usages[len(fsdp.space.problem.usages) :]
    told_bytes = sum(int(usage.bytes[chosen[usage.node]]) for usage in new if usage.start <= at < usage.stop)
    assert told_bytes == fsdp.memory.parts["copies"]
    assert told.limit_bytes(fsdp) < counted.peak_bytes


def test_the_scratch_of_sums_is_counted_where_another_plan_does_without(
    planner_for: Callable[..., Pipeline],
) -> None:
    def two(weights: Any, batch: Any) -> Any:
        return jnp.tanh(batch @ weights["a"]) @ weights["b"]

    weights = {
        "a": jax.ShapeDtypeStruct((4096, 16384), jnp.float32),
        "b": jax.ShapeDtypeStruct((16384, 4096), jnp.float32),
    }
    traced = trace(two, (weights, jax.ShapeDtypeStruct((4096, 4096), jnp.float32)), {})
    planner = planner_for(traced, (8,), "tpu-v5e", 2**33)
    rows = planner.search({2: lambda places: (places == 0).any(axis=1)})
    summed = planner.search(
        {0: lambda places: (places == 1).any(axis=1), 1: lambda places: (places == 0).any(axis=1)}
    )
    assert isinstance(rows, Found) and isinstance(summed, Found)
    assert summed.memory.parts["scratch"] > rows.memory.parts.get("scratch", 0) == 0

    told = Told(planner, summed.space)
    told.tell(summed)
    before = len(told.space.problem.usages)
    assert not told.tell(summed)
    told = Told(planner, summed.space)
    told.tell(rows)
    told.tell(summed)
    new = told.space.problem.usages[before:]
    chosen = summed.result.assignment
    assert sum(int(usage.bytes[chosen[usage.node]]) for usage in new) == summed.memory.parts["scratch"]
    assert all(usage.stop - usage.start == len(traced.graph.ops) for usage in new)
    assert all((usage.bytes == 0).any() for usage in new), "layouts without a pending sum need none"
