"""What loops slice lies on TPU with the other dimension in lanes, however short that is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, SingleDeviceSharding

import jaxplan

ALL_IN_MAIN_MEMORY = "tpu-v4"
"""A profile without vector memory."""

BATCH, BOXES = 8, 512


def suppressed(likeness: Any, kept: Any) -> Any:
    """Which of a batch's boxes, best first, are kept: none that is like a better one."""

    def body(i: Any, kept: Any) -> Any:
        like = (likeness[i] > 0.5) & (jnp.arange(BOXES) > i)
        return jnp.where(kept[i], kept & ~like, kept)

    return lax.fori_loop(0, BOXES, body, kept)


def boxes(corners: Any) -> Any:
    """Boxes are alike that have corners at one place; what they are alike by is written out before the loop."""
    apart = jnp.abs(corners[:, :, None] - corners[:, None])
    kept = jax.vmap(suppressed)(jnp.exp(-apart), jnp.ones((BATCH, BOXES), bool))
    return kept.astype(jnp.float32) + corners


def products(corners: Any) -> Any:
    """The same of what a product makes, which lies as products are made."""
    alike = jnp.exp(-jnp.einsum("bn,bm->bnm", corners, corners))
    alike = jnp.einsum("bnk,bkm->bnm", alike, alike)
    return jax.vmap(suppressed)(alike, jnp.ones((BATCH, BOXES), bool)).astype(jnp.float32) + corners


def reductions(corners: Any) -> Any:
    """The same of what is multiplied over several coordinates."""
    places = corners[:, :, None] * jnp.arange(1.0, 3.0)
    apart = jnp.prod(jnp.abs(places[:, :, None] - places[:, None]), axis=-1)
    return jax.vmap(suppressed)(apart, jnp.ones((BATCH, BOXES), bool)).astype(jnp.float32) + corners


def rows(corners: Any) -> Any:
    """Nothing beside the rows is sliced: two dimensions are left, and the longer one is in lanes."""
    apart = jnp.exp(-jnp.abs(corners[:, :, None] - corners[:, None]))

    def body(i: Any, sums: Any) -> Any:
        return jnp.maximum(sums, lax.dynamic_index_in_dim(apart, i, 1, keepdims=False) * sums)

    return lax.fori_loop(0, BOXES, body, corners)


@pytest.mark.parametrize(
    ("step", "least", "most"), [(boxes, 16, 17), (products, 1, 3), (reductions, 1, 3), (rows, 1, 3)]
)
def test_a_batch_in_lanes_is_padded(step: Callable[..., Any], least: float, most: float) -> None:
    shape = jax.ShapeDtypeStruct((BATCH, BOXES), jnp.float32)
    plan = jaxplan.plan(step, AbstractMesh((1,), ("data",)), shape, hardware=ALL_IN_MAIN_MEMORY)
    matrices = plan.cost.peak_bytes / (BATCH * BOXES * BOXES * 4)
    assert least <= matrices < most


@pytest.mark.aot_tpu
@pytest.mark.parametrize("step", [boxes, reductions])
def test_as_much_as_xla_compiles(step: Callable[..., Any], tpu_topology: Callable[[str], Any]) -> None:
    """`peak_memory_in_bytes` counts what lies in vector memory."""
    own = SingleDeviceSharding(tpu_topology("v5e:2x4").devices[0])
    shape = jax.ShapeDtypeStruct((BATCH, BOXES), jnp.float32, sharding=own)
    memory = jax.jit(step).lower(shape).compile().memory_analysis()
    shape = jax.ShapeDtypeStruct((BATCH, BOXES), jnp.float32)
    plan = jaxplan.plan(step, AbstractMesh((1,), ("data",)), shape, hardware=ALL_IN_MAIN_MEMORY)
    assert 0.95 <= plan.cost.peak_bytes / memory.peak_memory_in_bytes <= 1.05


@pytest.mark.aot_tpu
@pytest.mark.parametrize(("queries", "padded"), [(1, True), (4, False)])
def test_what_a_loop_multiplies_by_one_row_lies_in_order(
    queries: int, padded: bool, tpu_topology: Callable[[str], Any]
) -> None:
    """Keys and values of what a decoder attends to, made before it: heads of 64 columns in 128 lanes."""

    def step(query: Any, given: Any) -> Any:
        keys, values = jnp.tanh(given), jnp.sin(given)

        def body(query: Any, _: Any) -> Any:
            scores = jnp.einsum("bqhd,bkhd->bhqk", query, keys, preferred_element_type=jnp.float32)
            seen = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(values.dtype), values)
            return jnp.tanh(query + seen), None

        return lax.scan(body, query, None, length=16)[0]

    shapes = [jax.ShapeDtypeStruct((16, tokens, 8, 64), jnp.bfloat16) for tokens in (queries, 1536)]
    plan = jaxplan.plan(step, AbstractMesh((1,), ("data",)), *shapes, hardware=ALL_IN_MAIN_MEMORY)
    own = SingleDeviceSharding(tpu_topology("v5e:2x4").devices[0])
    given = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=own) for s in shapes]
    memory = jax.jit(step).lower(*given).compile().memory_analysis()
    one = 16 * 1536 * 8 * 64 * 2
    # Two of them and one given, and what XLA needs for a moment beside them.
    for taken in (plan.cost.peak_bytes, memory.peak_memory_in_bytes):
        assert (4.5 if padded else 2.5) * one <= taken <= (6.5 if padded else 3.5) * one
