"""Dropout of a softmax that is rounded: its random mask is a kernel of its own on TPU v5e, for all that XLA joins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxplan
from jaxplan.ir import trace
from jaxplan.lowering import compiled_memory
from jaxplan.sharding import registered

BATCH, HEADS, TIME, DIM = 8, 4, 1024, 64
S = jax.ShapeDtypeStruct


def dropped(x: Any, key: Any, shape: tuple[int, ...]) -> Any:
    return jax.lax.select(jnp.broadcast_to(jax.random.bernoulli(key, 0.9, shape), x.shape), x / 0.9, jnp.zeros_like(x))


def attention(
    softmax: Callable[..., Any] = jax.nn.softmax, dtype: Any = jnp.bfloat16, shape: tuple[int, ...] | None = None
) -> Callable[..., Any]:
    """A layer with dropout of its scores' softmax in `dtype`, by a mask of `shape`."""

    def layer(p: Any, x: Any, key: Any) -> Any:
        q, k, v = (jnp.reshape(x @ w.astype(x.dtype), (*x.shape[:2], HEADS, DIM)) for w in p)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / DIM**0.5
        a = softmax(scores).astype(dtype)
        a = dropped(a, key, a.shape if shape is None else shape).astype(x.dtype)
        return x + jnp.einsum("bhqk,bkhd->bqhd", a, v).reshape(x.shape)

    return layer


def trained(layer: Callable[..., Any]) -> Callable[..., Any]:
    """An update of the layer, which is computed again."""

    def step(p: Any, x: Any, key: Any) -> Any:
        gradients = jax.grad(lambda p: jnp.mean(jax.checkpoint(layer)(p, x, key).astype(jnp.float32) ** 2))(p)
        return [w - 0.1 * g for w, g in zip(p, gradients, strict=True)]

    return step


def shapes(impl: str = "threefry2x32", batch: int = BATCH, time: int = TIME) -> tuple[Any, ...]:
    weights = [S((HEADS * DIM, HEADS * DIM), jnp.float32)] * 3
    key = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
    return weights, S((batch, time, HEADS * DIM), jnp.bfloat16), key


def by_sums(x: Any) -> Any:
    return jnp.abs(x) / jnp.sum(jnp.abs(x), -1, keepdims=True)


def normalised(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


@pytest.mark.parametrize(
    ("step", "impl", "apart"),
    [
        (attention(), "threefry2x32", 2),  # forward, and again
        (attention(by_sums), "threefry2x32", 2),
        (attention(normalised), "threefry2x32", 0),
        (attention(dtype=jnp.float32), "threefry2x32", 0),
        (attention(shape=(TIME, TIME)), "threefry2x32", 0),
        (attention(), "unsafe_rbg", 0),
    ],
    ids=["softmax", "divided by sums", "layer normalisation", "f32", "smaller mask", "other generator"],
)
def test_which_masks_are_made_by_themselves(step: Callable[..., Any], impl: str, apart: int) -> None:
    def barriers(masks_apart: bool) -> int:
        settings: Any = {"platform": "tpu", "ruled": registered(), "masks_apart": masks_apart}
        graph = trace(trained(step), shapes(impl), {}, **settings).graph
        masks = [v for v in graph.values if v.dtype == "bool" and v.shape == (BATCH, HEADS, TIME, TIME)]
        made = graph.producers()
        return sum(graph.ops[made[v.index]].primitive == "optimization_barrier" for v in masks)

    assert (barriers(True), barriers(False)) == (apart, 0)


def layers(count: int) -> Callable[..., Any]:
    """An update of as many layers, each computed again, with a key of its own."""
    layer = jax.checkpoint(attention())

    def step(p: Any, x: Any, key: Any) -> Any:
        def loss(p: Any) -> Any:
            y = x
            for i in range(count):
                y = layer(p, y, jax.random.fold_in(key, i))
            return jnp.mean(y.astype(jnp.float32) ** 2)

        return [w - 0.1 * g for w, g in zip(p, jax.grad(loss)(p), strict=True)]

    return step


def test_keys_wait_for_what_the_scores_are_multiplied_by() -> None:
    settings: Any = {"platform": "tpu", "ruled": registered(), "masks_apart": True}
    graph = trace(layers(3), shapes(), {}, **settings).graph
    made = graph.producers()
    drawn = [op for op in graph.ops if op.primitive == "random_bits"]
    assert [graph.ops[made[op.operands[0]]].primitive for op in drawn] == ["optimization_barrier"] * 2 * 3
    walls = {op.results[0] for op in graph.ops if op.primitive == "optimization_barrier"}
    assert sum(any(v in walls for v in op.operands) for op in graph.ops if op.primitive == "dot_general") == 2 * 3


def test_a_product_behind_a_layer_waits_for_no_key_of_it() -> None:
    """What the layer makes is no mask, though the layer calls for one."""

    def step(p: Any, x: Any, key: Any) -> Any:
        return jnp.sin(jax.checkpoint(attention())(p, x, key)).astype(jnp.float32) @ p[0]

    settings: Any = {"platform": "tpu", "ruled": registered(), "masks_apart": True}
    graph = trace(step, shapes(), {}, **settings).graph
    walls = {op.results[0] for op in graph.ops if op.primitive == "optimization_barrier"}
    products = [op for op in graph.ops if op.primitive == "dot_general"]
    assert [op for op in products if walls.intersection(op.operands)] == [products[-2]]


@pytest.mark.aot_broad
@pytest.mark.aot_tpu
def test_masks_of_several_layers_are_not_made_at_once() -> None:
    """Four layers' were, in one kernel, before their keys waited (v5e, jax 0.10.2)."""
    mesh = jaxplan.target("tpu-v5e:2x4").mesh(data=8)
    options = {"search": "data", "compare_templates": False}
    sharded = jaxplan.auto_shard(layers(4), mesh, hardware="tpu-v5e", options=options)
    text = sharded.lower(*shapes()).compile().as_text()
    mask = f"pred[1,{HEADS},{TIME},{TIME}]"
    assert mask in text
    kernels = [line.split(" fusion(")[0] for line in text.splitlines() if " fusion(" in line]
    assert max(line.count(mask) for line in kernels) == 1


def test_the_step_computes_the_same(mesh_4x2: Mesh) -> None:
    weights, x, _ = shapes(time=128)
    keys = jax.random.split(jax.random.key(1), 4)
    p = [0.1 * jax.random.normal(key, w.shape) for key, w in zip(keys, weights, strict=False)]
    arguments = p, jax.random.normal(keys[3], x.shape, x.dtype), jax.random.key(2)
    step = trained(attention())
    planned = jaxplan.auto_shard(step, mesh_4x2, hardware="tpu-v5e", options={"compare_templates": False})
    for mine, theirs in zip(planned(*arguments), jax.jit(step)(*arguments), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-2, atol=1e-4)


@pytest.mark.aot_broad
def test_what_xla_makes_of_them_for_tpu() -> None:
    """In one kernel 32 operands of the scores' size, 33.6 MB, would be written for it, and it is refused besides."""
    mesh = jaxplan.target("tpu-v5e:2x2").mesh(d=4)
    scores = BATCH // 4 * HEADS * TIME * TIME * 4

    def compiled(hardware: str) -> Any:
        options = {"search": "data", "compare_templates": False}
        return jaxplan.auto_shard(attention(), mesh, hardware=hardware, options=options).lower(*shapes()).compile()

    assert compiled_memory(compiled("tpu-v5e")).temp_bytes < 8 * scores
    with pytest.raises(jax.errors.JaxRuntimeError, match="vmem"):
        compiled("tpu-v5p")  # another chip's plan keeps them together
