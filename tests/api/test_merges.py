"""What goes along a dimension that is cut: every device its own piece, and all are told what the others came to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxplan

X = np.random.default_rng(0).integers(-9, 9, (64, 32)).astype(np.float32)


def routed(x: jax.Array) -> Any:
    """Cumulative sums and largest elements along both dimensions, in a loop too."""

    def one(carry: jax.Array, shift: jax.Array) -> Any:
        return jnp.cumsum(carry, 0) % 7 + shift, lax.top_k(carry.T, 5)

    carry, best = lax.scan(one, x, jnp.arange(3.0))
    return carry, best, lax.cummax(x, 0, reverse=True), lax.top_k(x, 4), jnp.cumsum(x, 1)


@pytest.mark.parametrize("cut", [P("data"), P(("model", "data")), P(None, ("data", "model")), P("model", "data")])
def test_merged_results_are_those_of_one_device(cut: P, mesh_4x2: Mesh) -> None:
    planned = jaxplan.auto_shard(
        routed, mesh_4x2, constraints={"x": cut}, hardware="tpu-v5e", options={"compare_templates": False}
    )
    for ours, theirs in zip(jax.tree.leaves(planned(X)), jax.tree.leaves(jax.jit(routed)(X)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not planned.plan(X).warnings


def test_a_rematerialised_body_takes_along_what_merging_needs(mesh_4x2: Mesh) -> None:
    """The numbers of the pieces are a constant of the body, of which an open jaxpr has none: planning crashed."""

    def step(x: jax.Array) -> jax.Array:
        def body(carry: jax.Array, shift: jax.Array) -> Any:
            return jnp.cumsum(carry, 0) % 7 + shift, None

        return lax.scan(jax.checkpoint(body), x, jnp.arange(3.0))[0]

    pinned = dict.fromkeys(("x", "result"), P(("data", "model")))
    planned = jaxplan.auto_shard(
        step, mesh_4x2, constraints=pinned, hardware="tpu-v5e", options={"compare_templates": False}
    )
    x = np.tile(X, (64, 8))  # large enough for what is merged to be less than the whole
    np.testing.assert_array_equal(planned(x), step(x))


@pytest.mark.parametrize("cut", [P("data"), P(("model", "data")), P(None, ("data", "model")), P("model", "data")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "uint8", "int32", "uint32", "bool"])
def test_the_first_of_the_best_is_found_whatever_the_numbers(dtype: str, cut: P, mesh_4x2: Mesh) -> None:
    """Values and places go together, in words of four bytes; what is no number is the best of all."""

    def best(x: jax.Array) -> Any:
        return [arg(x, axis).astype(jnp.int32) for arg in (jnp.argmax, jnp.argmin) for axis in (0, 1)]

    values = jnp.asarray(X).astype(dtype)
    if jnp.issubdtype(values.dtype, jnp.floating):
        values = values.at[40, 3].set(jnp.nan).at[9, 17].set(-jnp.inf).at[0, 0].set(-0.0).at[1, 0].set(0.0)
    planned = jaxplan.auto_shard(
        best, mesh_4x2, constraints={"x": cut}, hardware="tpu-v5e", options={"compare_templates": False}
    )
    for ours, theirs in zip(planned(values), jax.jit(best)(values), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not planned.plan(values).warnings


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("argmax", lambda x: jnp.argmax(x, 0)),
        ("cumsum", lambda x: jnp.cumsum(x, 0)),
        ("top_k", lambda x: lax.top_k(x.T, 2)),
    ],
)
def test_what_is_gathered_is_small(name: str, fn: Callable[..., Any], mesh_4x2: Mesh) -> None:
    """Rows that lie in pieces are worked on in pieces, and what `verify` finds compiled is what was planned."""
    shape = jax.ShapeDtypeStruct((2**16, 64), np.float32)
    step = jaxplan.auto_shard(fn, mesh_4x2, constraints={"x": P(("data", "model"))}, hardware="cpu-host")
    plan = step.plan(shape)
    assert {(c.kind, c.primitive) for c in plan.collectives} == {("all_gather", name)}
    assert max(c.bytes for c in plan.collectives) <= 8 * 64 * 4 * 2
    assert plan.cost.peak_bytes < 2**16 * 64 * 4
    assert plan.cost.step_s == pytest.approx(plan.cost.objective_s, rel=2e-3)  # what is exchanged counts once
    assert {finding.what for finding in jaxplan.verify(step, shape).findings} <= {"memory"}


def test_a_large_table_is_searched_in_pieces() -> None:
    """Retrieval: no device holds all scores, let alone the table."""

    def nearest(table: jax.Array, queries: jax.Array) -> Any:
        return lax.top_k(queries @ table.T, 16)

    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    shapes = jax.ShapeDtypeStruct((2**22, 128), jnp.bfloat16), jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
    plan = jaxplan.plan(nearest, mesh, *shapes, hardware="tpu-v5e")
    assert plan.specs["table"] == P(("data", "model"))
    assert plan.cost.peak_bytes < 2**30 / 4
