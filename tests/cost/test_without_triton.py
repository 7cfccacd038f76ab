"""Attention whose sequences or heads XLA for GPU finds no tiles for: which that is, and what cuBLAS takes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxplan
from jaxplan.cost import traffic
from jaxplan.cost.cut_products import kept_whole
from jaxplan.cost.split_k import workspace_bytes
from jaxplan.cost.without_triton import may_be_without_triton, without_triton
from jaxplan.hardware import compile_for, load_profile
from jaxplan.ir import Graph, trace
from jaxplan.lowering import compiled_memory
from jaxplan.sharding import NONE, graph_rules

F32, BF16 = jnp.float32, jnp.bfloat16
HEADS, LAYERS = 4, 3


def normalised(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def heads_of(x: jax.Array, w: jax.Array, form: str) -> Any:
    """Queries, keys and values by one product: moved to the front, split as heads, or of products of their own."""
    if form == "moved":
        return jnp.moveaxis(jnp.einsum("btd,dchk->btchk", x, w), 2, 0)
    if form == "split":
        whole = x @ w.reshape(w.shape[0], -1)
        return jnp.split(whole.reshape(*x.shape[:2], 3 * w.shape[2], w.shape[3]), 3, 2)
    return [jnp.einsum("btd,dhk->bthk", x, w[:, i]) for i in range(3)]


def attended(q: jax.Array, k: jax.Array, v: jax.Array, scores: str) -> jax.Array:
    if scores == "library":
        return jax.nn.dot_product_attention(q, k, v)
    if scores == "in place":  # heads are transposed back by the program
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        return (jax.nn.softmax(q @ k.swapaxes(2, 3), -1) @ v).swapaxes(1, 2)
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->" + scores, q, k) / 8, scores.index("s"))
    return jnp.einsum(scores + ",bshd->bthd", weights, v)


def step_of(form: str = "moved", scores: str = "bhts", relu: bool = False) -> Any:
    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            h = x
            for w in weights:
                made = attended(*heads_of(normalised(h), w["qkv"], form), scores)
                h = h + made.reshape(x.shape) @ w["o"]
                if relu:
                    h = h + jax.nn.relu(normalised(h) @ w["up"] + w["bias"]) @ w["down"]
            return jnp.mean(jnp.square(h.astype(F32)))

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    return step


def shapes(batch: int, tokens: int, width: int = 32, dtype: Any = F32, heads: int = HEADS) -> tuple[Any, Any]:
    dim = heads * width
    layer = {"qkv": (dim, 3, heads, width), "o": (dim, dim), "up": (dim, 4 * dim), "bias": (4 * dim,)}
    layer |= {"down": (4 * dim, dim)}
    weights = [{name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in layer.items()}] * LAYERS
    return weights, jax.ShapeDtypeStruct((batch, tokens, dim), dtype)


def rows_of(graph: Graph) -> dict[tuple[int, int], np.ndarray]:
    return {(op.index, place): np.array([NONE]) for op in graph.ops for place in range(len(op.operands))}


@pytest.mark.parametrize(
    ("tokens", "width", "without"),
    [(200, 32, True), (197, 32, True), (12, 32, True), (208, 32, False), (8, 32, False), (4, 32, False)]
    + [(64, 24, True), (64, 12, True), (64, 72, True), (64, 16, False), (64, 8, False), (64, 4, False)],
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_tile_is_whole_tokens_and_columns_of_a_head(tokens: int, width: int, without: bool, dtype: Any) -> None:
    """As XLA compiled them for H100, A100 and B200."""
    graph = trace(step_of(), shapes(64, tokens, width, dtype), {}).graph
    assert may_be_without_triton(graph) is without


@pytest.mark.parametrize(
    ("scores", "without"),
    [("bhts", True), ("library", True), ("in place", False), ("bths", False), ("btsh", False)],
)
def test_what_the_program_transposes_by_itself_has_tiles(scores: str, without: bool) -> None:
    graph = trace(step_of("apart", scores), shapes(64, 200), {}).graph
    assert may_be_without_triton(graph) is without


@pytest.mark.parametrize(("batch", "without"), [(2, False), (8, True)])
def test_a_product_in_parts_has_tiles(batch: int, without: bool) -> None:
    graph = trace(step_of(), shapes(batch, 200, 64, heads=8), {}).graph
    found = without_triton(graph, (("data", 1),), rows_of(graph), load_profile("h100"))
    assert may_be_without_triton(graph)
    assert found is without
    assert not without_triton(graph, (("data", 1),), rows_of(graph), load_profile("tpu-v5e"))


@pytest.mark.parametrize(
    ("form", "scores", "tokens", "dtype", "thirds"),
    # queries and values beside the whole; nothing where a kernel copies queries with keys; values, and padded keys
    [("moved", "bhts", 208, F32, 0), ("split", "bhts", 208, F32, 2), ("split", "library", 208, BF16, 2)]
    + [("moved", "bhts", 200, F32, 2), ("split", "bhts", 200, F32, 0), ("split", "bhts", 257, BF16, 0)]
    + [("apart", "bhts", 200, F32, 2), ("split", "library", 200, BF16, 1), ("split", "library", 257, BF16, 2)],
)
def test_the_whole_is_kept_for_a_copy_that_is_made_late(
    form: str, scores: str, tokens: int, dtype: Any, thirds: int
) -> None:
    graph = trace(step_of(form, scores), shapes(16, tokens, dtype=dtype), {}).graph
    crossing = traffic(graph, graph_rules(graph), "gpu")
    values = {v: np.array([NONE]) for v in range(len(graph.values))}
    found = [*kept_whole(graph, (("data", 1),), crossing, crossing.lives, values, rows_of(graph), tokens % 16 > 0)]
    last = max(op.index for op in graph.ops if op.primitive == "exp")
    at = [op.index for op in graph.ops[last:] if op.primitive == "dot_general"][1]  # the last layer's output
    third = jnp.dtype(dtype).itemsize * 16 * tokens * HEADS * 32
    assert sum(size for start, stop, size in found if start <= at < stop) == LAYERS * thirds * third


@pytest.mark.parametrize("tokens", [200, 208])
def test_cublas_reads_relus_that_are_there(tokens: int) -> None:
    graph = trace(step_of(relu=True), shapes(16, tokens), {}).graph
    stored = traffic(graph, graph_rules(graph), "gpu").stored
    relus = [op.results[0] for op in graph.ops if op.primitive == "max"]
    wide = [v for v in relus if graph.values[v].shape == (16, tokens, 4 * HEADS * 32)]
    assert len(wide) == LAYERS
    assert [stored[v] for v in wide] == [tokens == 200] * LAYERS


def test_workspaces_are_the_library_s() -> None:
    assert workspace_bytes(load_profile("h100")) == 2**25
    assert workspace_bytes(load_profile("a100-80")) == 2**22


@pytest.mark.aot_gpu
@pytest.mark.usefixtures("cuda_compiler")
@pytest.mark.parametrize(
    ("form", "scores", "tokens", "dtype"),
    [("moved", "bhts", 200, F32), ("apart", "bhts", 197, F32), ("split", "bhts", 208, F32),
     ("split", "library", 257, BF16)],
)  # fmt: skip
def test_compiled_for_gpu_the_step_takes_as_much(form: str, scores: str, tokens: int, dtype: Any) -> None:
    step, arguments = step_of(form, scores, relu=True), shapes(128, tokens, 64, dtype, heads=8)
    mesh = jaxplan.target("h100:1x1x8").mesh(data=8)
    sharded = jaxplan.auto_shard(step, mesh, donate_argnums=0, hardware="h100", options={"search": "data"})
    predicted = sharded.plan(*arguments).cost.peak_bytes
    compiled = compile_for(sharded.lower(*arguments), mesh)
    assert ("__cublas" in compiled.as_text()) is bool(tokens % 16)
    assert 0.95 * compiled_memory(compiled).peak_bytes < predicted < 1.06 * compiled_memory(compiled).peak_bytes
