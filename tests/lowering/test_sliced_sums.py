"""Slices of what is summed over devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import jaxplan

SHAPES = ({"w": jax.ShapeDtypeStruct((2049, 8192), jnp.float32)}, jax.ShapeDtypeStruct((2048, 2048), jnp.float32))


def step(weights: Any, x: jax.Array) -> Any:
    """A gradient goes back through `[x, t] @ w` to what was concatenated with the time."""

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        wide = jnp.concatenate([x, jnp.full((x.shape[0], 1), 0.5)], axis=1)
        return jnp.sum(jnp.tanh(wide @ w) ** 2)

    return weights, x - jax.grad(loss)(x, weights["w"])


def plan_for(mesh: Any, **settings: Any) -> Any:
    places = {"weights/w": P(None, "model"), "x": P(("data", "model"), None)}
    return jaxplan.auto_shard(step, mesh, constraints=places, **settings)


@pytest.mark.aot_tpu
def test_a_piece_of_a_sum_that_is_sliced_is_compiled(tpu_topology: Callable[[str], Any]) -> None:
    """XLA for TPU takes both slices for one, and fails (jax 0.10.2, libtpu 0.0.42.1)."""
    target = jaxplan.target("tpu-v5e:2x4")
    planned = plan_for(target.mesh(data=4, model=2), hardware="tpu-v5e")
    plan = planned.plan(*SHAPES)
    assert any(c.kind == "reduce_scatter" and c.primitive == "dot_general" for c in plan.collectives)
    assert planned.lower(*SHAPES).compile(compiler_options=dict(target.compiler_options))


def test_what_is_sliced_of_a_sum_is_read_behind_a_barrier() -> None:
    planned = plan_for(AbstractMesh((4, 2), ("data", "model")), hardware="tpu-v5e")
    text = planned.lower(*SHAPES).as_text()
    sliced = [line for line in text.splitlines() if "stablehlo.slice" in line and "2049" in line]
    barriers = [line.split("=")[0].strip() for line in text.splitlines() if "optimization_barrier" in line]
    assert sliced and all(line.split("slice ")[1].split()[0] in barriers for line in sliced)
