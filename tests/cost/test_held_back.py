"""Weights' gradients that wait for the end of the backward pass on GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.cost import CostModel, simulate_memory, step_memory, traffic
from jaxplan.hardware import axis_links, load_profile
from jaxplan.ir import Graph, trace
from jaxplan.search import graph_rules

AXES = (("data", 8),)
LAYERS, SIDE, ROWS = 4, 64, 65536


def step(ws: Any, x: Any) -> Any:
    def loss(ws: Any) -> Any:
        hidden = x
        for w in ws:
            hidden = jnp.tanh(hidden @ w)
        return jnp.mean(hidden)

    gradients = jax.grad(loss)(ws)
    norm = sum(jnp.sum(g**2) for g in gradients)
    return [w - g / norm for w, g in zip(ws, gradients, strict=True)]


def gradients(graph: Graph) -> list[int]:
    """The products that make a weight's gradient."""
    return [
        op.index
        for op in graph.ops
        if op.primitive == "dot_general" and ROWS not in graph.values[op.results[0]].shape
    ]


@pytest.mark.parametrize(("read_as", "waits"), [(-1, True), (0, False)], ids=["all_reduced", "scattered"])
def test_on_gpu_gradients_that_are_all_reduced_wait_for_the_end_of_the_backward_pass(
    read_as: int, waits: bool
) -> None:
    arguments = (
        [jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)] * LAYERS,
        jax.ShapeDtypeStruct((ROWS, SIDE), jnp.float32),
    )
    graph = trace(step, arguments, {}).graph
    profile = load_profile("h100")
    model = CostModel(profile=profile, axes=AXES, links=(axis_links(profile, AXES)["data"],))
    crossing = traffic(graph, graph_rules(graph), "gpu")
    products = {graph.ops[index].results[0] for index in gradients(graph)}
    assert len(products) == LAYERS

    def row(value: int) -> np.ndarray:
        return np.array([0 if ROWS in graph.values[value].shape else -1], np.int8)

    values = {v.index: row(v.index) for v in graph.values if not v.constant}
    reads = {
        (op.index, i): np.array([read_as], np.int8) if v in products else values[v]
        for op in graph.ops
        for i, v in enumerate(op.operands)
        if v in values
    }
    values |= {v: np.array([-2], np.int8) for v in products}
    kinds = ["parameter"] * LAYERS + ["batch"]
    found = step_memory(graph, AXES, model, crossing, kinds, values, reads, {})
    in_order = simulate_memory(
        graph, AXES, crossing.stored, kinds, values, reads, times=crossing.times, platform="gpu"
    )
    activation = ROWS * SIDE * 4 // 8
    # the first layer's gradient needs what all others still hold
    assert found.parts["activations"] >= activation * (2 * LAYERS - 1 if waits else LAYERS)
    assert (found.peak_bytes > in_order.peak_bytes + activation) == waits
