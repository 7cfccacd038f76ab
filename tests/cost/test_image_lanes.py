"""Which dimensions of images lie in lanes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import jaxplan
from jaxplan.cost import device_bytes, traffic
from jaxplan.cost.images import image_lanes
from jaxplan.ir import trace
from jaxplan.sharding import graph_rules


def test_what_an_image_is_flattened_to_has_no_lanes_of_the_image() -> None:
    """A pooled image of one pixel is read as rows of channels: a reshape that the layout follows, of another rank."""

    def step(x: Any, kernel: Any, head: Any) -> Any:
        made = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.tanh(jnp.tanh(made).reshape(16, 8)) @ head

    shapes = ((16, 1, 1, 3), (3, 3, 3, 8), (8, 4))
    graph = trace(step, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes], {}).graph
    lanes = image_lanes(graph, graph_rules(graph))
    assert lanes
    assert all(max(dims) < len(graph.values[value].shape) for value, dims in lanes.items())


def convolve(x: Any, kernel: Any, stride: int = 1) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=numbers)


def test_a_mean_over_channels_has_the_batch_in_lanes() -> None:
    """f32[16, 56, 56] takes 1.6 MB beside a ConvNeXt's images on v5e, not the 0.5 of pixels in lanes."""

    def step(x: Any, kernel: Any) -> Any:
        made = convolve(x, kernel)
        return jnp.tanh(made - jnp.mean(made, axis=3, keepdims=True))

    shapes = ((16, 56, 56, 96), (3, 3, 96, 96))
    graph = trace(step, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes], {}).graph
    lanes = image_lanes(graph, graph_rules(graph))
    (mean,) = [op.results[0] for op in graph.ops if op.primitive == "reduce_sum"]
    assert lanes[mean] == (0, 0)
    whole = np.full((1, 1), -1, np.int8)
    assert device_bytes(graph.values[mean], whole, (("data", 1),), "tpu", lanes[mean]) == 128 * 56 * 56 * 4


def test_a_convolution_reads_a_copy_of_the_steps_images() -> None:
    """bf16[16, 224, 224, 3] with 16 images in 128 lanes and 3 channels in 4 rows: all of the 51,445,760 bytes that XLA
    assigned for v5e, where the convolutions' results lie in vector memory (jax 0.10.2, libtpu 0.0.42.1)."""

    def step(weights: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            y = convolve(batch.astype(jnp.bfloat16), weights[0].astype(jnp.bfloat16), stride=2)
            return jnp.mean(jax.nn.relu(convolve(y, weights[1].astype(y.dtype))).astype(jnp.float32) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    weights = [jax.ShapeDtypeStruct((3, 3, size, 128), jnp.float32) for size in (3, 128)]
    planned = jaxplan.auto_shard(step, AbstractMesh((1,), ("data",)), hardware="tpu-v5e", donate_argnums=(0,))
    cost = planned.plan(weights, jax.ShapeDtypeStruct((16, 224, 224, 3), jnp.float32)).cost
    assert dict(cost.peak_parts)["copies"] == 128 * 224 * 224 * 4 * 2


@pytest.mark.parametrize(
    ("augmented", "copied"),
    [
        (lambda image, flip: jnp.where(flip[:, None, None, None], image[:, :, ::-1], image), True),
        (lambda image, flip: jnp.broadcast_to(flip[:, None, None, None].astype(jnp.bfloat16), image.shape), False),
        (lambda image, flip: jnp.tanh(convolve(image, jnp.ones((3, 3, 3, 3), jnp.bfloat16))), False),
    ],
    ids=["turned", "of masks", "of another"],
)
def test_so_does_one_of_what_is_computed_of_them(augmented: Any, copied: bool) -> None:
    """A detector's images that are turned round at random took 419 MB of its 3.1 GB on v5e."""

    def step(image: Any, flip: Any, kernel: Any) -> Any:
        return convolve(augmented((image / 255.0).astype(jnp.bfloat16), flip), kernel.astype(jnp.bfloat16))

    shapes = (
        jax.ShapeDtypeStruct((8, 64, 64, 3), jnp.float32),
        jax.ShapeDtypeStruct((8,), jnp.bool_),
        jax.ShapeDtypeStruct((3, 3, 3, 8), jnp.float32),
    )
    graph = trace(step, shapes, {}).graph
    last = max(op.index for op in graph.ops if op.primitive == "conv_general_dilated")
    assert ((last, 0) in traffic(graph, graph_rules(graph), "tpu").copied_images) == copied


def stored(step: Any, *shapes: tuple[int, ...]) -> tuple[Any, tuple[bool, ...]]:
    graph = trace(step, [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes], {}).graph
    return graph, traffic(graph, graph_rules(graph), "tpu").stored


@pytest.mark.parametrize(("pixels", "written"), [(56, True), (28, False)])
def test_an_image_is_written_for_a_product_whose_rows_of_pixels_fill_tiles(pixels: int, written: bool) -> None:
    """A ConvNeXt of 96 channels keeps normalised images of 56 pixels a side, of 28 none (v5e and v5p)."""

    def step(x: Any, kernel: Any, wide: Any) -> Any:
        made = convolve(x, kernel)
        centred = made - made.mean(-1, keepdims=True)
        return (centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)) @ wide

    graph, kept = stored(step, (16, pixels, pixels, 96), (3, 3, 96, 96), (96, 384))
    (product,) = (op for op in graph.ops if op.primitive == "dot_general")
    assert kept[product.operands[0]] == written
