"""Queries and keys that are normalised or turned head by head: what XLA for TPU keeps of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxplan
from jaxplan.cost import narrowed, traffic
from jaxplan.cost.heads import halves_in_lanes
from jaxplan.ir import trace
from jaxplan.lowering import compiled_memory
from jaxplan.sharding import graph_rules

LAYERS, DIM, HEADS, TOKENS = 3, 1024, 8, 2048
BF16, F32 = jnp.bfloat16, jnp.float32


def of(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def normed(x: jax.Array) -> jax.Array:
    wide = x.astype(F32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def angles(x: jax.Array) -> jax.Array:
    return jnp.arange(x.shape[1], dtype=F32)[:, None, None] * (1e-3 ** jnp.linspace(0.0, 1.0, x.shape[-1] // 2))


def put_together(x: jax.Array) -> jax.Array:
    """Both halves turned, then put together."""
    first, second = jnp.split(x.astype(F32), 2, axis=-1)
    cos, sin = jnp.cos(angles(x)), jnp.sin(angles(x))
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def exchanged(x: jax.Array) -> jax.Array:
    """The whole, and its halves exchanged, all in bf16."""
    cos, sin = (jnp.tile(f(angles(x)), 2).astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * cos + jnp.concatenate([-second, first], -1) * sin


def step_of(turn: Any = None, *, norm: bool = False, heads: int = HEADS, apart: bool = False) -> Any:
    """`apart`: a product makes heads in a dimension of their own."""

    def block(w: Any, x: jax.Array) -> jax.Array:
        h = normed(x)
        if apart:
            q, k, v = (jnp.einsum("btm,mhd->bthd", h, w[n].astype(BF16).reshape(DIM, heads, -1)) for n in "qkv")
        else:
            q, k, v = ((h @ w[n].astype(BF16)).reshape(*x.shape[:2], heads, -1) for n in "qkv")
        if norm:
            q, k = normed(q), normed(k)
        if turn:
            q, k = turn(q), turn(k)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(F32) * 0.1
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        softmax = jax.nn.softmax(jnp.where(causal, scores, -1e9)).astype(BF16)
        return x + jnp.einsum("bhqk,bkhd->bqhd", softmax, v).reshape(x.shape) @ w["o"].astype(BF16)

    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            h = x
            for layer in weights:
                h = block(layer, h)
            return jnp.mean(jnp.square(h.astype(F32)))

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    return step


SHAPES = [dict.fromkeys("qkvo", of(DIM, DIM))] * LAYERS, of(16, TOKENS, DIM, dtype=BF16)


def crossing(step: Any) -> tuple[Any, Any]:
    traced = trace(step, SHAPES, {})
    rules = graph_rules(traced.graph)
    graph = narrowed(traced.graph, rules, "tpu")
    return graph, traffic(graph, rules, "tpu")


def kept(step: Any, dtype: str, width: int) -> int:
    """How many arrays of heads of one type and width are in memory, of those that the forward pass makes."""
    graph, found = crossing(step)
    forward = max(op.index for op in graph.ops if op.primitive == "exp")
    return sum(
        found.stored[v] and graph.values[v].shape == (16, TOKENS, HEADS, width) and graph.values[v].dtype == dtype
        for op in graph.ops[:forward]
        for v in op.results
    )


@pytest.mark.parametrize(("apart", "wide"), [(False, 2 * LAYERS), (True, 0)])
def test_what_is_normalised_by_heads_is_kept_in_f32(apart: bool, wide: int) -> None:
    assert kept(step_of(norm=True, apart=apart), "float32", DIM // HEADS) == wide
    assert kept(step_of(apart=apart), "float32", DIM // HEADS) == 0


def test_halves_are_kept_for_the_products() -> None:
    assert kept(step_of(put_together), "bfloat16", DIM // HEADS // 2) == 4 * LAYERS
    assert kept(step_of(exchanged), "bfloat16", DIM // HEADS // 2) == 4 * LAYERS


def test_what_is_exchanged_is_kept_and_not_what_is_made_of_it() -> None:
    graph, found = crossing(step_of(exchanged))
    products = {op.results[0] for op in graph.ops if op.primitive == "dot_general"}
    whole = [op for op in graph.ops if op.primitive == "reshape" and products & {*op.operands}]
    sliced = [op for op in whole if any(graph.ops[r].primitive == "slice" for r, _ in graph.uses()[op.results[0]])]
    assert len(sliced) == 2 * LAYERS and all(found.stored[op.results[0]] for op in sliced)
    turned = [op.results[0] for op in graph.ops if op.primitive == "concatenate"]
    assert turned and not any(found.stored[v] for v in turned)


@pytest.mark.parametrize(
    ("step", "halves", "wide"),
    [
        (step_of(put_together, norm=True), 2 * LAYERS, 1),
        (step_of(put_together), 2 * LAYERS, 0),
        (step_of(put_together, heads=16), 0, 0),  # 64 columns fill no lanes
        (step_of(put_together, apart=True), 0, 0),
        (step_of(exchanged, norm=True), 0, 0),
    ],
)
def test_halves_in_lanes(step: Any, halves: int, wide: int) -> None:
    graph, found = crossing(step)
    lying = [*halves_in_lanes(graph, graph.producers())]
    assert [len(one.wide) for one in lying] == [wide] * halves
    for part in (part for one in lying for part in one.parts):
        assert found.rows[part] == frozenset({len(graph.values[part].shape) - 1})


BROAD = pytest.mark.aot_broad


@pytest.mark.aot_tpu
@pytest.mark.parametrize(
    ("step", "target"),
    [
        # on v5e gaps between buffers decide of steps as small
        (step_of(norm=True), "tpu-v5p:2x2x2"),
        pytest.param(step_of(put_together), "tpu-v5p:2x2x2", marks=BROAD),
        pytest.param(step_of(exchanged, norm=True), "tpu-v5e:2x4", marks=BROAD),
        pytest.param(step_of(put_together, norm=True), "tpu-v6e:2x4", marks=BROAD),
        pytest.param(step_of(exchanged, norm=True), "tpu-v6e:2x4", marks=BROAD),
    ],
)
def test_the_compiled_step_takes_as_much(step: Any, target: str) -> None:
    mesh = jaxplan.target(target).mesh(data=8)
    options = {"search": "data", "compare_templates": False}
    sharded = jaxplan.auto_shard(step, mesh, donate_argnums=0, hardware=target.split(":")[0], options=options)
    planned = sharded.plan(*SHAPES).cost.peak_bytes
    compiled = compiled_memory(sharded.lower(*SHAPES).compile()).peak_bytes
    assert planned == pytest.approx(compiled, rel=0.05)
