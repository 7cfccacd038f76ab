"""Products of what a loop doesn't change are made once, before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxplan
from jaxplan.hardware import compile_for
from jaxplan.ir import Graph, trace
from jaxplan.lowering import compiled_memory

WIDTH, HEADS, STEPS = 32, 4, 5
BF16 = jnp.bfloat16


def keys(encoded: jax.Array, weights: Any) -> jax.Array:
    """Of all heads, split off whole rows."""
    rows = encoded @ weights["k"].astype(encoded.dtype) + weights["b"].astype(encoded.dtype)
    return rows.reshape(*encoded.shape[:2], HEADS, -1)


def attended(query: jax.Array, encoded: jax.Array, weights: Any) -> jax.Array:
    k = keys(encoded, weights)
    scores = jax.nn.softmax(jnp.einsum("bhd,bkhd->bhk", query, k).astype(jnp.float32)).astype(query.dtype)
    return jnp.einsum("bhk,bkhd->bhd", scores, k)


def carried(weights: Any, encoded: jax.Array, query: jax.Array) -> tuple[Any, jax.Array]:
    """What the encoder made is handed from step to step unchanged."""

    def step(state: Any) -> Any:
        i, query, encoded = state
        return i + 1, query + attended(query, encoded, weights), encoded

    _, query, _ = jax.lax.while_loop(lambda state: state[0] < STEPS, step, (0, query, encoded))
    return weights, query


def closed_over(weights: Any, encoded: jax.Array, query: jax.Array) -> tuple[Any, jax.Array]:
    def step(query: jax.Array, added: jax.Array) -> Any:
        return query + added + attended(query, encoded, weights), None

    return weights, jax.lax.scan(step, query, jnp.zeros((STEPS, *query.shape), query.dtype))[0]


def nested(weights: Any, encoded: jax.Array, query: jax.Array) -> tuple[Any, jax.Array]:
    def step(query: jax.Array, _: Any) -> Any:
        return closed_over(weights, encoded, query)[1], None

    return weights, jax.lax.scan(step, query, None, length=2)[0]


def rematerialised(weights: Any, encoded: jax.Array, query: jax.Array) -> tuple[Any, jax.Array]:
    """Asked to be made anew."""

    def step(query: jax.Array, _: Any) -> Any:
        return query + jnp.sum(jax.checkpoint(keys)(encoded, weights), 1), None

    return weights, jax.lax.scan(step, query, None, length=STEPS)[0]


def changed(weights: Any, encoded: jax.Array, query: jax.Array) -> tuple[Any, jax.Array]:
    def step(state: Any, _: Any) -> Any:
        query, encoded = state
        return (query + attended(query, encoded, weights), encoded * 0.5), None

    return weights, jax.lax.scan(step, (query, encoded), None, length=STEPS)[0][0]


def larger(weights: Any, encoded: jax.Array, query: jax.Array) -> tuple[Any, jax.Array]:
    """Each word's product with each other one."""

    def step(query: jax.Array, _: Any) -> Any:
        return query * jnp.mean(jnp.einsum("bkd,cld->bkcl", encoded, encoded)), None

    return weights, jax.lax.scan(step, query, None, length=STEPS)[0]


def arguments(batch: int, words: int, width: int, dtype: Any) -> Any:
    weights = {"k": jnp.full((width, width), 0.02), "b": jnp.linspace(-1, 1, width)}
    encoded = jnp.sin(jnp.arange(batch * words * width, dtype=jnp.float32)).reshape(batch, words, width).astype(dtype)
    return weights, encoded, encoded[:, 0].reshape(batch, HEADS, -1)


def often(graph: Graph, shape: tuple[int, ...]) -> list[float]:
    """How often each product of that shape is made."""
    products = [op for op in graph.ops if op.primitive == "dot_general"]
    return [op.trips for op in products if graph.values[op.results[0]].shape == shape]


@pytest.mark.parametrize(
    ("step", "trips"),
    [(carried, 1), (closed_over, 1), (nested, 1), (rematerialised, STEPS), (changed, STEPS)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_how_often_they_are_made(step: Callable[..., Any], trips: float) -> None:
    given = arguments(8, 16, WIDTH, BF16)
    traced = trace(step, given, {}, while_trips=STEPS)
    assert often(traced.graph, (8, 16, WIDTH)) == [trips]
    made = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *jax.tree.leaves(given))
    for mine, theirs in zip(made, jax.tree.leaves(jax.jit(step)(*given)), strict=True):
        np.testing.assert_allclose(mine.astype(np.float32), theirs.astype(np.float32), rtol=2e-2)


def test_a_bias_is_added_once_and_heads_are_split_off_inside() -> None:
    graph = trace(closed_over, arguments(8, 16, WIDTH, BF16), {}).graph
    (added,) = [op for op in graph.ops if op.results and op.primitive == "add"
                and graph.values[op.results[0]].shape == (8, 16, WIDTH)]  # fmt: skip
    (heads,) = [op for op in graph.ops if op.operands == added.results]
    assert (added.trips, heads.primitive, heads.trips) == (1, "reshape", STEPS)


def test_what_grows_is_left_where_it_is() -> None:
    assert often(trace(larger, arguments(8, 64, WIDTH, BF16), {}).graph, (8, 64, 8, 64)) == [STEPS]


def test_products_of_both_a_first_step_and_the_loop_are_made_once() -> None:
    def step(weights: Any, encoded: jax.Array, query: jax.Array) -> Any:
        return carried(weights, encoded, attended(query, encoded, weights))

    assert often(trace(step, arguments(8, 16, WIDTH, BF16), {}).graph, (8, 16, WIDTH)) == [1]


@pytest.mark.parametrize("step", [carried, closed_over])
def test_sharded_the_loop_does_the_same(step: Callable[..., Any]) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    given = arguments(8, 16, WIDTH, jnp.float32)
    expected = step(*given)[1]
    np.testing.assert_allclose(jaxplan.auto_shard(step, mesh)(*given)[1], expected, rtol=1e-5)


@pytest.mark.aot_tpu
def test_compiled_for_tpu_they_are_kept_for_the_loop(tpu_topology: Callable[[str], Any]) -> None:
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments(256, 512, 1024, BF16))
    target = jaxplan.target("tpu-v5e:2x4")
    mesh = target.mesh(data=8)
    sharded = jaxplan.auto_shard(carried, mesh, donate_argnums=0, options={"search": "data"})
    predicted = sharded.plan(*given).cost.peak_bytes
    compiled = compiled_memory(compile_for(sharded.lower(*given), mesh, target.compiler_options)).peak_bytes
    assert 0.95 * compiled < predicted < 1.15 * compiled
