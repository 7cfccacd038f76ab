"""Sums that stay in parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxplan.lowering.pending import finished, held_as
from jaxplan.sharding import Layout


@pytest.mark.parametrize("shape", [(8, 3), (0, 3)])
def test_a_sum_in_parts_is_finished_whatever_it_holds(shape: tuple[int, int], mesh_4x2: Mesh) -> None:
    value = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    layout = Layout(dims=((), ()), unreduced=("data", "model"))
    made = jax.jit(lambda x: finished(held_as(x, layout, mesh_4x2), mesh_4x2))(value)
    np.testing.assert_array_equal(made, value)
