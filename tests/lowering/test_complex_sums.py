"""Sums of complex numbers over devices, as XLA for TPU compiles them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan.ir import trace
from jaxplan.lowering import compiled_collectives

AXES = (("data", 4), ("model", 2))
WHOLE = {"filters": P(), "x": P(("data", "model")), "result": P()}


def step(filters: Any, x: jax.Array) -> Any:
    """One of complex filters that a batch shares, kept as real numbers: their gradient is a sum over the batch."""

    def loss(filters: Any) -> jax.Array:
        return jnp.sum(jnp.abs(jnp.tanh(x * jax.lax.complex(*filters))) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, filters, jax.grad(loss)(filters))


def shapes(batch: int) -> tuple[Any, Any]:
    part = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    return (part, part), jax.ShapeDtypeStruct((batch, 64, 128), jnp.float32)


@pytest.mark.aot_tpu
def test_they_are_summed_not_gathered(tpu_topology: Callable[[str], Any]) -> None:
    summed = [op for op in trace(step, shapes(256), {}).graph.ops if op.primitive == "reduce_sum"]
    assert any(trace(step, shapes(256), {}).graph.values[op.results[0]].dtype == "complex64" for op in summed)
    mesh = jaxplan.target("tpu-v5e:2x4").mesh(**dict(AXES))
    planned = jaxplan.auto_shard(step, mesh, constraints=WHOLE, options={"compare_templates": False})
    sent = compiled_collectives(planned.lower(*shapes(256)).compile().as_text(), AXES)
    assert {c.kind for c in sent} <= {"all_reduce", "all_gather"}
    gathered = sum(c.bytes for c in sent if c.kind == "all_gather")
    assert gathered in (0, 64 * 128 * 8)  # the new filters, if they are updated in parts
    assert sum(c.bytes for c in sent) == gathered + 64 * 128 * 8


def test_they_are_the_sums_that_they_are_elsewhere(mesh_4x2: Mesh) -> None:
    rng = np.random.default_rng(0)
    filters = tuple(rng.normal(size=(64, 128), scale=0.1).astype(np.float32) for _ in range(2))
    x = rng.normal(size=(16, 64, 128)).astype(np.float32)
    sharded = jaxplan.auto_shard(step, mesh_4x2, constraints=WHOLE)(filters, x)
    for made, expected in zip(sharded, step(filters, x), strict=True):
        np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-5)
