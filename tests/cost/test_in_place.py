"""What is written over what, and what isn't: XLA gives a kernel of several results a buffer for each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxplan
from jaxplan.cost import narrowed, traffic
from jaxplan.ir import Graph, trace
from jaxplan.lowering import compiled_memory
from jaxplan.sharding import graph_rules

BATCH, TOKENS, HEADS, WIDTH = 32, 1024, 12, 64
SCORES = (BATCH, HEADS, TOKENS, TOKENS)
WEIGHTS = {
    **{name: jax.ShapeDtypeStruct((HEADS * WIDTH, HEADS, WIDTH), jnp.float32) for name in ("q", "k", "v")},
    "o": jax.ShapeDtypeStruct((HEADS, WIDTH, HEADS * WIDTH), jnp.float32),
}
X = jax.ShapeDtypeStruct((BATCH, TOKENS, HEADS * WIDTH), jnp.bfloat16)


def attended(weights: Any, x: jax.Array) -> jax.Array:
    q, k, v = (jnp.einsum("btm,mhd->bthd", x, weights[name].astype(x.dtype)) for name in ("q", "k", "v"))
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32)
    scores = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), 0.1 * scores, -1e30)
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores).astype(x.dtype), v)
    return x + jnp.einsum("bthd,hdm->btm", mixed, weights["o"].astype(x.dtype))


def step(layers: Any, x: jax.Array) -> Any:
    def loss(layers: Any) -> jax.Array:
        h = x
        for weights in layers:
            h = attended(weights, h)
        return jnp.mean(jnp.square(h.astype(jnp.float32)))

    return jax.tree.map(lambda w, g: w - 0.1 * g, layers, jax.grad(loss)(layers))


def written_over(function: Any, *shapes: Any) -> tuple[Graph, dict[int, tuple[int, ...]]]:
    traced = trace(function, shapes, {})
    rules = graph_rules(traced.graph)
    graph = narrowed(traced.graph, rules, "tpu")
    return graph, dict(traffic(graph, rules, "tpu").over)


def test_what_a_product_makes_with_the_sums_of_its_rows_is_not_written_over() -> None:
    graph, over = written_over(step, [WEIGHTS], X)
    assert not [value for value in over if graph.values[value].shape == SCORES]


def test_a_gradient_takes_the_place_of_what_a_product_alone_made() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square((jax.nn.gelu(x @ w[0]) @ w[1]).astype(jnp.float32)))

    w = jax.ShapeDtypeStruct((2, 1024, 1024), jnp.bfloat16)
    graph, over = written_over(jax.grad(loss), w, jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16))
    assert [value for value in over if graph.values[value].shape == (4096, 1024)]


@pytest.mark.aot_tpu
def test_scores_gradients_beside_those_of_their_softmax_are_counted() -> None:
    mesh = jaxplan.target("tpu-v5e:2x4").mesh(data=4, model=2)
    sharded = jaxplan.auto_shard(step, mesh, donate_argnums=0, hardware="tpu-v5e")
    layers = [WEIGHTS] * 3
    planned = sharded.plan(layers, X).cost.peak_bytes
    compiled = compiled_memory(sharded.lower(layers, X).compile()).peak_bytes
    one = np.prod(SCORES) * 2 // 8
    assert abs(planned - compiled) < one / 2, (planned, compiled)
