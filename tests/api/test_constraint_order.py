"""A tuple of axes in a constraint is an order, and is kept."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxplan


@pytest.mark.parametrize("axes", [("data", "model"), ("model", "data")])
def test_the_order_of_axes_in_a_constraint_is_kept(mesh_4x2: Mesh, axes: tuple[str, str]) -> None:
    x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    pins = {"x": P(axes), "w": P(None, axes)}
    plan = jaxplan.plan(lambda x, w: (x * 2, w @ w), mesh_4x2, x, x, constraints=pins)
    assert plan.specs == pins
