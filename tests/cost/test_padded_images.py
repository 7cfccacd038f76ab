"""What convolutions of XLA for GPU read: whole images, with the padding that cuDNN doesn't put there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.cost import traffic
from jaxplan.cost.padded_images import padded_images
from jaxplan.ir import Graph, trace
from jaxplan.sharding import graph_rules

NUMBERS = ("NHWC", "HWIO", "NHWC")
IMAGE, KERNEL = (8, 32, 32, 16), (3, 3, 16, 16)


def convolve(x: Any, kernel: Any, stride: int = 1) -> Any:
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=NUMBERS)


def traced(fn: Any, *shapes: tuple[int, ...]) -> Graph:
    return trace(fn, [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes], {}).graph


def padded(convolution: Any, kernel: tuple[int, ...]) -> tuple[Graph, list[tuple[int, int, int]]]:
    """The copies of an image that is convolved, and in the backward pass once more for the kernel's gradient."""

    def step(x: Any, kernel: Any) -> Any:
        return jax.grad(lambda k: (convolution(jnp.tanh(x), k).astype(jnp.float32) ** 2).sum())(kernel)

    graph = traced(step, IMAGE, kernel)
    reads = {(op.index, i): np.full(1, -1, np.int8) for op in graph.ops for i, _ in enumerate(op.operands)}
    times = range(len(graph.ops))
    return graph, list(padded_images(graph, (("data", 1),), times, [t + 1 for t in times], reads))


def test_a_padding_that_differs_from_side_to_side_is_written() -> None:
    """A stride of 2 that halves 32 pixels pads them by one on one side: 33, to the gradient of the weights."""
    graph, copies = padded(lambda x, k: convolve(x, k, 2), KERNEL)
    convolutions = [op.index for op in graph.ops if op.primitive == "conv_general_dilated"]
    assert copies == [(convolutions[0], convolutions[-1] + 1, 2 * 8 * (33 * 33 - 32 * 32) * 16)]
    assert padded(convolve, KERNEL)[1] == []


@pytest.mark.parametrize(("kernel", "pixels", "kept"), [(2, 65, False), (3, 66, True), (4, 67, False), (5, 68, True)])
def test_what_a_transposed_convolution_reads_is_written_spread(kernel: int, pixels: int, kept: bool) -> None:
    """Of 32 pixels 63, with zeros around; in the image's place, for the gradient of the weights too, where they differ
    from side to side (compiled for H100, jax 0.10.2)."""
    graph, copies = padded(
        lambda x, k: jax.lax.conv_transpose(x, k, (2, 2), "SAME"), (kernel, kernel, 16, 16)
    )
    convolutions = [op.index for op in graph.ops if op.primitive == "conv_general_dilated"]
    stop = convolutions[-1 if kept else 0] + 1
    assert copies == [(convolutions[0], stop, 2 * 8 * (pixels * pixels - 32 * 32 * kept) * 16)]


def test_the_gradient_of_a_stride_is_no_transposed_convolution() -> None:
    def step(x: Any, kernel: Any) -> Any:
        return jax.grad(lambda x: (convolve(x, kernel, 2).astype(jnp.float32) ** 2).sum())(x)

    graph = traced(step, IMAGE, (2, 2, 16, 16))
    reads = {(op.index, i): np.full(1, -1, np.int8) for op in graph.ops for i, _ in enumerate(op.operands)}
    times = range(len(graph.ops))
    assert list(padded_images(graph, (("data", 1),), times, [t + 1 for t in times], reads)) == []


@pytest.mark.parametrize("product", [False, True])
def test_what_a_convolution_reads_is_in_memory_not_what_that_is_computed_from(product: bool) -> None:
    """A batch normalisation is made again for the mask of the relu behind it (a ResNet-50 and a wide ResNet on H100);
    a product of matrices computes the relu itself, and wants the normalised tensor."""

    def step(x: Any, kernel: Any, then: Any) -> Any:
        def loss(x: Any) -> Any:
            made = convolve(x, kernel).astype(jnp.float32)
            centred = (made - made.mean((0, 1, 2))).astype(jnp.bfloat16)
            kept = jax.nn.relu(centred)
            return ((kept @ then if product else convolve(kept, then)).astype(jnp.float32) ** 2).sum()

        return jax.grad(loss)(x)

    graph = traced(step, IMAGE, KERNEL, (16, 64) if product else KERNEL)
    relu = next(op for op in graph.ops if op.primitive == "max" and graph.values[op.results[0]].shape == IMAGE)
    stored = traffic(graph, graph_rules(graph), "gpu").stored
    assert stored[relu.results[0]] != product
    assert stored[relu.operands[0]] == product
