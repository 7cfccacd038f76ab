"""In which type values are held and sent on TPU: what is predicted of small programs, against what is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh

import jaxplan
from jaxplan.cost import narrowed, traffic
from jaxplan.inspection.matching import compiled_parts, planned_parts
from jaxplan.ir import Graph, trace
from jaxplan.lowering import compiled_collectives
from jaxplan.sharding import graph_rules


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def held(step: Callable[..., Any], *shapes: Any, platform: str = "tpu") -> Graph:
    graph = trace(step, shapes, {}).graph
    return narrowed(graph, graph_rules(graph), platform)


def made_by(graph: Graph, primitive: str) -> list[str]:
    """The types of the floats that operations of one kind make."""
    values = [graph.values[v] for op in graph.ops if op.primitive == primitive for v in op.results]
    return [value.dtype for value in values if value.shape and "float" in value.dtype]


X, W = f32(64, 32), f32(32, 32)


def test_what_only_products_read_is_held_in_bf16() -> None:
    graph = held(lambda x, w: jnp.sum(jnp.tanh(x) @ w), X, W)
    assert made_by(graph, "tanh") == ["bfloat16"]
    assert made_by(graph, "dot_general") == ["float32"]  # the sum reads it
    weight = graph.inputs[1]
    assert graph.values[weight].dtype == "float32"  # an argument stays what it is
    assert graph.taken(weight, graph.uses()[weight]).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("product", "other"),
    [
        ("bk,k->b", f32(32)),  # of rows and a vector
        ("bk,kn->bn", f32(32, 1)),  # ... that is a column
        ("bk,bsk->bs", f32(64, 16, 32)),  # one query a row, and a cache
        ("bk,bsqk->bsq", f32(64, 16, 1, 32)),
    ],
)
def test_products_with_a_vector_round_nothing(product: str, other: jax.ShapeDtypeStruct) -> None:
    graph = held(lambda x, y: jnp.sum(jnp.einsum(product, jnp.tanh(x), jnp.cos(y))), X, other)
    assert made_by(graph, "tanh") == made_by(graph, "cos") == ["float32"]


def test_a_cache_that_single_queries_read_is_carried_in_f32() -> None:
    def step(cache: Any, queries: Any) -> Any:
        def one(cache: Any, query: Any) -> Any:
            cache = jax.lax.dynamic_update_index_in_dim(cache, query[:, None], 3, 1)
            return cache, jnp.einsum("bk,bsk->bs", query, cache)

        return jax.lax.scan(one, jnp.cos(cache), queries)[1]

    assert made_by(held(step, f32(64, 16, 32), f32(4, 64, 32)), "dynamic_update_slice") == ["float32"]


@pytest.mark.parametrize(
    "precision", ["highest", "high", "float32", ("default", "highest"), jax.lax.DotAlgorithmPreset.F32_F32_F32]
)
def test_products_of_more_than_default_precision_round_nothing(precision: Any) -> None:
    graph = held(lambda x, w: jnp.sum(jnp.dot(jnp.tanh(x), w, precision=precision)), X, W)
    assert made_by(graph, "tanh") == ["float32"]


def test_the_default_precision_is_the_one_that_holds_where_a_step_is_traced() -> None:
    def step(x: Any, w: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return jnp.sum(jnp.tanh(x) @ w)

    assert made_by(held(step, X, W), "tanh") == ["float32"]


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_other_platforms_keep_the_programs_types(platform: str) -> None:
    graph = held(lambda x, w: jnp.tanh(x) @ w, X, W, platform=platform)
    assert made_by(graph, "tanh") == ["float32"] and not graph.narrow_reads


def test_what_a_products_kernel_sums_for_a_bias_is_written_for_other_products() -> None:
    """bf16[65536, 2048], whose sum the kernel of the product takes in f32: 3195 MB, where 3465 were told (v5e)."""

    def step(x: Any, w: Any) -> Any:
        hidden = jnp.tanh(x @ w)
        return jnp.sum(hidden @ w), hidden.sum(0)

    assert made_by(held(step, X, W), "tanh") == ["bfloat16"]
    apart = held(lambda x, w: (lambda t: (jnp.sum(t @ w), t.sum(0)))(jnp.tanh(x)), X, W)
    assert made_by(apart, "tanh") == ["float32"]


def test_what_anybody_else_reads_stays_as_it_is() -> None:
    both = held(lambda x, w: (lambda t: (jnp.sum(t @ w), jnp.sum(t)))(jnp.tanh(x)), X, W)
    assert made_by(both, "tanh") == ["float32"]
    returned = held(lambda x, w: (lambda t: (jnp.sum(t @ w), t))(jnp.tanh(x)), X, W)
    assert made_by(returned, "tanh") == ["float32"]


def test_movement_and_choice_are_seen_through_and_arithmetic_is_not() -> None:
    moved = held(lambda x, w: jnp.sum(jnp.maximum(jnp.tanh(x).T.reshape(64, 32)[::-1], 0) @ w), X, W)
    assert made_by(moved, "tanh") == ["bfloat16"]
    computed = held(lambda x, w: jnp.sum((jnp.tanh(x) * 2) @ w), X, W)
    assert made_by(computed, "tanh") == ["float32"] and made_by(computed, "mul") == ["bfloat16"]


def test_loops_stack_residuals_in_the_type_of_their_readers() -> None:
    def loss(weights: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda h, w: (h + jnp.tanh((h * 2) @ w), None), x, weights)[0])

    graph = held(lambda w, x: jax.grad(loss)(w, x), f32(4, 32, 32), X)
    # the carry stays; of the residuals the product's operand is narrow, what tanh's derivative reads is not
    assert sorted(made_by(graph, "scan_stack"))[:2] == ["bfloat16", "float32"]
    assert "float32" in made_by(graph, "carry_init")
    slices = [graph.values[op.results[0]] for op in graph.ops if op.primitive == "scan_slice"]
    assert {v.dtype for v in slices if v.shape == (32, 32)} == {"bfloat16"}  # one layer's weights


def test_a_carry_is_narrow_if_its_loop_and_what_follows_only_multiply_it() -> None:
    def step(x: Any, w: Any, last: bool) -> Any:
        h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=4)
        return jnp.sum(h @ w if last else h)

    assert made_by(held(lambda x, w: step(x, w, True), X, W), "carry_init") == ["bfloat16"]
    assert made_by(held(lambda x, w: step(x, w, False), X, W), "carry_init") == ["float32"]


def test_sums_of_what_is_narrow_are_taken_in_f32() -> None:
    value = held(lambda x, w: jnp.sum(jnp.tanh(x) @ w), X, W).values[2:]
    (tanh,) = [v for v in value if v.narrowed]
    assert tanh.bytes == 64 * 32 * 2
    assert [tanh.as_sent(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce")] == [1, 2, 2]


def mlp(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        y = x
        for first, second in weights:
            y = y + jax.nn.gelu(y @ first) @ second
        return jnp.mean(y**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def scanned(weights: Any, x: Any) -> Any:
    def layer(y: Any, pair: Any) -> Any:
        return y + jax.nn.gelu(y @ pair[0]) @ pair[1], None

    def loss(weights: Any) -> Any:
        return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


@pytest.mark.parametrize(
    ("step", "weights"),
    [(mlp, [(f32(1024, 4096), f32(4096, 1024))] * 3), (scanned, (f32(3, 1024, 4096), f32(3, 4096, 1024)))],
    ids=["unrolled", "scanned"],
)
def test_f32_weights_are_gathered_as_compiled_for_tpu(
    step: Any, weights: Any, tpu_topology: Callable[[str], Any]
) -> None:
    """Under FSDP as many bytes are sent as are compiled, and memory is not short."""
    x = f32(32768, 1024)  # more than vector memory has room for
    mesh = Mesh(np.array(tpu_topology("v5e:2x4").devices), ("data",))
    options: dict[str, Any] = {"search": "fsdp", "compare_templates": False}
    sharded = jaxplan.auto_shard(step, mesh, donate_argnums=(0,), hardware="tpu-v5e", options=options)
    plan = sharded.plan(weights, x)
    compiled = sharded.lower(weights, x).compile()
    axes = (("data", 8),)
    sent = sum(p.wire_bytes(axes) * p.trips for p in compiled_parts(compiled_collectives(compiled.as_text(), axes)))
    planned = sum(p.wire_bytes(axes) * p.trips for p in planned_parts(plan.collectives, axes))
    assert planned == pytest.approx(sent, rel=0.03)
    memory = compiled.memory_analysis()
    peak = (
        memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )  # fmt: skip
    assert 0.95 * peak <= plan.cost.peak_bytes


@pytest.mark.aot_tpu
def test_what_is_scaled_of_a_sum_is_gathered_as_compiled_for_tpu(tpu_topology: Callable[[str], Any]) -> None:
    """In bf16 for a product that reads the sum, too, in f32 pieces as others do: optax's muon, +14 % before."""
    optimizer = optax.contrib.muon(1e-3)

    def step(weights: Any, state: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            w = weights["w"].astype(jnp.bfloat16)
            return jnp.mean((x + jax.nn.relu(x @ w) @ w.T).astype(jnp.float32) ** 2)

        updates, state = optimizer.update(jax.grad(loss)(weights), state, weights)
        return optax.apply_updates(weights, updates), state

    mesh = Mesh(np.array(tpu_topology("v5e:2x4").devices).reshape(4, 2), ("data", "model"))
    weights = {"w": f32(1024, 4096)}
    shapes = weights, jax.eval_shape(optimizer.init, weights), jax.ShapeDtypeStruct((65536, 1024), jnp.bfloat16)
    sharded = jaxplan.auto_shard(step, mesh, donate_argnums=(0, 1), hardware="tpu-v5e")
    plan, axes = sharded.plan(*shapes), (("data", 4), ("model", 2))
    compiled = sharded.lower(*shapes).compile().as_text()
    assert any(c.kind == "all_gather" and "muon" in c.where for c in plan.collectives)
    sent = sum(p.wire_bytes(axes) * p.trips for p in compiled_parts(compiled_collectives(compiled, axes)))
    planned = sum(p.wire_bytes(axes) * p.trips for p in planned_parts(plan.collectives, axes))
    assert planned == pytest.approx(sent, rel=0.01)


def test_more_than_default_precision_gathers_f32() -> None:
    """Twice the bytes of the same weights."""
    mesh, x, weights = AbstractMesh((8,), ("data",)), f32(8192, 1024), [(f32(1024, 4096), f32(4096, 1024))] * 3

    def gathered(precision: str | None) -> float:
        with jax.default_matmul_precision(precision):
            plan = jaxplan.plan(
                mlp, mesh, weights, x, donate_argnums=(0,), hardware="tpu-v5e",
                options={"search": "fsdp", "compare_templates": False},
            )  # fmt: skip
        return sum(c.wire_bytes * c.trips for c in plan.collectives if c.kind == "all_gather")

    assert gathered("highest") == pytest.approx(2 * gathered(None), rel=0.05)


def attention(q: Any, k: Any, v: Any) -> Any:
    def loss(q: Any, k: Any, v: Any) -> Any:
        scores = jax.nn.softmax(jnp.einsum("btgd,bsd->bgts", q, k))
        return jnp.sum(jnp.einsum("bgts,bsd->btgd", scores, v) ** 2)

    return jax.grad(loss, (0, 1, 2))(q, k, v)


def test_kernels_are_made_before_types_are_narrowed() -> None:
    """Of two f32 tensors a product computes another one again, as it does where that is f32: six bytes read for two."""
    shapes = (f32(4, 256, 4, 64), f32(4, 256, 64), f32(4, 256, 64))
    graph = trace(attention, shapes, {}).graph
    rules = graph_rules(graph)
    narrow = narrowed(graph, rules, "tpu")
    assert any(v.narrowed for v in narrow.values)
    assert traffic(narrow, rules, "tpu").stored == traffic(graph, rules, "tpu").stored


def test_what_a_sum_reads_of_a_copy_is_sent_in_f32_what_products_read_of_another_is_not() -> None:
    """A product's gradient, of which its own kernel makes a bias' gradient too."""
    graph = held(lambda x, w, v: (jnp.sum(y := x @ w, 0), y @ v), X, W, W)
    (product, *_) = [op.results[0] for op in graph.ops if op.primitive == "dot_general"]
    by_sum, by_product = sorted(graph.uses()[product], key=lambda use: graph.ops[use[0]].primitive != "reduce_sum")
    assert graph.values[product].narrowed
    assert graph.taken(product, [by_product]).dtype == "bfloat16"
    assert graph.taken(product, [by_sum, by_product]) == graph.taken(product, [by_sum])
    assert graph.taken(product, [by_sum]).bytes == 2 * graph.values[product].bytes
