"""Attention on GPU outside of loops: the softmax is kept for the values' gradient, which runs late."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxplan
from jaxplan.cost import Traffic, traffic
from jaxplan.hardware import compile_for
from jaxplan.ir import Graph, trace
from jaxplan.lowering import compiled_memory
from jaxplan.sharding import graph_rules

LAYERS, BATCH, TOKENS, WIDTH, DIM, HEADS = 3, 32, 512, 64, 512, 8
BF16, F32 = jnp.bfloat16, jnp.float32


def of(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def step(weights: Any, x: jax.Array) -> Any:
    def loss(weights: Any) -> jax.Array:
        embedding, *layers = weights
        h = x @ embedding.astype(x.dtype)
        for layer in layers:
            q, k, v = (jnp.einsum("btm,mhd->bthd", h, layer[name].astype(BF16)) for name in "qkv")
            h = h + jnp.einsum("bthd,hdm->btm", jax.nn.dot_product_attention(q, k, v), layer["o"].astype(BF16))
        return jnp.mean(jnp.square(h.astype(F32)))

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def shapes(keys: int) -> tuple[Any, Any]:
    """Of attention with so many heads of keys and values."""
    layer = {"q": of(DIM, HEADS, WIDTH), "k": of(DIM, keys, WIDTH), "v": of(DIM, keys, WIDTH),
             "o": of(HEADS, WIDTH, DIM)}  # fmt: skip
    return [of(DIM, DIM), *[layer] * LAYERS], of(BATCH, TOKENS, DIM, dtype=BF16)


def planned(keys: int) -> tuple[Graph, Traffic]:
    graph = trace(step, shapes(keys), {}).graph
    return graph, traffic(graph, graph_rules(graph), "gpu")


def softmaxes(graph: Graph, dtype: str) -> list[int]:
    """Values as large as the scores."""
    size = BATCH * HEADS * TOKENS**2
    return [
        v
        for op in graph.ops
        for v in op.results
        if graph.values[v].dtype == dtype and graph.values[v].bytes == size * graph.values[v].item_bytes
    ]


@pytest.mark.parametrize("keys", [8, 2])
def test_a_softmax_made_by_rows_is_kept_for_both_products(keys: int) -> None:
    """Two queries a key: `vmap` over them left 11.5 % of a Llama's memory out (1742 MB compiled for H100)."""
    graph, crossing = planned(keys)
    read_twice = [v for v in softmaxes(graph, "bfloat16") if len(graph.uses()[v]) > 1 and crossing.stored[v]]
    assert len(read_twice) == LAYERS
    assert not set(read_twice) & crossing.apart.keys()


def test_the_scores_gradient_lies_as_the_scores_do() -> None:
    graph, crossing = planned(2)
    assert not set(softmaxes(graph, "float32")) & crossing.apart.keys()


@pytest.mark.parametrize("keys", [8, 2])
def test_the_values_gradient_waits_for_the_scores(keys: int) -> None:
    graph, crossing = planned(keys)
    for value in (v for v in softmaxes(graph, "bfloat16") if crossing.stored[v] and len(graph.uses()[v]) > 1):
        late = max(op for op, _ in graph.uses()[value])
        assert graph.ops[late].primitive == "dot_general"
        assert crossing.times[late] > late + 1
        scores = [op.index for op in graph.ops[late:] if op.primitive == "mul" and op.index < crossing.times[late]]
        assert scores


@pytest.mark.aot_gpu
@pytest.mark.usefixtures("cuda_compiler")
@pytest.mark.parametrize("keys", [8, 2])
def test_compiled_for_gpu_the_step_takes_as_much(keys: int) -> None:
    mesh = jaxplan.target("h100:1x1x8").mesh(data=8)
    sharded = jaxplan.auto_shard(step, mesh, donate_argnums=0, hardware="h100")
    arguments = shapes(keys)
    predicted = sharded.plan(*arguments).cost.peak_bytes
    compiled = compiled_memory(sharded.lower(*arguments).compile()).peak_bytes
    assert compiled < 1.05 * predicted
    if jax.__version_info__ < (0, 11):  # XLA of jax 0.12 computes some of them at once: 17 % are too much there
        assert predicted < 1.05 * compiled


def attending(scores: str, product: str, converted: bool) -> Any:
    """SGD of layers of attention in bf16, `scores` by queries and keys, whose softmax is made in f32."""

    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            h = x
            for w in weights:
                q = jnp.einsum("btd,dnh->btnh", h, w["q"])
                k = h @ w["k"] if "bsh" in product else jnp.einsum("btd,dnh->btnh", h, w["k"])
                made = jnp.einsum(f"{product}->{scores}", q, k)
                made = jax.nn.softmax(made.astype(F32) if converted else made, scores.index("s")).astype(BF16)
                h = h + jnp.einsum(f"{scores},{product.split(',')[1]}->btnh", made, k).reshape(x.shape) @ w["o"]
            return jnp.mean(jnp.square(h.astype(F32)))

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    return step


def attended(product: str) -> tuple[Any, Any]:
    keys = (DIM, WIDTH) if "bsh" in product else (DIM, HEADS, WIDTH)
    layer = {"q": of(DIM, HEADS, WIDTH, dtype=BF16), "k": of(*keys, dtype=BF16), "o": of(DIM, DIM, dtype=BF16)}
    return [layer] * LAYERS, of(BATCH, TOKENS, DIM, dtype=BF16)


FORMS = {"bnts": "btnh,bsnh", "btns": "btnh,bsnh", "bths one key": "btnh,bsh"}


@pytest.mark.parametrize(
    ("form", "converted", "late"),
    [("bnts", True, True), ("btns", True, False), ("bths one key", True, True), ("bnts", False, False)],
)
def test_of_bf16_scores_it_waits_where_the_softmax_is_made_by_rows(form: str, converted: bool, late: bool) -> None:
    scores, product = form.split()[0].replace("h", "n"), FORMS[form]
    graph = trace(attending(scores, product, converted), attended(product), {}).graph
    times = traffic(graph, graph_rules(graph), "gpu").times
    of_softmax = 10  # operations that its derivative is, at least
    waiting = [op for op in graph.ops if op.primitive == "dot_general" and times[op.index] >= op.index + of_softmax]
    assert len(waiting) == LAYERS * late


@pytest.mark.aot_gpu
@pytest.mark.usefixtures("cuda_compiler")
@pytest.mark.parametrize("form", ["bnts", "btns", "bths one key"])
def test_compiled_for_gpu_attention_takes_as_much(form: str) -> None:
    scores, product = form.split()[0].replace("h", "n"), FORMS[form]
    mesh = jaxplan.target("h100:1x1x8").mesh(data=8)
    sharded = jaxplan.auto_shard(
        attending(scores, product, True), mesh, donate_argnums=0, hardware="h100", options={"search": "data"}
    )
    predicted = sharded.plan(*attended(product)).cost.peak_bytes
    compiled = compiled_memory(compile_for(sharded.lower(*attended(product)), mesh)).peak_bytes
    assert 0.95 * compiled < predicted < 1.06 * compiled
