"""Attention of f32 projections with biases on GPU: what lies in two orders, and what is there beside it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxplan
from jaxplan.cost import Traffic, traffic
from jaxplan.cost.turned_gradients import turned_gradients
from jaxplan.hardware import compile_for
from jaxplan.ir import Graph, trace
from jaxplan.lowering import compiled_memory
from jaxplan.sharding import NONE, graph_rules

DIM, HEADS, LAYERS = 768, 12, 4
F32, BF16 = jnp.float32, jnp.bfloat16


def normalised(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def step(weights: Any, x: jax.Array) -> Any:
    def loss(weights: Any) -> jax.Array:
        h = x
        for w in jax.tree.map(lambda w: w.astype(x.dtype), weights):
            y = normalised(h)
            q, k, v = (jnp.einsum("btm,mhd->bthd", y, w[n]) + w["bias_" + n] for n in "qkv")
            scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q / 8, k), -1)
            h = h + jnp.einsum("bhqk,bkhd,hdm->bqm", scores, v, w["o"])
            h = h + jax.nn.gelu(normalised(h) @ w["up"]) @ w["down"]
        return jnp.mean(jnp.square(h.astype(F32)))

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def shapes(batch: int, tokens: int, dtype: Any = F32) -> tuple[Any, Any]:
    heads, width = (DIM, HEADS, DIM // HEADS), (HEADS, DIM // HEADS)
    layer = {n: heads for n in "qkv"} | {"bias_" + n: width for n in "qkv"}
    layer |= {"o": (*width, DIM), "up": (DIM, 4 * DIM), "down": (4 * DIM, DIM)}
    weights = [{name: jax.ShapeDtypeStruct(shape, F32) for name, shape in layer.items()}] * LAYERS
    return weights, jax.ShapeDtypeStruct((batch, tokens, DIM), dtype)


def planned(tokens: int, dtype: Any = F32) -> tuple[Graph, Traffic]:
    graph = trace(step, shapes(32, tokens, dtype), {}).graph
    return graph, traffic(graph, graph_rules(graph), "gpu")


@pytest.mark.parametrize(
    ("tokens", "dtype", "orders"), [(196, F32, LAYERS), (256, F32, 0), (196, BF16, 0)], ids=["odd", "even", "bf16"]
)
def test_keys_are_made_in_two_orders(tokens: int, dtype: Any, orders: int) -> None:
    """Triton's products, which XLA has for sequences that are multiples of 16, read any order."""
    graph, crossing = planned(tokens, dtype)
    keys = [v for v in crossing.apart if graph.values[v].shape == (32, tokens, HEADS, DIM // HEADS)]
    assert len(keys) == orders
    assert not any(crossing.stored[v] for v in keys)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_values_gradient_waits_for_the_scores(dtype: Any) -> None:
    graph, crossing = planned(256, dtype)
    size = (32, HEADS, 256, 256)
    kept = [v for op in graph.ops for v in op.results if graph.values[v].shape == size and crossing.stored[v]]
    read_twice = [v for v in kept if len(graph.uses()[v]) == 2 and graph.ops[graph.producers()[v]].primitive == "div"]
    late = [max(op for op, _ in graph.uses()[v]) for v in read_twice]
    assert len(late) == LAYERS
    assert all((crossing.times[op] > op + 1) == (dtype == F32) for op in late)


def test_gradients_that_are_held_back_lie_in_two_orders() -> None:
    """Those of queries, keys and values, each for its weights and for its bias."""
    graph, crossing = planned(256)
    values = {v: np.array([NONE]) for v in range(len(graph.values))}
    sides = [op for op in graph.ops if op.primitive == "dot_general" and graph.values[op.results[0]].shape[0] == DIM]
    times = list(crossing.times)
    for op in sides:
        times[op.index] = len(graph.ops)
    found = [*turned_gradients(graph, (("data", 1),), crossing.stored, times, values)]
    assert [size for _, _, size in found] == [4 * 32 * 256 * DIM] * 3 * LAYERS
    assert not [*turned_gradients(graph, (("data", 1),), crossing.stored, crossing.times, values)]


@pytest.mark.aot_gpu
@pytest.mark.usefixtures("cuda_compiler")
@pytest.mark.parametrize(("batch", "tokens"), [(256, 197), (256, 256)])
def test_compiled_for_gpu_the_step_takes_as_much(batch: int, tokens: int) -> None:
    mesh = jaxplan.target("h100:1x1x8").mesh(data=8)
    sharded = jaxplan.auto_shard(step, mesh, donate_argnums=0, hardware="h100", options={"search": "data"})
    arguments = shapes(batch, tokens)
    predicted = sharded.plan(*arguments).cost.peak_bytes
    compiled = compiled_memory(compile_for(sharded.lower(*arguments), mesh)).peak_bytes
    assert 0.95 * compiled < predicted < 1.1 * compiled
