"""Steps that serve: weights that are only read, caches that are written, loops that generate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh

import jaxplan

VOCABULARY, DIM, BATCH = 4096, 256, 8


def _generate(embedding: jax.Array, up: jax.Array, token: jax.Array) -> jax.Array:
    def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        count, token = state
        logits = embedding[token] @ up @ embedding.T
        return count + 1, lax.top_k(logits, 4)[1][:, 0]

    return lax.while_loop(lambda state: state[0] < 8, body, (jnp.int32(0), token))[1]


def test_weights_that_a_loop_reads_in_two_layouts_stay_as_planned_inside() -> None:
    plan = jaxplan.plan(
        _generate,
        AbstractMesh((4, 2), ("data", "model")),
        jax.ShapeDtypeStruct((VOCABULARY, DIM), "float32"),
        jax.ShapeDtypeStruct((DIM, DIM), "float32"),
        jax.ShapeDtypeStruct((BATCH,), "int32"),
        hardware="cpu-host",
        options={"compare_templates": False},
    )
    # The embedding is whole everywhere and cut differently by its two readers, which is free: propagation would cut it
    # for the first of them at the loop's entry, and gather it for the second in every iteration.
    assert max(c.bytes for c in plan.collectives) < VOCABULARY * DIM
    assert not plan.warnings
    assert plan.cost.step_s <= 1.01 * plan.cost.objective_s
