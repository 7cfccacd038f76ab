"""Kernels of reductions on GPU."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.cost import CostModel, traffic
from jaxplan.cost.tree_sums import further_kernels
from jaxplan.hardware import load_profile
from jaxplan.ir import trace
from jaxplan.sharding import graph_rules, strategies

AXES = (("data", 8),)


@pytest.mark.parametrize(
    ("shape", "axes", "cut", "further"),
    [
        (
            (64, 112, 112, 64),
            (0, 1, 2),
            0,
            1,
        ),  # columns: 8 images of a ResNet's stem, f32[256, 64], then f32[64]
        ((64, 7, 7, 512), (0, 1, 2), -1, 0),  # 3136 of them
        ((32768, 1024), (0,), 0, 0),  # 4096 rows a device
        ((32768, 1024), (0,), -1, 1),
        ((4096, 16384), (1,), -1, 0),  # rows
        ((4096, 32768), (1,), -1, 1),
        ((64, 512, 32), (0, 2), -1, 0),  # rows of 32, and a batch of 64 of them
        ((64, 512, 32768), (0, 2), -1, 1),
        ((8192, 1024), (0, 1), -1, 1),  # to a number
        ((64, 32), (0, 1), -1, 0),
    ],
)
def test_long_sums_take_another_kernel(
    shape: tuple[int, ...], axes: tuple[int, ...], cut: int, further: int
) -> None:
    graph = trace(lambda x: jnp.sum(x, axes), (jax.ShapeDtypeStruct(shape, jnp.float32),), {}).graph
    (op,) = [op for op in graph.ops if op.primitive == "reduce_sum"]
    places = np.array([[cut]], np.int8)
    assert further_kernels(op, graph, (places,), AXES).tolist() == [further]


def test_on_gpu_each_kernel_of_a_sum_is_started() -> None:
    graph = trace(lambda x: jnp.sum(x, 0), (jax.ShapeDtypeStruct((4097, 8), jnp.float32),), {}).graph
    rules = graph_rules(graph)
    profile = load_profile("h100")
    (op,) = [op for op in graph.ops if op.primitive == "reduce_sum"]

    def seconds(kind: str) -> float:
        model = CostModel(profile=replace(profile, kind=kind), axes=(), links=())
        options = strategies(rules[op.index], ())
        return float(model.op_seconds(op, rules[op.index], options, graph, traffic(graph, rules, kind))[0])

    assert seconds("gpu") == pytest.approx(2 * profile.op_overhead_s)
    assert seconds("cpu") == pytest.approx(profile.op_overhead_s)
