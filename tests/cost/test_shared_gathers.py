"""A bias that is gathered once and added in many layers, on GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxplan.cost import traffic
from jaxplan.ir import trace
from jaxplan.sharding import graph_rules

ROWS, HEADS, LENGTH, DIM = 8, 12, 512, 64


@pytest.mark.parametrize(
    ("layers", "platform", "normalised", "adds", "gathers"),
    [(6, "gpu", True, 6, 0), (5, "gpu", True, 0, 1), (6, "gpu", False, 0, 0), (6, "cpu", True, 0, 1)],
)
def test_softmaxes_that_share_a_gathered_bias_read_sums_in_memory(
    layers: int, platform: str, normalised: bool, adds: int, gathers: int
) -> None:
    """Scores of attention with T5's bias, f32[32, 12] gathered by [512, 512]: six layers write them in f32, five read
    the products' bf16 and the bias (H100, jax 0.10.2)."""

    def loss(table: Any, x: Any, buckets: Any) -> Any:
        bias = table[buckets].transpose(2, 0, 1)[None]
        for _ in range(layers):
            scores = jnp.einsum("bqhd,bkhd->bhqk", x, x).astype(jnp.float32) + bias
            mixed = jax.nn.softmax(scores) if normalised else jnp.tanh(scores)
            x = jnp.einsum("bhqk,bkhd->bqhd", mixed.astype(x.dtype), x)
        return jnp.sum(x.astype(jnp.float32))

    arguments = (
        jax.ShapeDtypeStruct((32, HEADS), jnp.float32),
        jax.ShapeDtypeStruct((ROWS, LENGTH, HEADS, DIM), jnp.bfloat16),
        jax.ShapeDtypeStruct((LENGTH, LENGTH), jnp.int32),
    )
    graph = trace(jax.grad(loss), arguments, {}).graph
    stored = traffic(graph, graph_rules(graph), platform).stored
    kept = [
        op.primitive
        for op in graph.ops
        if op.primitive in ("add", "gather")
        and stored[op.results[0]]
        and graph.values[op.results[0]].shape in ((LENGTH, LENGTH, HEADS), (ROWS, HEADS, LENGTH, LENGTH))
    ]
    assert (kept.count("add"), kept.count("gather")) == (adds, gathers)
