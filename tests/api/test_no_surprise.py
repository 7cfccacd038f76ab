"""Programs of which the partitioner made something else than was decided, until more of the decision was written down."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

import jaxplan

MESH = AbstractMesh((4, 2), ("data", "model"))


def surprises(step: Any, *shapes: Any) -> list[str]:
    """What the plan warns of, no template to fall back on."""
    plan = jaxplan.plan(step, MESH, *shapes, hardware="tpu-v5e", options={"compare_templates": False})
    return [warning for warning in plan.warnings if "the partitioner adds" in warning]


def test_what_is_made_whole_and_reshaped_for_one_reader_stays_whole() -> None:
    """Evolution strategies: a population, made whole on every device, of which one reader cuts the members, and others
    the numbers of each. Propagation cut the numbers, and the reshape before the first reader gathered them."""
    members, numbers = 1024, 64 * 416

    def step(mean: jax.Array, best: jax.Array, key: jax.Array, x: jax.Array) -> Any:
        half = jax.random.normal(key, (members // 2, numbers))
        population = mean + 0.1 * jnp.concatenate([half, -half])
        fitness = jax.vmap(lambda w: jnp.mean((jnp.tanh(x @ w.reshape(64, -1)) - 1) ** 2))(population)
        better = population[jnp.argmin(fitness)]
        slope = jnp.dot(fitness, population - mean) / members
        return mean - 0.01 * slope, jnp.where(fitness[0] < 1, better, best)

    vector = jax.ShapeDtypeStruct((numbers,), jnp.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    assert surprises(step, vector, vector, key, jax.ShapeDtypeStruct((1024, 64), jnp.float32)) == []
