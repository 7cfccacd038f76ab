"""Scores of two products that are added before the softmax: what XLA for TPU keeps of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxplan
from jaxplan.cost import narrowed, traffic
from jaxplan.ir import trace
from jaxplan.lowering import compiled_memory
from jaxplan.sharding import graph_rules

BATCH, TOKENS, HEADS, WIDTH = 32, 1024, 16, 64
DIM = HEADS * WIDTH
SCORES = (BATCH, HEADS, TOKENS, TOKENS)


def of(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


WEIGHTS = {**{name: of(DIM, HEADS, WIDTH) for name in ("q", "k", "v", "r")}, "o": of(HEADS, WIDTH, DIM)}
X = of(BATCH, TOKENS, DIM, dtype=jnp.bfloat16)


def attended(weights: Any, x: jax.Array, *, shared: bool) -> jax.Array:
    q, k, v, r = (jnp.einsum("btm,mhd->bthd", x, weights[name].astype(x.dtype)) for name in "qkvr")
    near = jnp.einsum("bthd,bsd->bhts", r, k[:, :, 0]) if shared else jnp.einsum("bthd,bshd->bhts", r, k)
    scores = (jnp.einsum("bthd,bshd->bhts", q, k) + near).astype(jnp.float32)
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(0.1 * scores).astype(x.dtype), v)
    return x + jnp.einsum("bthd,hdm->btm", mixed, weights["o"].astype(x.dtype))


def step_of(*, shared: bool) -> Any:
    """`shared`: one key for all heads, so that the second product is transposed."""

    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            embedding, *layers = weights
            h = x @ embedding.astype(x.dtype)
            for layer in layers:
                h = attended(layer, h, shared=shared)
            return jnp.mean(jnp.square(h.astype(jnp.float32)))

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    return step


def kept(*, shared: bool) -> list[str]:
    """The types of what is in memory as large as the scores, forward."""
    traced = trace(step_of(shared=shared), ([of(DIM, DIM), WEIGHTS], X), {})
    rules = graph_rules(traced.graph)
    graph = narrowed(traced.graph, rules, "tpu")
    found = traffic(graph, rules, "tpu")
    last = max(op.index for op in graph.ops if op.primitive == "exp")
    made = [graph.values[v] for op in graph.ops[:last] for v in op.results if found.stored[v]]
    assert bool(found.scores) == shared
    return sorted(value.dtype for value in made if sorted(value.shape) == sorted(SCORES))


def test_both_products_and_their_sum_are_kept_where_one_is_transposed() -> None:
    assert kept(shared=True) == ["bfloat16"] * 3


def test_one_kernel_makes_both_where_they_lie_alike() -> None:
    assert kept(shared=False) == ["float32"]


@pytest.mark.aot_tpu
@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.aot_broad)])
def test_the_compiled_step_takes_as_much(shared: bool) -> None:
    mesh = jaxplan.target("tpu-v5e:2x4").mesh(data=4, model=2)
    sharded = jaxplan.auto_shard(step_of(shared=shared), mesh, donate_argnums=0, hardware="tpu-v5e")
    weights = [of(DIM, DIM), *[WEIGHTS] * 3]
    planned = sharded.plan(weights, X).cost.peak_bytes
    compiled = compiled_memory(sharded.lower(weights, X).compile()).peak_bytes
    one = np.prod(SCORES) * 2 // 8
    assert abs(planned - compiled) < one, (planned, compiled)  # of nine and seven
