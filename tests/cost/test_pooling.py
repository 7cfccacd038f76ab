"""What max-pooling's gradient needs beside its result."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.cost import Traffic, traffic
from jaxplan.cost.pooling import places_of_poolings
from jaxplan.hardware import load_profile
from jaxplan.ir import trace
from jaxplan.sharding import graph_rules


def test_a_gpu_finds_the_place_of_every_windows_largest_element() -> None:
    """Four integers for each of a piece's bf16[32, 56, 56, 64]: 103 MB on H100, as compiled by jax 0.10.2."""

    def pooled(x: Any) -> Any:
        made = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        return jnp.sum(made.astype(jnp.float32) ** 2)

    graph = trace(jax.grad(pooled), (jax.ShapeDtypeStruct((256, 112, 112, 64), jnp.bfloat16),), {}).graph
    (op,) = [op for op in graph.ops if op.primitive == "select_and_scatter_add"]
    axes, reads = (("data", 4), ("model", 2)), {(op.index, 0): np.array([0, 0], np.int8)}
    times = range(len(graph.ops))
    found = places_of_poolings(graph, axes, times, reads, load_profile("h100"), {})
    assert [*found] == [(op.index, op.index + 1, 4 * 4 * 32 * 56 * 56 * 64)]
    (sooner,) = places_of_poolings(graph, axes, times, reads, load_profile("h100"), {op.index: op.index - 1})
    assert sooner[:2] == (op.index - 1, op.index + 1)
    assert not [*places_of_poolings(graph, axes, times, reads, load_profile("tpu-v5e"), {})]


def test_poolings_read_what_is_computed_of_a_convolution_and_all_places_are_found_first() -> None:
    """VGG-16 with 256 images on eight H100: 3286 MB compiled, 2575 predicted before and 3300 since (jax 0.10.2)."""

    def step(kernels: Any, images: Any) -> Any:
        def loss(kernels: Any) -> Any:
            made = images
            for kernel in kernels:
                made = jax.lax.conv_general_dilated(
                    made, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
                made = jax.nn.relu(made)
                made = jax.lax.reduce_window(made, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            return jnp.sum(made**2)

        return jax.grad(loss)(kernels)

    kernels = [jax.ShapeDtypeStruct((3, 3, *channels), jnp.float32) for channels in ((8, 32), (32, 64))]
    graph = trace(step, (kernels, jax.ShapeDtypeStruct((16, 64, 64, 8), jnp.float32)), {}).graph
    crossing, whole = traffic(graph, graph_rules(graph), "gpu"), np.array([-1], np.int8)
    pooled = [op.operands[0] for op in graph.ops if op.primitive == "reduce_window_max"]
    assert [graph.ops[graph.producers()[v]].primitive for v in pooled] == ["max", "max"]
    assert not any(crossing.stored[v] for v in pooled)
    reads = {(op.index, 0): whole for op in graph.ops if op.operands}
    found = [*places_of_poolings(graph, (("data", 8),), crossing.times, reads, load_profile("h100"), {})]
    assert [start for start, *_ in found] == [found[0][0]] * 2
    assert {v for fill in crossing.fills for v, _ in fill.written} >= {
        op.results[0] for op in graph.ops if op.primitive == "select_and_scatter_add"
    }


def pooled(width: int, step: int, padding: Any, skips: bool) -> Traffic:
    """A pooling of a relu, and what `skips` it."""

    def loss(kernel: Any, images: Any) -> Any:
        made = jax.lax.conv_general_dilated(
            images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )  # fmt: skip
        made = jax.nn.relu(made)
        small = jax.lax.reduce_window(
            made, -jnp.inf, jax.lax.max, (1, width, width, 1), (1, step, step, 1), padding
        )  # fmt: skip
        return jnp.sum(small**2) + (jnp.sum(made**3) if skips else 0)

    shapes = jax.ShapeDtypeStruct((3, 3, 8, 32), jnp.float32), jax.ShapeDtypeStruct((16, 64, 64, 8), jnp.float32)
    graph = trace(jax.grad(loss), shapes, {}).graph
    return traffic(graph, graph_rules(graph), "gpu")


@pytest.mark.parametrize(
    ("width", "step", "padding", "written"),
    [(2, 2, "VALID", False), (3, 2, "SAME", True), (3, 2, ((0, 0), (1, 1), (1, 1), (0, 0)), False)],
)
def test_a_relu_is_written_with_zeros_that_overlapping_windows_gradients_go_to(
    width: int, step: int, padding: Any, written: bool
) -> None:
    """VGG's, a ResNet-34's and a ResNet-50's first, compiled for H100 (jax 0.10.2)."""
    crossing = pooled(width, step, padding, skips=False)
    (relu,) = [op.operands[0] for op in crossing.graph.ops if op.primitive == "reduce_window_max"]
    assert crossing.stored[relu] is written


def test_a_poolings_gradient_goes_onto_what_it_is_added_to() -> None:
    """A U-Net's: nothing is filled for it (941 MB compiled for H100, 1121 predicted before; jax 0.10.2)."""
    for skips in (False, True):
        crossing = pooled(2, 2, "VALID", skips)
        (op,) = [op for op in crossing.graph.ops if op.primitive == "select_and_scatter_add"]
        assert any(op.results[0] in dict(fill.written) for fill in crossing.fills) is not skips
        assert any(op.results[0] in dict(fill.added) for fill in crossing.fills) is skips
