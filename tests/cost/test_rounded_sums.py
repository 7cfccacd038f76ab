"""What XLA for TPU runs behind a sum over devices whose pieces are rounded up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import jaxplan
from jaxplan.hardware import load_profile
from jaxplan.lowering import compiled_memory

BATCH, TOKENS, DIM, LAYERS = 32, 1024, 768, 6
BF16, F32 = jnp.bfloat16, jnp.float32


def shapes_of(words: int, layers: int = LAYERS) -> Any:
    def of(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, F32)

    weights = {"e": of(words, DIM), "layers": [(of(DIM, 4 * DIM), of(4 * DIM, DIM))] * layers}
    return weights, jax.ShapeDtypeStruct((BATCH, TOKENS), jnp.int32)


@jax.checkpoint
def block(weights: Any, h: jax.Array) -> jax.Array:
    up, down = weights
    return h + jax.nn.gelu(h @ up.astype(BF16)) @ down.astype(BF16)


def step(weights: Any, tokens: jax.Array) -> Any:
    def loss(weights: Any) -> jax.Array:
        h = weights["e"].astype(BF16)[tokens]
        for layer in weights["layers"]:
            h = block(layer, h)
        logits = jnp.einsum("btd,vd->btv", h, weights["e"].astype(BF16), preferred_element_type=F32)
        taken = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - taken)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def planned(words: int, layers: int = LAYERS, hardware: Any = "tpu-v5e") -> Any:
    mesh, options = AbstractMesh((8,), ("data",)), {"search": "data", "compare_templates": False}
    sharded = jaxplan.auto_shard(step, mesh, donate_argnums=(0,), hardware=hardware, options=options)
    return sharded.plan(*shapes_of(words, layers))


def test_gradients_wait_for_the_sum_of_the_last_that_is_rounded() -> None:
    """Pieces of 8192 / 8 rows are, those of 4096 / 8 are not: operands of every layer are kept."""
    few, many = (planned(8192, layers).cost.peak_bytes for layers in (6, 12))
    a_layer = BATCH // 8 * TOKENS * DIM * (1 + 4 + 4) * 2
    assert many - few > 6 * (a_layer + 4 * 8 * DIM * DIM)
    few, many = (planned(4096, layers).cost.peak_bytes for layers in (6, 12))
    assert many - few < 6 * (a_layer / 2 + 4 * 8 * DIM * DIM)


def test_no_more_wait_than_the_memory_has_room_for() -> None:
    all_of_them = planned(8192, 12).cost.peak_bytes
    room = int(0.9 * all_of_them)
    small = replace(load_profile("tpu-v5e"), hbm_bytes=room, reserve_bytes=0)
    assert 0.9 * room < planned(8192, 12, small).cost.peak_bytes <= room


@pytest.mark.aot_broad
def test_the_compiled_step_takes_as_much() -> None:
    plan, shapes = planned(8192), shapes_of(8192)
    mesh = jaxplan.target("tpu-v5e:2x4").mesh(data=8)
    lowered = jaxplan.auto_shard(step, mesh, donate_argnums=(0,), options={"plan": plan}).lower(*shapes)
    assert plan.cost.peak_bytes == pytest.approx(compiled_memory(lowered.compile()).peak_bytes, rel=0.05)
