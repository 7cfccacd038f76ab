"""Attention of queries and keys in f32 on TPU v6e: what is there of its scores for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxplan
from jaxplan.cost import traffic
from jaxplan.cost.kept_scores import kept_scores
from jaxplan.hardware import compile_for, load_profile
from jaxplan.ir import lives_of, trace
from jaxplan.lowering import compiled_memory
from jaxplan.sharding import NONE, graph_rules

DIM, HEADS, LAYERS = 512, 8, 3
F32, BF16 = jnp.float32, jnp.bfloat16


def step_of(kind: str) -> Callable[..., Any]:
    """`kind`: what happens to scores: nothing ("plain"), nothing is added to them ("unmasked"), they are "scaled" or
    "masked", their layer is computed again ("remat"), they are f32 though their softmax is not ("rounded"), and a mask
    is "added" to such."""

    def layer(x: jax.Array, w: Any) -> jax.Array:
        q, k, v = (jnp.einsum("btm,mhd->bthd", x, w[n].astype(x.dtype)) for n in "qkv")
        if kind in ("rounded", "added"):
            q, k = q.astype(F32), k.astype(F32)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q if kind == "scaled" else q / 8, k)
        if kind == "scaled":
            scores = scores / 8
        elif kind == "masked":
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -1e9)
        elif kind == "added":
            scores = scores + jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), 0, -1e9)
        elif kind == "unmasked":
            scores = scores + jnp.array(0.0)
        return x + jnp.einsum("bhqk,bkhd,hdm->bqm", jax.nn.softmax(scores).astype(x.dtype), v, w["o"].astype(x.dtype))

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for w in weights:
            x = (jax.checkpoint(layer) if kind == "remat" else layer)(x, w)
        return jnp.mean(jnp.square(x.astype(F32)))

    return lambda weights, x: jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))


def shapes(batch: int, tokens: int, dtype: Any = F32) -> tuple[Any, Any]:
    heads = (DIM, HEADS, DIM // HEADS)
    layer = {n: jax.ShapeDtypeStruct(heads, F32) for n in "qkv"} | {"o": jax.ShapeDtypeStruct((*heads[1:], DIM), F32)}
    return [layer] * LAYERS, jax.ShapeDtypeStruct((batch, tokens, DIM), dtype)


@pytest.mark.parametrize(
    ("kind", "dtype", "count"),
    [("plain", F32, LAYERS), ("unmasked", F32, LAYERS), ("scaled", F32, 0), ("masked", F32, 0), ("remat", F32, 0),
     ("plain", BF16, 0), ("rounded", BF16, 0)],
)  # fmt: skip
def test_which_scores_are_kept_beside_arguments(kind: str, dtype: Any, count: int) -> None:
    graph = trace(step_of(kind), shapes(8, 256, dtype), {}).graph
    crossing = traffic(graph, graph_rules(graph), "tpu")
    values = {v: np.array([NONE]) for v in range(len(graph.values))}
    lives = lives_of(graph, crossing.stored, crossing.times)
    found = [*kept_scores(graph, (("data", 1),), crossing.stored, crossing.times, lives, values, crossing.rows)]
    assert [size for _, _, size in found] == [4 * 8 * HEADS * 256 * 256] * count


def test_scores_beside_arguments_lie_in_whole_tiles() -> None:
    """48 keys take the lanes of 128; no other dimension may, for the batches of a product lie in no tile."""
    graph = trace(step_of("plain"), shapes(128, 48), {}).graph
    crossing = traffic(graph, graph_rules(graph), "tpu")
    values = {v: np.array([NONE]) for v in range(len(graph.values))}
    lives = lives_of(graph, crossing.stored, crossing.times)
    found = [*kept_scores(graph, (("data", 1),), crossing.stored, crossing.times, lives, values, crossing.rows)]
    assert [size for _, _, size in found] == [4 * 128 * HEADS * 48 * 128] * LAYERS


@pytest.mark.parametrize(("kind", "rounded"), [("added", LAYERS), ("rounded", 0)])
def test_a_softmax_is_rounded_of_scores_of_f32_that_a_mask_is_added_to(kind: str, rounded: int) -> None:
    graph = trace(step_of(kind), shapes(8, 256, BF16), {}).graph
    shared = traffic(graph, graph_rules(graph), "tpu").shared
    size = (8, HEADS, 256, 256)
    assert sum(one.rounded for one in shared if graph.values[one.value].shape == size) == rounded


def test_which_chips_keep_scores() -> None:
    assert [load_profile(f"tpu-{name}").keeps_scores for name in ("v5e", "v5p", "v6e")] == [0, 0, 1]


@pytest.mark.aot_tpu
@pytest.mark.parametrize(
    ("kind", "dtype", "batch", "tokens"), [("plain", F32, 1024, 256), ("added", BF16, 64, 1024)]
)
def test_compiled_for_tpu_the_step_takes_as_much(
    kind: str, dtype: Any, batch: int, tokens: int, tpu_topology: Callable[[str], Any]
) -> None:
    target = jaxplan.target("tpu-v6e:2x4")
    mesh, arguments = target.mesh(data=8), shapes(batch, tokens, dtype)
    sharded = jaxplan.auto_shard(step_of(kind), mesh, donate_argnums=0, options={"search": "data"})
    predicted = sharded.plan(*arguments).cost.peak_bytes
    compiled = compiled_memory(compile_for(sharded.lower(*arguments), mesh, target.compiler_options)).peak_bytes
    assert 0.95 * compiled < predicted < 1.1 * compiled
