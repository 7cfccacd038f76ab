"""Scores that XLA for GPU keeps, beside what it was seen to."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxplan
from jaxplan.cost import traffic
from jaxplan.ir import trace
from jaxplan.lowering import compiled_memory
from jaxplan.sharding import graph_rules

BATCH, TOKENS, HEADS, WIDTH = 32, 512, 8, 64


def step_under(capped: bool, grouped: bool, *masks: str) -> Any:
    """A step of four layers of attention under a causal mask and these; grouped: as for two queries a key."""

    def attention(x: jax.Array, w: jax.Array, packed: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("btd,dhe->bthe", x, one.astype(x.dtype)) for one in w)
        if grouped:
            q, k, v = q.reshape(*q.shape[:2], HEADS // 2, 2, WIDTH), k[:, :, ::2], v[:, :, ::2]
        read, made = ("btkge,bske->bkgts", "bkgts,bske->btkge") if grouped else ("bthe,bshe->bhts", "bhts,bshe->bthe")
        scores = jnp.einsum(read, q, k, preferred_element_type=jnp.float32)
        scores = 50 * jnp.tanh(scores / 50) if capped else scores
        i, j = jnp.arange(TOKENS)[:, None], jnp.arange(TOKENS)
        mask = j <= i
        if "window" in masks:
            mask &= i - j < 128
        if "packed" in masks:
            mask = mask & (packed[:, :, None] == packed[:, None])
        if "valid" in masks:
            mask = mask & (packed > 0)[:, None]
        shared = mask if mask.ndim == 2 else jnp.expand_dims(mask, (1, 2) if grouped else 1)
        weights = jax.nn.softmax(jnp.where(shared, scores, -1e30)).astype(x.dtype)
        return x + jnp.einsum(made, weights, v).reshape(x.shape)

    def step(weights: Any, x: jax.Array, packed: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            h = x
            for layer in weights:
                h = attention(h, layer, packed)
            return jnp.square(h.astype(jnp.float32)).mean()

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    return step


def shapes() -> tuple[Any, Any, Any]:
    width = HEADS * WIDTH
    weights = [[jax.ShapeDtypeStruct((width, HEADS, WIDTH), jnp.float32)] * 3] * 4
    tokens = jax.ShapeDtypeStruct((BATCH, TOKENS), jnp.int32)
    return weights, jax.ShapeDtypeStruct((BATCH, TOKENS, width), jnp.bfloat16), tokens


SEEN: dict[tuple[bool, bool, tuple[str, ...]], list[str]] = {
    (True, True, ()): ["tanh"],
    (True, True, ("window",)): ["tanh", "select_n"],
    (True, True, ("packed",)): ["tanh", "select_n"],
    (True, True, ("window", "packed")): ["tanh", "select_n"],
    (True, True, ("packed", "valid")): ["tanh", "select_n"],
    (True, True, ("window", "valid")): ["tanh", "select_n"],
    (True, False, ("window", "packed")): ["tanh"],
    (False, True, ("window", "packed")): [],
}
"""Whether scores are capped, whether queries are grouped, and masks -> what else than products is kept of a layer."""


@pytest.mark.parametrize("case", SEEN, ids=str)
def test_capped_scores_under_more_than_a_causal_mask_are_kept_twice(case: tuple[bool, bool, tuple[str, ...]]) -> None:
    capped, grouped, masks = case
    graph = trace(step_under(capped, grouped, *masks), shapes(), {}).graph
    stored = traffic(graph, graph_rules(graph), "gpu").stored
    scores = BATCH * HEADS * TOKENS**2 * 4
    kept = [op for op in graph.ops if op.primitive in ("select_n", "tanh") and stored[op.results[0]]]
    gradient = min(op.index for op in graph.ops if op.primitive == "mul" and op.index > graph.ops[-1].index // 2)
    of_forward = [op.primitive for op in kept if graph.values[op.results[0]].bytes == scores and op.index < gradient]
    assert of_forward == SEEN[case] * 4


@pytest.mark.aot_gpu
@pytest.mark.usefixtures("cuda_compiler")
@pytest.mark.parametrize("case", [case for case in SEEN if case[2]], ids=str)
def test_as_many_are_compiled(case: tuple[bool, bool, tuple[str, ...]]) -> None:
    """More than under the causal mask alone, in arrays of one device's scores."""
    mesh = jaxplan.target("h100:1x1x8").mesh(data=8)
    capped, grouped, masks = case
    options = {"search": "data", "compare_templates": False}

    def bytes_under(*masks: str) -> tuple[int, int]:
        """Planned and compiled."""
        step = jaxplan.auto_shard(
            step_under(capped, grouped, *masks), mesh, donate_argnums=0, hardware="h100", options=options
        )
        compiled = compiled_memory(step.lower(*shapes()).compile())
        return step.plan(*shapes()).cost.peak_bytes, compiled.peak_bytes

    scores = BATCH // 8 * HEADS * TOKENS**2 * 4
    more = [(a - b) / scores for a, b in zip(bytes_under(*masks), bytes_under(), strict=True)]
    assert [round(arrays) for arrays in more] == [4 * ("select_n" in SEEN[case])] * 2
