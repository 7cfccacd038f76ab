"""Kernels of convolutions in loops: turned round before the loop on GPU, and kept for all of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh

import jaxplan

LAYERS, CHANNELS, PIXELS = 4, 256, 3
SHAPES = (
    [jax.ShapeDtypeStruct((PIXELS, PIXELS, CHANNELS, CHANNELS), jnp.float32)] * LAYERS,
    jax.ShapeDtypeStruct((8, 16, 16, CHANNELS), jnp.bfloat16),
)
ONE = PIXELS * PIXELS * CHANNELS * CHANNELS * 4


def sampled(kernels: Any, image: Any, order: str = "HWIO") -> Any:
    """Denoised again and again with the same weights."""

    def body(_: Any, image: Any) -> Any:
        for kernel in kernels:
            kernel = kernel.astype(image.dtype)
            numbers = ("NHWC", order, "NHWC")
            image = jnp.tanh(lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=numbers))
        return image

    return lax.fori_loop(0, 50, body, image)


def once(kernels: Any, image: Any) -> Any:
    for kernel in kernels:
        numbers = ("NHWC", "HWIO", "NHWC")
        image = lax.conv_general_dilated(image, kernel.astype(image.dtype), (1, 1), "SAME", dimension_numbers=numbers)
    return image


def planned(step: Any, hardware: str) -> float:
    """Memory beside the arguments' kernels, in kernels."""
    plan = jaxplan.plan(step, AbstractMesh((1,), ("data",)), *SHAPES, hardware=hardware)
    return plan.cost.peak_bytes / ONE - LAYERS


def test_they_are_kept_turned_on_gpu() -> None:
    assert LAYERS <= planned(sampled, "h100") < LAYERS + 3
    assert planned(once, "h100") < 3
    assert planned(sampled, "tpu-v5e") < 3


def test_as_cudnn_wants_them_they_are_read() -> None:
    """Channels that are made first: [256, 3, 3, 256], of as many bytes."""
    turned = [jax.ShapeDtypeStruct((CHANNELS, PIXELS, PIXELS, CHANNELS), jnp.float32)] * LAYERS
    mesh = AbstractMesh((1,), ("data",))
    plan = jaxplan.plan(lambda k, x: sampled(k, x, "OHWI"), mesh, turned, SHAPES[1], hardware="h100")
    assert plan.cost.peak_bytes / ONE - LAYERS < 3


@pytest.mark.aot_gpu
@pytest.mark.usefixtures("cuda_compiler")
def test_as_much_as_xla_compiles() -> None:
    mesh = jaxplan.target("h100:1x1x8").mesh(data=8)
    step = jaxplan.auto_shard(sampled, mesh, hardware="h100", options={"search": "data", "compare_templates": False})
    made = step.lower(*SHAPES).compile().memory_analysis()
    taken = (made.argument_size_in_bytes + made.temp_size_in_bytes) / ONE
    assert taken > 2 * LAYERS
    assert step.plan(*SHAPES).cost.peak_bytes / ONE == pytest.approx(taken, rel=0.1)
