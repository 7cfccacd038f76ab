"""Dimensions that lie in no tile on TPU: what products are run for one by one, and what loops slice."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.cost import device_bytes, simulate_memory, traffic
from jaxplan.ir import Graph, trace
from jaxplan.sharding import graph_rules

IMAGES, TOKENS, HEADS, WIDTH = 128, 201, 12, 64
BF16 = jnp.bfloat16


def attention(w: Any, x: Any) -> Any:
    """SGD on one layer of attention."""

    def loss(w: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, part) for part in w)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
        return jnp.mean(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(BF16), v))

    return [a - b for a, b in zip(w, jax.grad(loss)(w), strict=True)]


def recurrence(w: Any, x: Any) -> Any:
    """A state that is a matrix for each row, over 512 words."""

    def word(state: Any, x: Any) -> Any:
        outer = x[:, :, None] * x[:, None, :]
        return jnp.tanh(state * w + outer), jnp.sum(state * outer)

    return jnp.sum(jax.lax.scan(word, jnp.zeros((4, WIDTH, WIDTH)), x)[1])


def lies(step: Any, *shapes: Any) -> tuple[Graph, Any]:
    graph = trace(step, shapes, {}).graph
    return graph, traffic(graph, graph_rules(graph), "tpu")


def in_memory(graph: Graph, crossing: Any, value: int) -> int:
    whole = np.full((1, 1), -1, np.int8)
    return int(device_bytes(graph.values[value], whole, (("data", 1),), "tpu", crossing.tiling(value))[0])


def test_scores_queries_and_keys_lie_with_images_and_heads_in_no_tile() -> None:
    """A vision transformer of 201 tokens and a text encoder on eight v5e: 5305 MB compiled, 4296 predicted before."""
    weights = [jax.ShapeDtypeStruct((768, HEADS, WIDTH), BF16)] * 3
    graph, crossing = lies(attention, weights, jax.ShapeDtypeStruct((IMAGES, TOKENS, 768), BF16))
    products = [op for op in graph.ops if op.primitive == "dot_general"]
    scores = next(op for op in products if graph.values[op.results[0]].shape == (IMAGES, HEADS, TOKENS, TOKENS))
    assert in_memory(graph, crossing, scores.results[0]) == IMAGES * HEADS * 208 * 256 * 2
    for query in scores.operands:
        assert in_memory(graph, crossing, query) == IMAGES * HEADS * 256 * WIDTH * 2
    dense = next(op for op in products if op.operands[0] == graph.inputs[-1])
    assert crossing.tiling(dense.operands[0]) == "any"


def test_products_of_a_vector_for_each_place_leave_the_other_operand_as_it_lies() -> None:
    """XLA multiplies and adds up there: interactions of 128 channels by 9 by 9 on eight v5e, made by products for each
    edge, took 17 GB each as predicted (mesh data=4, model=2) and 1.2 as compiled."""

    def step(channels: Any, angles: Any, radial: Any) -> Any:
        interactions = jnp.einsum("becm,bemij->becij", channels, angles).swapaxes(3, 4)
        return jnp.einsum("becij,becj->beci", interactions, radial)

    shapes = ((4, 16, 128, 9), (4, 16, 9, 9, 9), (4, 16, 128, 9))
    graph, crossing = lies(step, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    turns = [op for op in graph.ops if op.primitive == "transpose" and len(op.params["permutation"]) == 5]
    turned = turns[0].results[0]
    assert in_memory(graph, crossing, turned) == 4 * 16 * 9 * 16 * 128 * 4


def test_what_a_loop_stacks_lies_with_its_iterations_outermost() -> None:
    """A recurrent network with matrices for states on eight v5e: 5297 MB compiled, 3092 predicted before."""
    shapes = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32), jax.ShapeDtypeStruct((512, 4, WIDTH), jnp.float32)
    graph, crossing = lies(jax.grad(recurrence), *shapes)
    stacks = [
        op.results[0]
        for op in graph.ops
        if op.primitive == "scan_stack" and graph.values[op.results[0]].shape == (512, 4, WIDTH, WIDTH)
    ]
    assert stacks
    for stack in stacks:
        assert in_memory(graph, crossing, stack) == 2 * graph.values[stack].bytes


@pytest.mark.parametrize(("platform", "tables"), [("tpu", True), ("gpu", False)])
def test_on_tpu_kernels_of_several_results_have_tables_of_their_own(platform: str, tables: bool) -> None:
    graph = trace(lambda x: jnp.sin(x), (jax.ShapeDtypeStruct((8, 128), jnp.float32),), {}).graph
    whole = {v.index: np.full(1, -1, np.int8) for v in graph.values}
    reads = {(op.index, i): whole[v] for op in graph.ops for i, v in enumerate(op.operands)}
    stored = [True] * len(graph.values)
    found = simulate_memory(graph, (("data", 1),), stored, ["batch"], whole, reads, platform=platform)
    assert (found.parts.get("tables", 0) > 0) is tables
