"""Slices along several dimensions are taken one after the other, and put back so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec

import jaxplan
from jaxplan.ir import trace

FIELD = jax.ShapeDtypeStruct((24, 16, 32), jnp.float32)


def receivers(field: Any) -> Any:
    """Every fourth row and column of one layer."""
    return field[3:24:4, 2:16:4, 5]


@pytest.mark.parametrize(
    ("step", "turns"),
    [
        (receivers, [(24, 16, 1), (24, 4, 1), (6, 4, 1)]),
        (lambda x: x[1:-1, 1:-1, 1:-1], [(22, 14, 30)]),
        (lambda x: x[1:-1, 1:-1, 7:9], [(24, 16, 2), (22, 14, 2)]),
        (lambda x: x[:4], [(4, 16, 32)]),
    ],
    ids=["apart", "inside", "two layers of the inside", "rows"],
)
def test_dimensions_of_which_little_is_taken_come_first(step: Callable[[Any], Any], turns: list[Any]) -> None:
    traced = trace(step, (FIELD,), {})
    assert [traced.graph.values[op.results[0]].shape for op in traced.graph.ops if op.primitive == "slice"] == turns
    field = np.random.default_rng(0).standard_normal(FIELD.shape).astype(np.float32)
    (made,) = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, field)
    np.testing.assert_array_equal(made, step(field))


@pytest.mark.parametrize(
    ("edges", "turns"),
    [
        (((3, 20, 1), (1, 2, 0), (5, 26, 0)), [(4, 7, 1), (30, 7, 1), (30, 7, 32)]),
        (((-1, 20, 0), (1, 2, 0), (5, 26, 0)), [(23, 7, 32)]),
    ],
    ids=["apart", "cropped"],
)
def test_what_is_put_back_grows_last(edges: Any, turns: list[Any]) -> None:
    def step(x: Any) -> Any:
        return lax.pad(x, np.float32(2), edges)

    traced = trace(step, (jax.ShapeDtypeStruct((4, 4, 1), jnp.float32),), {})
    assert [traced.graph.values[op.results[0]].shape for op in traced.graph.ops if op.primitive == "pad"] == turns
    piece = np.random.default_rng(0).standard_normal((4, 4, 1)).astype(np.float32)
    (made,) = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, piece)
    np.testing.assert_array_equal(made, step(piece))


def test_one_layer_of_a_cut_field_is_gathered_and_not_the_field() -> None:
    mesh = AbstractMesh((4, 2), ("data", "model"))
    pinned = {"field": PartitionSpec("data"), "result": PartitionSpec()}
    plan = jaxplan.plan(
        receivers, mesh, FIELD, constraints=pinned, hardware="tpu-v5e", options={"compare_templates": False}
    )
    assert sum(c.wire_bytes for c in plan.collectives) <= 24 * 16 * 4  # of 24 * 16 * 32 * 4
