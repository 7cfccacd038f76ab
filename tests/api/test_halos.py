"""A batch too small for the mesh: the rows of its images are cut, and devices exchange their edges."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

import jaxplan


def step(kernels: Any, images: jax.Array, wanted: jax.Array) -> Any:
    """Convolutions, one of stride 2, and an average pool."""

    def loss(kernels: Any) -> jax.Array:
        x = images
        for kernel, stride in zip(kernels, (1, 2, 1), strict=True):
            x = jax.nn.relu(
                lax.conv_general_dilated(
                    x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            )
        x = lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        return jnp.mean((x - wanted) ** 2)

    value, gradients = jax.value_and_grad(loss)(kernels)
    return jax.tree.map(lambda k, g: k - 0.1 * g, kernels, gradients), value


@pytest.mark.parametrize("count", [1, 2])
def test_rows_of_few_images_are_cut_and_the_step_equals_the_unsharded_one(count: int, mesh_4x2: Mesh) -> None:
    random = np.random.default_rng(0)
    kernels = [random.normal(size=(3, 3, n, 32)).astype(np.float32) / 17 for n in (4, 32, 32)]
    images = random.normal(size=(count, 256, 256, 4)).astype(np.float32)
    args = (kernels, images, np.zeros((count, 64, 64, 32), np.float32))
    planned = jaxplan.auto_shard(step, mesh_4x2, hardware="tpu-v5e", options={"compare_templates": False})
    plan = planned.plan(*args)
    (layout,) = (t.layout for t in plan.inputs if t.path == "images")
    assert layout.dims[1] and layout.shards(plan.axes) == 8
    assert sum(c.kind == "collective_permute" for c in plan.collectives) >= 5
    for ours, theirs in zip(
        jax.tree.leaves(planned(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
