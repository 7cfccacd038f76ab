"""Gradients of grouped convolutions' kernels are sums over the batch, like those of any other weight."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxplan

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(64, 32, 32, 8)).astype(np.float32)


def kernel(groups: int, each: int = 2) -> np.ndarray:
    return RANDOM.normal(size=(3, 3, 8 // groups, groups * each)).astype(np.float32)


def step(kernel: Any, images: Any) -> Any:
    def loss(kernel: Any) -> Any:
        made = lax.conv_general_dilated(
            images, kernel, (1, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=8 // kernel.shape[2],
        )  # fmt: skip
        return (jnp.tanh(made) ** 2).mean()

    return kernel - 0.1 * jax.grad(loss)(kernel)


LAYOUTS = {
    "an axis to spare": P("data"),
    "both axes": P(("data", "model")),
    "channels beside the batch": P("data", None, None, "model"),
}


@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_that_is_cut_sends_the_gradient_alone(layout: str, groups: int, mesh_4x2: Mesh) -> None:
    weights = kernel(groups)
    sharded = jaxplan.auto_shard(
        step, mesh_4x2, constraints={"images": LAYOUTS[layout], "kernel": P(), "result": P()},
        options={"compare_templates": False},
    )  # fmt: skip
    np.testing.assert_allclose(sharded(weights, IMAGES), jax.jit(step)(weights, IMAGES), rtol=1e-4, atol=1e-4)
    if layout == "channels beside the batch":
        return
    sent = [c for c in sharded.plan(weights, IMAGES).collectives if c.kind != "all_slice"]
    assert {c.kind for c in sent if c.primitive == "conv_general_dilated"} <= {"all_reduce", "reduce_scatter"}
    assert sent and all(c.bytes <= weights.nbytes for c in sent)


def test_kernels_of_their_own_for_each_image_are_cut_with_the_images(mesh_4x2: Mesh) -> None:
    """Such a convolution, and its gradients, are convolutions in as many groups as there are images."""
    kernels = RANDOM.normal(size=(64, 3, 3, 8, 4)).astype(np.float32)

    def own_step(kernels: Any, images: Any) -> Any:
        def convolution(image: Any, kernel: Any) -> Any:
            made = lax.conv_general_dilated(
                image[None], kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            return made[0]

        def loss(kernels: Any) -> Any:
            return (jnp.tanh(jax.vmap(convolution)(images, kernels)) ** 2).mean()

        return kernels - 0.1 * jax.grad(loss)(kernels)

    cut = P(("data", "model"))
    sharded = jaxplan.auto_shard(
        own_step, mesh_4x2, constraints={"images": cut, "kernels": cut, "result": cut}, hardware="tpu-v5e",
        options={"compare_templates": False},
    )  # fmt: skip
    plan = sharded.plan(kernels, IMAGES)
    assert not [c for c in plan.collectives if c.kind != "all_slice"], plan
    wanted = jax.jit(own_step)(kernels, IMAGES)
    np.testing.assert_allclose(sharded(kernels, IMAGES), wanted, rtol=1e-4, atol=1e-5)
