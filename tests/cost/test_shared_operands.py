"""What several products compute of larger arrays: which TPUs have it in memory."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxplan
from jaxplan.cost import narrowed, traffic, written_bytes
from jaxplan.cost.shared_operands import SharedOperand
from jaxplan.hardware import load_profile
from jaxplan.ir import trace
from jaxplan.lowering import compiled_memory
from jaxplan.sharding import NONE, graph_rules

LAYERS, BATCH, WIDTH, DIM = 3, 64, 64, 512
BF16, F32 = jnp.bfloat16, jnp.float32


def of(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def attention(weights: Any, x: jax.Array, *, wide: bool | None) -> jax.Array:
    """As many queries a key as there are heads of queries for heads of keys.

    `wide`: scores in f32, else in bf16; None: in bf16, and converted for their softmax.
    """
    q, k, v = (jnp.einsum("btm,m...d->bt...d", x, weights[name].astype(BF16)) for name in "qkv")
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=F32 if wide else None)
    scores = 0.125 * scores if wide is not None else (0.125 * scores).astype(F32)
    mixed = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores).astype(BF16), v)
    return x + jnp.einsum("btkgd,kgdm->btm", mixed, weights["o"].astype(BF16))


def masked(weights: Any, x: jax.Array, *, wide: bool) -> jax.Array:
    """Groups of queries that share a head of keys, masked in f32; the heads merged."""
    q, k, v = (jnp.einsum("btm,m...d->bt...d", x, weights[name].astype(BF16)) for name in "qkv")
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=F32 if wide else None).astype(F32)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    softmax = jax.nn.softmax(jnp.where(causal, 0.125 * scores, -1e30)).astype(BF16)
    mixed = jnp.einsum("bkgts,bskd->btkgd", softmax, v).reshape(*x.shape[:2], -1)
    return x + mixed @ weights["o"].astype(BF16).reshape(mixed.shape[-1], -1)


def swiglu(weights: Any, x: jax.Array) -> jax.Array:
    up, gate = (x @ weights[name].astype(BF16) for name in "ug")
    return x + (jax.nn.silu(gate) * up) @ weights["d"].astype(BF16)


def attention_weights(heads: int, queries: int) -> Any:
    return {"q": of(DIM, heads, queries, WIDTH), "k": of(DIM, heads, WIDTH), "v": of(DIM, heads, WIDTH),
            "o": of(heads, queries, WIDTH, DIM)}  # fmt: skip


SWIGLU = {"u": of(DIM, 8 * DIM), "g": of(DIM, 8 * DIM), "d": of(8 * DIM, DIM)}


def step_of(block: Any, **options: Any) -> Any:
    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            embedding, *layers = weights
            h = x @ embedding.astype(x.dtype)
            for layer in layers:
                h = block(layer, h, **options)
            return jnp.mean(jnp.square(h.astype(F32)))

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    return step


def shapes_of(weights: Any, tokens: int) -> tuple[Any, Any]:
    return [of(DIM, DIM), *[weights] * LAYERS], of(BATCH * 512 // tokens, tokens, DIM, dtype=BF16)


def shared(step: Any, shapes: Any) -> tuple[Any, Any]:
    traced = trace(step, shapes, {})
    rules = graph_rules(traced.graph)
    graph = narrowed(traced.graph, rules, "tpu")
    return graph, [one for one in traffic(graph, rules, "tpu").shared if one.again is None]


@pytest.mark.parametrize(
    ("step", "weights"),
    [(step_of(attention, wide=True), attention_weights(8, 1)), (step_of(swiglu), SWIGLU)],
)
def test_what_reads_more_than_it_makes_is_shared_by_its_products(step: Any, weights: Any) -> None:
    graph, found = shared(step, shapes_of(weights, 512))
    assert len(found) == LAYERS
    for one in found:
        assert len(one.reads) == 2
        assert {graph.ops[index].primitive for index, _ in one.reads} == {"dot_general"}


def test_of_bf16_scores_the_gradient_is_shared_and_not_the_softmax() -> None:
    graph, found = shared(step_of(attention, wide=False), shapes_of(attention_weights(8, 1), 512))
    forward = max(op.index for op in graph.ops if op.primitive == "exp")
    assert len(found) == LAYERS
    assert all(index > forward for one in found for index, _ in one.reads)


def test_what_is_rounded_of_bf16_scores() -> None:
    graph, found = shared(step_of(attention, wide=None), shapes_of(attention_weights(8, 1), 512))
    forward = max(op.index for op in graph.ops if op.primitive == "exp")
    assert [one.rounded for one in found] == [True] * LAYERS
    assert all(index > forward for one in found for index, _ in one.reads)


@pytest.mark.parametrize(("wide", "turned"), [(True, "masked"), (False, "narrow")])
def test_scores_of_groups_are_transposed(wide: bool, turned: str) -> None:
    graph, found = shared(step_of(masked, wide=wide), shapes_of(attention_weights(2, 4), 512))
    rounded = {op.results[0]: op.operands[0] for op in graph.ops if op.primitive == "convert_element_type"}
    quotients = {op.results[0] for op in graph.ops if op.primitive == "div"}
    softmaxes = [one for one in found if rounded.get(one.value) in quotients]
    assert [(one.turned, one.rounded) for one in softmaxes] == [(turned, False)] * LAYERS
    assert all(one.rounded is not wide for one in found if one not in softmaxes)


def test_nothing_is_shared_in_a_loop() -> None:
    def step(weights: Any, x: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer(h: jax.Array, layer: Any) -> Any:
            return attention(layer, h, wide=True), None

        return jnp.mean(jnp.square(jax.lax.scan(layer, x, weights)[0].astype(F32)))

    weights = {name: of(LAYERS, *w.shape) for name, w in attention_weights(8, 1).items()}
    _, found = shared(jax.grad(step), (weights, of(BATCH, 512, DIM, dtype=BF16)))
    assert not found


def written(
    hardware: str, queries: int, heads: int, tokens: int, width: int, batch: int, *, first: bool = False,
    rounded: bool = False,
) -> bool:  # fmt: skip
    """Whether the product with the values has its softmax in memory.

    `first`: of `vmap` over the queries of a key; `rounded`: it is computed in f32 of arrays in bf16.
    """

    def product(softmax: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.einsum("gbkts,bskd->gbtkd" if first else "bkgts,bskd->btkgd", softmax, v)

    scores = (queries, batch, heads) if first else (batch, heads, queries)
    shapes = of(*scores, tokens, tokens, dtype=BF16), of(batch, tokens, heads, width, dtype=BF16)
    graph = trace(product, shapes, {}).graph
    (op,) = (op for op in graph.ops if op.primitive == "dot_general")
    place = [graph.values[v].shape[-1] for v in op.operands].index(tokens)
    whole = np.full((1, 1), NONE, np.int8)
    one = SharedOperand(op.operands[place], ((op.index, place),), rounded)
    size = written_bytes(graph, (("data", 1),), load_profile(hardware), one, [[whole] * 3])
    lanes = math.ceil(tokens / 128) * 128
    assert int(size[0]) in (0, batch * heads * queries * tokens * lanes * 2)
    return bool(size[0])


@pytest.mark.parametrize(
    ("hardware", "sizes", "there"),
    [
        # queries a key, heads of keys, tokens, width, sequences: as compiled, see the module
        ("tpu-v5p", (1, 8, 384, 128, 32), True),
        ("tpu-v5p", (1, 8, 256, 96, 32), False),
        ("tpu-v5p", (4, 4, 256, 128, 32), True),
        ("tpu-v5p", (1, 4, 640, 256, 16), False),
        ("tpu-v6e", (2, 8, 2048, 128, 2), False),
        ("tpu-v6e", (8, 1, 1536, 128, 2), True),
        ("tpu-v6e", (1, 8, 3072, 128, 2), False),
        ("tpu-v6e", (1, 8, 4096, 128, 1), True),
        ("tpu-v6e", (1, 4, 4096, 128, 2), False),
        ("tpu-v7x", (1, 8, 256, 128, 32), True),
        ("tpu-v7x", (1, 8, 2048, 128, 2), True),
        ("tpu-v5e", (1, 4, 8192, 128, 2), False),
        ("tpu-v5e", (8, 1, 4096, 128, 1), False),
    ],
)
def test_from_what_ratio_on(hardware: str, sizes: tuple[int, ...], there: bool) -> None:
    assert written(hardware, *sizes) == there


@pytest.mark.parametrize(
    ("sizes", "there"), [((2, 8, 2048, 128, 2), True), ((4, 4, 1536, 128, 4), True), ((4, 4, 1024, 128, 8), False)]
)
def test_queries_of_a_key_that_come_first(sizes: tuple[int, ...], there: bool) -> None:
    assert written("tpu-v6e", *sizes, first=True) == there


@pytest.mark.parametrize(
    ("hardware", "sizes", "there"),
    [
        ("tpu-v5p", (1, 6, 256, 128, 32), False),
        ("tpu-v5p", (1, 6, 288, 128, 32), True),
        ("tpu-v6e", (1, 6, 512, 128, 32), False),
        ("tpu-v6e", (1, 6, 640, 128, 24), True),
        ("tpu-v6e", (1, 12, 320, 64, 32), True),
        ("tpu-v5e", (1, 4, 4096, 64, 1), False),
    ],
)
def test_what_is_rounded_is_written_sooner(hardware: str, sizes: tuple[int, ...], there: bool) -> None:
    assert written(hardware, *sizes, rounded=True) == there


BROAD = pytest.mark.aot_broad
"""Half a minute and more each."""


@pytest.mark.aot_tpu
@pytest.mark.parametrize(
    ("step", "weights", "tokens", "target", "close"),
    [
        (step_of(attention, wide=None), attention_weights(4, 4), 1024, "tpu-v5p:2x2x2", 0.03),
        pytest.param(
            step_of(attention, wide=None), attention_weights(4, 4), 1024, "tpu-v6e:2x4", 0.03, marks=BROAD
        ),
        pytest.param(
            step_of(attention, wide=True), attention_weights(8, 1), 1024, "tpu-v5p:2x2x2", 0.06, marks=BROAD
        ),
        (step_of(masked, wide=False), attention_weights(2, 4), 2048, "tpu-v5e:2x4", 0.04),
        pytest.param(
            step_of(masked, wide=False), attention_weights(2, 4), 2048, "tpu-v5p:2x2x2", 0.04, marks=BROAD
        ),
        pytest.param(
            step_of(masked, wide=False), attention_weights(2, 4), 2048, "tpu-v6e:2x4", 0.04, marks=BROAD
        ),
        pytest.param(step_of(masked, wide=True), attention_weights(2, 4), 2048, "tpu-v6e:2x4", 0.04, marks=BROAD),
        (step_of(swiglu), SWIGLU, 1024, "tpu-v5p:2x2x2", 0.06),
        pytest.param(
            step_of(attention, wide=True), attention_weights(4, 4), 2048, "tpu-v6e:2x4", 0.06, marks=BROAD
        ),
    ],
)
def test_the_compiled_step_takes_as_much(step: Any, weights: Any, tokens: int, target: str, close: float) -> None:
    mesh = jaxplan.target(target).mesh(data=8)
    sharded = jaxplan.auto_shard(step, mesh, donate_argnums=0, hardware=target.split(":")[0])
    shapes = shapes_of(weights, tokens)
    planned = sharded.plan(*shapes).cost.peak_bytes
    compiled = compiled_memory(sharded.lower(*shapes).compile()).peak_bytes
    assert planned == pytest.approx(compiled, rel=close)
