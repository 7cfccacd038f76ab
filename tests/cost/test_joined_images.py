"""Gradients of joined images, against what XLA's TPU compiler has alive."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import jaxplan
from jaxplan.cost.joined_images import whole_gradients
from jaxplan.ir import trace

S = jax.ShapeDtypeStruct
LEVELS, CHANNELS = 3, 128


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


def test_what_is_alive_is_what_is_compiled_for_v5p() -> None:
    """Arguments of 22.1 MB and 202.5 MB beside them (jax 0.10.2, libtpu 0.0.42.1), two of 33.6 for gradients of joined
    images; XLA leaves 50 MB of gaps there. With their parts alone 208.8 would be promised."""
    options: Any = {"search": "data"}
    mesh = AbstractMesh((8,), ("data",))
    sharded = jaxplan.auto_shard(step, mesh, donate_argnums=0, hardware="tpu-v5p", options=options)
    cost = sharded.plan(*shapes()).cost
    assert cost.peak_bytes - cost.peak_parts.get("gaps", 0) == pytest.approx(202.5e6 + 22.1e6, rel=0.02)
