"""Memory of convolutions on TPU where a device has few images: their pixels are moved into the batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import jaxplan
from jaxplan.cost.few_images import widened
from jaxplan.cost.images import image_lanes
from jaxplan.cost.moved_pixels import moved_pixels
from jaxplan.ir import trace
from jaxplan.sharding import graph_rules

_NUMBERS = ("NHWC", "HWIO", "NHWC")
_WIDE = 33 * 8 * 256 * 128
"""Elements of one image of 256 pixels a side in eight pieces of 32 columns and one of the neighbour's, 128 lanes."""


def convolve(x: Any, kernel: Any) -> Any:
    return jax.lax.conv_general_dilated(x, kernel.astype(x.dtype), (1, 1), "SAME", dimension_numbers=_NUMBERS)


def normalise(x: Any) -> Any:
    """Group normalisation as it is mostly written: channels in groups, then as they were."""
    y = x.astype(jnp.float32).reshape(*x.shape[:3], 32, x.shape[3] // 32)
    centred = y - jnp.mean(y, (1, 2, 4), keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred**2, (1, 2, 4), keepdims=True) + 1e-5)
    return (centred * scale).reshape(x.shape).astype(x.dtype)


def network(normalised: bool, grouped: bool = False) -> Any:
    """Three convolutions of 96 channels and bf16, each behind a normalisation over whole images or none; SGD."""

    def step(weights: Any, images: Any) -> Any:
        def loss(weights: Any) -> Any:
            x = images.astype(jnp.bfloat16)
            for kernel in weights:
                x = convolve(x, kernel)
                if grouped:
                    x = normalise(x)
                elif normalised:
                    x = (x.astype(jnp.float32) - jnp.mean(x, (1, 2), jnp.float32, keepdims=True)).astype(x.dtype)
                x = jax.nn.relu(x)
            return jnp.mean(x.astype(jnp.float32) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    return step


def copies(count: int, normalised: bool, hardware: str = "tpu-v5e", *, grouped: bool = False) -> int:
    """Bytes of copies at the peak of a step on `count` images of 256 pixels a side."""
    weights = [jax.ShapeDtypeStruct((3, 3, size, 96), jnp.float32) for size in (3, 96, 96)]
    mesh = AbstractMesh((1,), ("data",))
    step = jaxplan.auto_shard(network(normalised, grouped), mesh, hardware=hardware, donate_argnums=(0,))
    cost = step.plan(weights, jax.ShapeDtypeStruct((count, 256, 256, 3), jnp.float32)).cost
    return int(dict(cost.peak_parts).get("copies", 0))


def test_weights_gradients_wait_for_the_end_and_read_copies_of_their_images() -> None:
    """A residual network of seven convolutions, four images a device: 2017 MB compiled for v5e, predicted 1251 without
    copies and waiting and 2.0 GB with them (jax 0.10.2, libtpu 0.0.42.1)."""
    few, many = copies(4, normalised=False), copies(8, normalised=False)
    image = 4 * _WIDE * 2
    assert few >= 2 * 2 * image  # two images between convolutions in two forms each
    assert many < image


def test_what_is_the_same_all_over_an_image_is_written_out() -> None:
    """A mean of each image, f32: four bytes an element, for each of two layers at least."""
    more = copies(4, normalised=True) - copies(4, normalised=False)
    assert more >= 2 * 4 * _WIDE * 4


def test_so_is_what_is_the_same_all_over_an_image_of_grouped_channels() -> None:
    """The scale of every group, f32, and what the activation reads of the last convolution's image, which is dearer to
    compute again than to keep: networks of six convolutions on v5e, four bf16 images a device, 4102 MB compiled, 1808
    predicted before and 4092 since; two f32 ones 7782, 4630 and 8992 (jax 0.10.2, libtpu 0.0.42.1)."""
    more = copies(4, normalised=True, grouped=True) - copies(4, normalised=False)
    assert more >= 2 * 4 * _WIDE * (4 + 2)


def test_not_on_gpu() -> None:
    assert copies(4, normalised=True, hardware="h100") < 4 * _WIDE


@pytest.mark.parametrize(
    ("count", "columns", "times"), [(4, 256, 33 / 32), (7, 64, 9 / 8), (8, 256, 1.0), (4, 8, 1.0)]
)
def test_pieces_are_a_column_wider(count: int, columns: int, times: float) -> None:
    """As bf16[256, 32, 33, 32] of bf16[4, 256, 256, 32]; eight images, or images of eight columns, stay as they are."""
    shapes = ((count, 16, columns, 32), (3, 3, 32, 32))
    traced = trace(
        lambda x, kernel: jnp.tanh(convolve(x, kernel)), [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes], {}
    )
    (made,) = [op.results[0] for op in traced.graph.ops if op.primitive == "conv_general_dilated"]
    lanes = image_lanes(traced.graph, graph_rules(traced.graph))
    whole = np.full(1, -1, np.int8)
    assert widened(traced.graph.values[made], whole, (("data", 1),), lanes[made]) == pytest.approx(times)


def test_images_of_few_channels_lie_with_their_pieces_in_lanes() -> None:
    """Four images of bf16[512, 512, 3] for a stem of 7 x 7 that goes by two: bf16[512, 32, 66, 3, 7], of which 32 parts
    lie in lanes and 3 channels in four rows (v5e, jax 0.10.2); with the channels in lanes 1.9 GB were planned."""

    def loss(w: Any, x: Any) -> Any:
        made = jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=_NUMBERS)
        return jnp.mean(jnp.sin(made).astype(jnp.float32))

    shapes = [((7, 7, 3, 64), jnp.bfloat16), ((4, 512, 512, 3), jnp.bfloat16)]
    arguments = [jax.ShapeDtypeStruct(*one) for one in shapes]
    plan = jaxplan.auto_shard(jax.grad(loss), AbstractMesh((1,), ("data",)), hardware="tpu-v5e").plan(*arguments)
    assert plan.cost.peak_bytes < 512 * 66 * 7 * 4 * 128 * 2 * 2


@pytest.mark.parametrize(("strides", "kernel", "groups", "stays"), [
    (16, (16, 16, 3, 64), 1, True), (1, (3, 3, 32, 32), 1, False), (1, (3, 3, 1, 32), 32, True),
])  # fmt: skip
def test_pixels_stay_for_gradients_of_patches_and_of_single_channels(
    strides: int, kernel: tuple[int, ...], groups: int, stays: bool
) -> None:
    """A video transformer's step, four videos a device, was planned at +59 % of what v5e takes, a recurrent network
    with convolutions in time at +94 % (jax 0.10.2, 2026-11-29)."""

    def loss(w: Any, x: Any) -> Any:
        made = jax.lax.conv_general_dilated(
            jnp.sin(x), w, (strides,) * 2, "SAME", dimension_numbers=_NUMBERS, feature_group_count=groups
        )
        return jnp.mean(jnp.sin(made).astype(jnp.float32))

    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (kernel, (4, 128, 128, kernel[2] * groups))]
    graph = trace(jax.grad(loss), shapes, {}).graph
    lanes = image_lanes(graph, graph_rules(graph))
    whole = {(op.index, p): np.full(1, -1, np.int8) for op in graph.ops for p in range(len(op.operands))}
    stored, times = [True] * len(graph.values), range(len(graph.ops))
    moved = moved_pixels(graph, (("data", 1),), lanes, stored, times, whole, {})
    assert (moved is None) is stays


def test_gradients_wait_within_their_loop() -> None:
    """Not for convolutions behind it."""

    def loss(weights: Any, x: Any) -> Any:
        y, _ = jax.lax.scan(lambda y, w: (jnp.sin(convolve(y, w)), None), x, weights)
        return jnp.mean(jnp.sin(convolve(y, weights[0])).astype(jnp.float32))

    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((3, 3, 3, 32, 32), (4, 128, 128, 32))]
    graph = trace(jax.grad(loss), shapes, {}).graph
    lanes = image_lanes(graph, graph_rules(graph))
    whole = {(op.index, p): np.full(1, -1, np.int8) for op in graph.ops for p in range(len(op.operands))}
    moved = moved_pixels(graph, (("data", 1),), lanes, [True] * len(graph.values), range(len(graph.ops)), whole, {})
    assert moved is not None
    for loop in graph.loops:
        assert all(loop.start <= moved.times[op] < loop.stop for op in range(loop.start, loop.stop))
