"""What XLA for GPU keeps of activations behind normalisations (MLPs compiled for H100, jax 0.10.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxplan.cost import narrowed, traffic
from jaxplan.ir import trace
from jaxplan.sharding import graph_rules

ROWS, WIDE, NARROW = 8192, 2048, 512


def normalised(x: Any, over: int) -> Any:
    mean = x.mean(over, keepdims=True)
    return (x - mean) * jax.lax.rsqrt((x * x).mean(over, keepdims=True) - mean * mean + 1e-6)


def kept(activation: Callable[[Any], Any], over: int | None, dtype: Any, platform: str = "gpu") -> list[str]:
    """The wide f32 values of a step that are in memory, by what makes them."""

    def loss(ws: Any, x: Any) -> Any:
        for w1, scale, w2 in ws:
            hidden = (x @ w1.astype(dtype)).astype(jnp.float32)
            hidden = activation(hidden * scale if over is None else normalised(hidden, over) * scale)
            x = x + hidden.astype(dtype) @ w2.astype(dtype)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    shapes = [(NARROW, WIDE), (WIDE,), (WIDE, NARROW)]
    ws = [tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)] * 2
    graph = trace(jax.grad(loss), (ws, jax.ShapeDtypeStruct((ROWS, NARROW), dtype)), {}).graph
    stored = traffic(graph, graph_rules(graph), platform).stored
    return [
        op.primitive
        for op in graph.ops
        for value in op.results
        if stored[value] and graph.values[value].shape == (ROWS, WIDE) and graph.values[value].dtype == "float32"
    ]


@pytest.mark.parametrize(
    ("activation", "over", "tanhs", "gradients"),
    [
        (jax.nn.gelu, 1, 2, 2),
        (jax.nn.gelu, None, 0, 0),  # its argument is in memory, in bf16
        (jax.nn.silu, 1, 0, 2),
        (jax.nn.silu, 0, 0, 2),  # a batch normalisation
        (jax.nn.silu, None, 0, 0),
        (jax.nn.relu, 1, 0, 0),
        (jax.nn.relu, 0, 0, 0),
    ],
)
def test_activations_of_what_is_normalised_leave_their_gradients_in_memory(
    activation: Callable[[Any], Any], over: int | None, tanhs: int, gradients: int
) -> None:
    found = kept(activation, over, jnp.bfloat16)
    assert found.count("tanh") == tanhs
    assert len(found) == tanhs + gradients
    assert "tanh" not in kept(activation, over, jnp.bfloat16, "tpu")


def test_what_is_pooled_of_an_activation_is_in_memory_for_who_reads_it_later() -> None:
    """Squeeze and excitation of an EfficientNet: f32, beside the bf16 that the next convolution reads."""

    def loss(w: Any, x: Any) -> Any:
        active = jax.nn.silu(normalised(x.astype(jnp.float32), 0))
        gates = jax.nn.sigmoid(active.mean(1) @ w)
        return jnp.sum((active * gates[:, None]).astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))

    arguments = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((64, 196, 256), jnp.bfloat16)
    graph = trace(loss, arguments, {}).graph
    stored = traffic(graph, graph_rules(graph), "gpu").stored
    (pooled,) = [op for op in graph.ops if op.primitive == "reduce_sum" and op.params["axes"] == (1,)]
    assert stored[pooled.operands[0]]


def test_what_is_pooled_in_f32_is_in_memory_in_its_own_type() -> None:
    """MBConv blocks in bf16: `mean` adds in f32 (H100)."""

    def loss(w: Any, x: Any) -> Any:
        active = jax.nn.silu(normalised(x.astype(jnp.float32), 0).astype(jnp.bfloat16))
        gates = jax.nn.sigmoid(active.mean(1) @ w)
        return jnp.sum((active * gates[:, None]) @ w)

    arguments = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16), jax.ShapeDtypeStruct((64, 196, 256), jnp.bfloat16)
    graph = trace(loss, arguments, {}).graph
    stored = traffic(graph, graph_rules(graph), "gpu").stored
    sums = [op for op in graph.ops if op.primitive == "reduce_sum"]
    (widened,) = [v for op in sums if graph.values[op.results[0]].shape == (64, 256) for v in op.operands]
    assert stored[graph.ops[graph.producers()[widened]].operands[0]] and not stored[widened]


def in_memory(function: Callable[..., Any], *shapes: Any) -> dict[str, str]:
    """By operation, the type of the large values that a step on GPU keeps."""
    graph = trace(function, shapes, {}).graph
    rules = graph_rules(graph)
    graph = narrowed(graph, rules, "gpu")
    stored = traffic(graph, rules, "gpu").stored
    return {
        op.primitive: graph.values[v].dtype for op in graph.ops for v in op.results
        if stored[v] and graph.values[v].shape == (ROWS, WIDE)
    }  # fmt: skip


def test_what_three_kernels_read_is_kept_in_f32() -> None:
    """Capped logits, of which rows' largest, sums of exponentials and gradients are made: 262 MB beside as much of
    their gradients in f32, 694 MB for 432 planned (16384 tokens, 32000 words on eight H100, jax 0.10.2)."""

    def loss(w: Any, x: Any, labels: Any, cap: bool) -> Any:
        logits = (x @ w).astype(jnp.float32)
        logits = 30 * jnp.tanh(logits / 30) if cap else logits
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
        return -chosen.mean()

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((NARROW, WIDE), (ROWS, NARROW))]
    labels = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    capped = in_memory(lambda w, x, labels: jax.grad(loss)(w, x, labels, True), *shapes, labels)
    assert capped["tanh"] == "float32"
    assert "tanh" not in in_memory(lambda w, x, labels: jax.grad(loss)(w, x, labels, False), *shapes, labels)

    def by_logistic(w: Any, x: Any, labels: Any) -> Any:
        logits = 30 * jax.nn.sigmoid((x @ w).astype(jnp.float32) / 7.5)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

    capped = in_memory(jax.grad(by_logistic), *shapes, labels)  # scaled; its derivative is made of the product again
    assert capped["mul"] == "float32" and capped["dot_general"] == "bfloat16" and "logistic" not in capped

    def gated(w: Any, x: Any) -> Any:
        hidden = jax.nn.silu((x @ w).astype(jnp.float32)).astype(x.dtype)
        return jnp.mean((hidden @ w.T).astype(jnp.float32) ** 2)

    assert "mul" not in in_memory(jax.grad(gated), *shapes)

    def activated(w: Any, x: Any) -> Any:
        return (jnp.tanh((x @ w).astype(jnp.float32)) @ w.T.astype(jnp.float32)).sum()

    assert "tanh" not in in_memory(jax.grad(activated), *shapes)  # that and its derivative are two


def test_what_is_converted_next_is_kept_as_it_was_computed() -> None:
    """A tanh in bf16 before a layer normalisation, f32[2048, 2048] (four layers on eight H100, jax 0.10.2)."""

    def loss(w: Any, x: Any) -> Any:
        hidden = jnp.tanh(x @ w)
        return jnp.mean((normalised(hidden.astype(jnp.float32), 1).astype(jnp.bfloat16) @ w.T).astype(jnp.float32) ** 2)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((NARROW, WIDE), (ROWS, NARROW))]
    assert in_memory(jax.grad(loss), *shapes)["tanh"] == "float32"


def test_a_sum_of_many_products_is_added_up_in_one_kernel() -> None:
    """Gradients of a weight that is used four times: products, and no sums of some of them."""

    def loss(w: Any, x: Any) -> Any:
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return jnp.sum(x * x)

    shapes = jax.ShapeDtypeStruct((ROWS, ROWS), jnp.float32), jax.ShapeDtypeStruct((WIDE, ROWS), jnp.float32)
    graph = trace(jax.grad(loss), shapes, {}).graph
    stored = traffic(graph, graph_rules(graph), "gpu").stored
    adds = [op.results[0] for op in graph.ops if op.primitive == "add_any"]
    adds = [value for value in adds if graph.values[value].shape == (ROWS, ROWS)]
    assert len(adds) == 3
    assert [v for v in adds if stored[v]] == adds[-1:]
