"""What XLA for TPU writes because it is padded, concatenated, moved around or sliced next (v5e, jax 0.10.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxplan.cost.fusion import traffic
from jaxplan.ir import trace
from jaxplan.sharding import graph_rules

X = jax.ShapeDtypeStruct((64, 128, 256), jnp.float32)


def stored(fn: Callable[..., Any], *shapes: Any, platform: str = "tpu") -> list[str]:
    """The primitives whose results lie in memory between kernels."""
    graph = trace(fn, shapes, {}).graph
    kept = traffic(graph, graph_rules(graph), platform).stored
    results = set(graph.outputs)
    return [op.primitive for op in graph.ops if any(kept[v] and v not in results for v in op.results)]


MOVES: dict[str, Callable[[Any], Any]] = {
    "tokens": lambda y: jnp.pad(y, ((0, 0), (0, 1), (0, 0))),
    "batch": lambda y: jnp.pad(y, ((8, 0), (0, 0), (0, 0))),
    "between": lambda y: jax.lax.pad(y, 0.0, ((0, 0, 0), (0, 0, 1), (0, 0, 0))),
    "beside": lambda y: jnp.concatenate([y, jnp.zeros_like(y)], 1),
    "around": lambda y: jnp.roll(y, 1, 1),
    "shifted": lambda y: jnp.pad(y, ((0, 0), (1, 0), (0, 0)))[:, :-1],
}


@pytest.mark.parametrize("move", MOVES)
def test_what_is_moved_is_written_first(move: str) -> None:
    def step(x: Any) -> Any:
        return (MOVES[move](jnp.exp(x) * x) * 2.0).sum(-1)

    assert stored(step, X) == ["mul"]
    assert stored(step, X, platform="gpu") == []


def test_what_is_cut_is_not_written() -> None:
    def step(x: Any) -> Any:
        return (jax.lax.pad(jnp.exp(x) * x, 0.0, ((0, 0, 0), (0, -1, 0), (0, 0, 0))) * 2.0).sum(-1)

    assert stored(step, X) == []


def test_it_is_rounded_before_it_is_padded() -> None:
    """The convert stands after the pad, and XLA moves it up: what is in memory is of two bytes."""

    def step(x: Any, w: Any) -> Any:
        return jnp.pad(jnp.exp(x) * x, ((0, 0), (0, 1), (0, 0))).astype(jnp.bfloat16) @ w

    assert stored(step, X, jax.ShapeDtypeStruct((256, 8), jnp.bfloat16)) == ["convert_element_type"]


@pytest.mark.parametrize(("capped", "kept"), [(True, "tanh"), (False, "dot_general")])
def test_a_products_kernel_goes_on_until_what_it_makes_is_sliced(capped: bool, kept: str) -> None:
    """f32 capped logits are kept where slices of them are read three times, bf16 ones where they are only converted."""

    def step(h: Any, w: Any) -> Any:
        logits = (h @ w).astype(jnp.float32)
        logits = (jnp.tanh(logits) if capped else logits)[:, :-1]
        most = logits.max(-1, keepdims=True)
        share = jnp.exp(logits - most)
        return (share / share.sum(-1, keepdims=True)).max(0)

    shapes = jax.ShapeDtypeStruct((8, 128, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16)
    large = [p for p in stored(step, *shapes) if p in ("tanh", "dot_general", "convert_element_type", "slice")]
    assert large == [kept]


@pytest.mark.parametrize(("function", "beside"), [(jax.nn.silu, True), (jax.nn.relu, True), (jnp.tanh, False)])
def test_a_function_of_a_product_is_written_where_it_is_split(function: Any, beside: bool) -> None:
    """Six gated layers under their own plan take 645 MB on eight v5e, 342 predicted before; of a tanh, whose derivative
    is made of it, 343 (jax 0.10.2)."""

    def step(h: Any, up: Any, down: Any) -> Any:
        def loss(up: Any) -> Any:
            gate, value = jnp.split(function(h @ up), 2, -1)
            return jnp.mean(((gate * value) @ down).astype(jnp.float32) ** 2)

        return jax.grad(loss)(up)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 512), (512, 3072), (1536, 512))]
    graph = trace(step, shapes, {}).graph
    found = traffic(graph, graph_rules(graph), "tpu").stored
    (split,) = [op for op in graph.ops if op.primitive == "split"]
    product = next(op for op in graph.ops if op.primitive == "dot_general")
    assert found[split.operands[0]] and found[product.results[0]] == beside
