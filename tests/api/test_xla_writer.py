"""Kernels of a step on an H100: what is sent for whom, what fills a loop's stacks, and what may run before a loop."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan import Plan
from jaxplan.plans import PlannedTask

WIDTH, LAYERS = 1024, 3


@pytest.fixture(scope="module")
def scanned() -> Plan:
    """A step of layers in a scan and a head, whose weights are cut by their first dimension."""

    def step(params: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        def loss(params: dict[str, jax.Array]) -> jax.Array:
            def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
                return jnp.tanh(x @ w.astype(jnp.bfloat16)), None

            x_ = x @ params["stem"].astype(jnp.bfloat16)
            return jnp.mean((jax.lax.scan(layer, x_, params["layers"])[0] @ params["head"].astype(jnp.bfloat16)) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    square = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    params = {"stem": square, "head": square, "layers": jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)}
    cut = {"params/stem": P("data"), "params/head": P("data"), "params/layers": P(None, "data"), "x": P("data")}
    return jaxplan.plan(
        step, jax.sharding.AbstractMesh((8,), ("data",)), params, jax.ShapeDtypeStruct((1 << 14, WIDTH), jnp.bfloat16),
        hardware="h100", constraints=cut, options={"compare_templates": False},
    )  # fmt: skip


def before_the_loop(tasks: Sequence[PlannedTask]) -> list[PlannedTask]:
    return list(tasks[: next(i for i, task in enumerate(tasks) if task.kind == "barrier")])


def test_all_seconds_are_there(scanned: Plan) -> None:
    computed = math.fsum(task.seconds_s for task in scanned.tasks if task.kind == "compute")
    timeline = jaxplan.simulate(scanned)
    assert computed + timeline.comm_s == pytest.approx(scanned.cost.compute_s + scanned.cost.comm_s, rel=1e-6)


def test_a_loop_s_stacks_are_filled_before_it(scanned: Plan) -> None:
    before = before_the_loop(scanned.tasks)
    assert any("fill" in task.name for task in before)
    inside = scanned.tasks[len(before) :]
    assert not any("fill" in task.name for task in inside if task.trips == LAYERS)


def test_the_head_is_gathered_with_the_stem_before_the_loop(scanned: Plan) -> None:
    """XLA combines what waits for arguments alone, wherever it is read."""
    gathered = [task for task in scanned.tasks if task.kind == "all_gather" and task.trips == 1]
    before = [task for task in before_the_loop(scanned.tasks) if task.kind == "all_gather"]
    assert len(gathered) == len(before) == 1
    own = jaxplan.simulate(scanned)
    both = next(event for event in own.events if event.task.kind == "all_gather")
    layers = [task for task in scanned.tasks if task.kind == "all_gather" and task.trips == LAYERS]
    assert layers and both.end_s - both.start_s < 2 * layers[0].seconds_s / LAYERS  # one start for both


def test_who_waits_for_a_sum_waits_for_it(scanned: Plan) -> None:
    """The update of the head reads its gradient's sum, which starts when the product behind it is there."""
    behind: list[set[int]] = []
    for task in scanned.tasks:
        behind.append({*task.after}.union(*(behind[other] for other in task.after)))
    sums = [i for i, task in enumerate(scanned.tasks) if task.kind in ("all_reduce", "reduce_scatter")]
    last = max(i for i, task in enumerate(scanned.tasks) if task.kind == "compute")
    assert sums
    assert all(one in behind[last] for one in sums if one < last)
