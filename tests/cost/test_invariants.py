"""What loops are handed on GPU though it is made of nothing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import jaxplan
from jaxplan.cost import traffic
from jaxplan.ir import trace
from jaxplan.sharding import graph_rules

LAYERS, BATCH, LENGTH, WIDTH = 2, 8, 512, 64
SCORES = (BATCH, LENGTH, LENGTH)


def step(weights: Any, x: Any) -> Any:
    """SGD on scanned attention, masked by positions."""

    def layer(y: Any, weight: Any) -> Any:
        scores = jnp.einsum("btd,bsd->bts", y @ weight, y)
        seen = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)
        return jnp.einsum("bts,bsd->btd", jax.nn.softmax(seen), y), None

    gradient = jax.grad(lambda w: jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2))(weights)
    return weights - 0.1 * gradient


def shapes() -> tuple[Any, Any]:
    weights = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    return weights, jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)


@pytest.mark.parametrize(("platform", "count"), [("gpu", 1), ("tpu", 0)])
def test_a_mask_is_handed_to_loops_and_numbers_are_not(platform: str, count: int) -> None:
    """Attention of eight queries a group, two scanned layers: 4269 MB compiled for H100, 3942 predicted before and 4076
    since (jax 0.10.2)."""
    graph = trace(step, shapes(), {}, donate_argnums=(0,)).graph
    found = traffic(graph, graph_rules(graph), platform).invariants
    masks = [one for one in found if graph.values[one.value].shape == SCORES]
    assert [graph.values[one.value].dtype for one in masks] == ["bool"] * count
    loops = [(loop.start, loop.stop) for loop in graph.loops]
    assert all((one.start, one.stop) == (min(loops)[0], max(stop for _, stop in loops)) for one in masks)


def test_it_takes_memory_from_the_first_loop_to_the_last() -> None:
    options = {"search": "data", "compare_templates": False, "progress": False}
    mesh = AbstractMesh((8,), ("data",))
    sharded = jaxplan.auto_shard(step, mesh, hardware="h100", donate_argnums=0, options=options)
    assert sharded.plan(*shapes()).cost.peak_parts["copies"] >= LENGTH * LENGTH
