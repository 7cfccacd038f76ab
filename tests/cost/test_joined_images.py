"""Gradients of joined images, against what XLA's TPU compiler has alive."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxplan
from jaxplan.cost.joined_images import whole_gradients
from jaxplan.hardware import compile_for
from jaxplan.ir import trace
from jaxplan.lowering import compiled_memory

S = jax.ShapeDtypeStruct
LEVELS, CHANNELS = 4, 128


def conv(x: Any, w: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w.astype(x.dtype), (1, 1), "SAME", dimension_numbers=numbers)


def step(w: Any, x: Any) -> Any:
    """Convolutions whose images are joined with later ones, in the opposite order."""

    def loss(w: Any) -> Any:
        y, skips = x, []
        for one in w["down"]:
            y = jax.nn.silu(conv(y, one))
            skips.append(y)
        for one in w["up"]:
            y = jax.nn.silu(conv(jnp.concatenate([y, skips.pop()], axis=-1), one))
        return jnp.mean(y.astype(jnp.float32) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))


def shapes() -> tuple[Any, ...]:
    down = [S((3, 3, CHANNELS, CHANNELS), jnp.float32)] * LEVELS
    up = [S((3, 3, 2 * CHANNELS, CHANNELS), jnp.float32)] * LEVELS
    return {"down": down, "up": up}, S((128, 64, 64, CHANNELS), jnp.bfloat16)


def test_gradients_of_joined_images_are_whole() -> None:
    graph = trace(step, shapes(), {}).graph
    found = whole_gradients(graph, graph.producers())
    splits = [op for op in graph.ops if op.primitive == "split"]
    assert len(splits) == LEVELS and found == {op.operands[0] for op in splits}


def test_joined_arguments_and_products_are_split_where_they_are_made() -> None:
    def products(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: jnp.sum(jnp.concatenate([x @ w, x], axis=-1) @ jnp.ones((16, 8))))(w)

    graph = trace(products, (S((8, 8), jnp.float32), S((4, 8), jnp.float32)), {}).graph
    assert not whole_gradients(graph, graph.producers())


@pytest.mark.aot_tpu
@pytest.mark.parametrize("target", ["tpu-v5e:2x4", pytest.param("tpu-v5p:2x2x2", marks=pytest.mark.aot_broad)])
def test_joined_images_are_compiled_to_what_is_planned(target: str) -> None:
    mesh = jaxplan.target(target).mesh(data=8)
    options: Any = {"search": "data"}
    sharded = jaxplan.auto_shard(step, mesh, donate_argnums=0, hardware=target.split(":")[0], options=options)
    predicted = sharded.plan(*shapes()).cost.peak_bytes
    compiled = compiled_memory(compile_for(sharded.lower(*shapes()), mesh)).peak_bytes
    print(predicted / 1e6, compiled / 1e6)
    assert 0.95 * compiled < predicted < 1.15 * compiled
