"""Gradients of weights of ragged groups wait for each other on TPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxplan
from jaxplan.cost import narrowed, traffic
from jaxplan.ir import trace
from jaxplan.lowering import compiled_memory
from jaxplan.sharding import graph_rules

EXPERTS, WIDTH, ROWS, LAYERS = 8, 256, 65536, 4


def of(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def step(weights: Any, x: jax.Array, sizes: jax.Array) -> Any:
    def loss(weights: Any) -> jax.Array:
        y = x
        for up, down in weights:
            y = y + jax.lax.ragged_dot(jnp.tanh(jax.lax.ragged_dot(y, up, sizes)), down, sizes)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


GIVEN = (
    [(of(EXPERTS, WIDTH, 2 * WIDTH), of(EXPERTS, 2 * WIDTH, WIDTH))] * LAYERS,
    of(ROWS, WIDTH),
    of(EXPERTS, dtype=jnp.int32),
)


def times() -> dict[int, int]:
    """When the products that sum rows run, by operation."""
    traced = trace(step, GIVEN, {})
    rules = graph_rules(traced.graph)
    graph = narrowed(traced.graph, rules, "tpu")
    found = traffic(graph, rules, "tpu")
    summing = [op.index for op in graph.ops if graph.values[op.results[0]].shape[:1] == (EXPERTS,)]
    return {op: found.times[op] for op in summing if graph.ops[op].primitive == "ragged_dot_general"}


def test_each_runs_behind_the_one_before_it_as_the_results_lead_to_them() -> None:
    """The first layer's weights are returned first, and their gradients are made last: all others wait for them."""
    found = times()
    assert len(found) == 2 * LAYERS
    down, up = sorted(found)[-2:]  # of the first layer
    assert {at for op, at in found.items() if op not in (down, up)} == {up}
    assert found[up] == up


@pytest.mark.aot_tpu
def test_what_they_read_is_kept_as_compiled() -> None:
    """578 MB, of which 462 were planned when these products ran with the backward pass (jax 0.10.2)."""
    mesh = jaxplan.target("tpu-v5e:2x4").mesh(data=8)
    options: dict[str, Any] = {"search": "data", "compare_templates": False}
    sharded = jaxplan.auto_shard(step, mesh, donate_argnums=0, hardware="tpu-v5e", options=options)
    planned = sharded.plan(*GIVEN).cost.peak_bytes
    compiled = compiled_memory(sharded.lower(*GIVEN).compile()).peak_bytes
    assert 0.95 * compiled <= planned <= 1.15 * compiled, (planned, compiled)
