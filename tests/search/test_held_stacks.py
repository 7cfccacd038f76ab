"""A stack of weights that several loops go along is gathered once for all of them, where there is memory for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxplan

LAYERS, WIDTH, BATCH = 8, 2048, 16384
MESH = jax.sharding.AbstractMesh((8,), ("data",))
WEIGHTS = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16)
INPUTS = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.bfloat16)
STACK_BYTES = LAYERS * WIDTH * WIDTH * 2


def train_step(weights: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    def loss(weights: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.maximum(x @ w, 0), None

        return jnp.sum(jax.lax.scan(layer, inputs, weights)[0].astype(jnp.float32))

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - 0.01 * gradient, value


def planned(memory_budget: int | None = None) -> jaxplan.Plan:
    return jaxplan.plan(
        train_step, MESH, WEIGHTS, INPUTS, donate_argnums=0, hardware="tpu-v5e", memory_budget=memory_budget,
        options={"search": "fsdp"},
    )  # fmt: skip


def gathered(plan: jaxplan.Plan) -> float:
    """Bytes of weights that a device is sent, in stacks."""
    sent = sum(c.wire_bytes * c.trips for c in plan.collectives if c.kind == "all_gather")
    return sent / (STACK_BYTES * 7 / 8)


def test_a_stack_is_gathered_once() -> None:
    plan = planned()
    assert gathered(plan) == pytest.approx(1, rel=0.01)
    assert plan.cost.peak_bytes > STACK_BYTES


def test_without_memory_for_it_every_loop_gathers_its_slices() -> None:
    free = planned()
    tight = planned(memory_budget=int(free.cost.peak_bytes - STACK_BYTES / 2))
    assert gathered(tight) == pytest.approx(2, rel=0.01)
    assert tight.cost.peak_bytes < free.cost.peak_bytes - STACK_BYTES / 2


def test_the_step_is_the_same() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    random = np.random.default_rng(0)
    weights = random.normal(size=(4, 256, 256)).astype(np.float32) / 16
    inputs = random.normal(size=(4096, 256)).astype(np.float32)
    step = jaxplan.auto_shard(train_step, mesh, donate_argnums=0, options={"search": "fsdp"})
    kinds = {(c.kind, c.trips, c.wire_bytes) for c in step.plan(weights, inputs).collectives}
    assert ("all_gather", 1.0, weights.nbytes * 7 // 8) in kinds
    expected_results = jax.jit(train_step)(weights, inputs)
    for found, expected in zip(step(jnp.asarray(weights), inputs), expected_results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
