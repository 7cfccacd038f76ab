"""Updates that XLA for TPU v6e makes the other way round."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxplan
from jaxplan.cost.first_layers import first_layers
from jaxplan.ir import trace
from jaxplan.lowering import compiled_memory


def step_of(*, moments: bool = True, clipped: bool = False, first: Any = lambda x: x) -> Any:
    """An MLP's step under Adam, nearly."""

    def step(state: Any, x: Any, y: Any) -> Any:
        weights, *rest = state

        def loss(weights: Any) -> Any:
            h = first(x)
            for w in weights:
                h = jax.nn.relu(h @ w.astype(jnp.bfloat16))
            return jnp.mean((h.astype(jnp.float32) - y) ** 2)

        gradients = jax.grad(loss)(weights)
        if clipped:
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients))
            gradients = [g / jnp.maximum(norm, 1.0) for g in gradients]
        if not moments:
            return ([w - 0.1 * g for w, g in zip(weights, gradients, strict=True)],)
        first_moments, second = rest
        first_moments = [0.9 * m + 0.1 * g for m, g in zip(first_moments, gradients, strict=True)]
        second = [0.99 * v + 0.01 * g * g for v, g in zip(second, gradients, strict=True)]
        moved = zip(weights, first_moments, second, strict=True)
        return [w - 1e-3 * m / (jnp.sqrt(v) + 1e-8) for w, m, v in moved], first_moments, second

    return step


def arguments(*dims: int, moments: bool = True, rows: int = 64) -> tuple[Any, ...]:
    pairs = itertools.pairwise(dims)
    weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in pairs]
    x = jax.ShapeDtypeStruct((rows, dims[0]), jnp.bfloat16)
    return (weights,) * (3 if moments else 1), x, jax.ShapeDtypeStruct((rows, dims[-1]), jnp.float32)


def turned(step: Any, shapes: tuple[Any, ...]) -> list[tuple[int, ...]]:
    graph = trace(step, shapes, {}, donate_argnums=(0,)).graph
    return [graph.values[v].shape for one in first_layers(graph, graph.producers()) for v in one]


@pytest.mark.parametrize("first", [lambda x: x, lambda x: jnp.tanh(x) * 2])
def test_weights_of_the_batch_and_those_of_their_shape_are_turned(first: Any) -> None:
    step = step_of(first=first)
    assert turned(step, arguments(128, 64, 128, 64, 32)) == [(128, 64)] * 6
    assert turned(step, arguments(96, 160, 32, 64)) == [(96, 160)] * 3
    assert turned(step, arguments(64, 64, 64, 64)) == [(64, 64)] * 9


def test_what_a_norm_scales_and_what_has_no_moments_is_not() -> None:
    assert not turned(step_of(clipped=True), arguments(128, 64, 128))
    assert not turned(step_of(moments=False), arguments(128, 64, 128, moments=False))


def test_what_is_looked_up_is_no_batch() -> None:
    def step(state: Any, tokens: Any) -> Any:
        table, *others = state
        made = step_of(first=lambda x: jnp.tanh(table)[x].astype(jnp.bfloat16))
        return table, *made(tuple(others), tokens, 0.0)

    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)]
    table = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    assert not turned(step, ((table, weights, weights, weights), jax.ShapeDtypeStruct((16,), jnp.int32)))


@pytest.mark.aot_tpu
def test_as_much_is_compiled() -> None:
    """In the arguments' places it would be 17 % more than planned; jax 0.12 has a copy more alive."""
    mesh = jaxplan.target("tpu-v6e:2x4").mesh(data=8)
    options = {"search": "data", "compare_templates": False}
    step = jaxplan.auto_shard(step_of(), mesh, hardware="tpu-v6e", donate_argnums=(0,), options=options)
    shapes = arguments(8192, 4096, 8192, 4096, rows=512)
    compiled = compiled_memory(step.lower(*shapes).compile()).peak_bytes
    least = -0.05 if jax.__version_info__ < (0, 11) else -0.1
    assert least <= step.plan(*shapes).cost.peak_bytes / compiled - 1 < 0.12
