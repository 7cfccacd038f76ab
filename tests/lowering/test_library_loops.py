"""Loops that a library's own lowering brings along are no news to the user."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan.sharding import partition


def test_a_primitive_made_of_loops_that_send_nothing_is_not_warned_of() -> None:
    """XLA has no eigenvalues for TPU: jax writes a dozen loops, each of them run on whole matrices."""

    def step(x: jax.Array) -> jax.Array:
        values, vectors = jnp.linalg.eigh(x @ x.T)
        return (vectors * values**-0.25) @ vectors.T @ x

    mesh = AbstractMesh((4, 2), ("data", "model"))
    plan = jaxplan.plan(
        step, mesh, jax.ShapeDtypeStruct((1024, 2048), jnp.float32), hardware="tpu-v5e",
        options={"compare_templates": False},
    )  # fmt: skip
    assert not [w for w in plan.warnings if "trip count" in w]


def test_a_loop_of_unknown_length_that_communicates_is_warned_of(mesh_8: jax.sharding.Mesh) -> None:
    def halved(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: x @ w / 2, x)

    sharding = jax.sharding.NamedSharding(mesh_8, P(None, "data"))
    shapes = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
    lowered = jax.jit(halved, in_shardings=(sharding, sharding)).lower(*shapes)
    (warning,) = partition(lowered.compiler_ir("stablehlo"), while_trips=16).warnings
    assert "trip count" in warning and "16 is assumed" in warning
