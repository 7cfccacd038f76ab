"""Decoding on GPU: caches are turned round for attention, and one of a layer's two stays till the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxplan
from jaxplan.cost import traffic
from jaxplan.cost.caches_on_gpu import turned_for_products
from jaxplan.ir import trace
from jaxplan.lowering import compiled_memory
from jaxplan.sharding import NONE, graph_rules

LAYERS, BATCH, PLACES = 4, 4, 2048


class Cache(NamedTuple):
    """Heads of keys, queries a key, columns; heads before places; each sequence written at a place of its own."""

    keys: int = 8
    queries: int = 4
    columns: int = 128
    heads_first: bool = False
    scattered: bool = False


TURNED = [Cache(), Cache(columns=64), Cache(scattered=True)]
AS_IT_LIES = [Cache(queries=1), Cache(heads_first=True), Cache(keys=1, queries=8)]


def step_of(case: Cache) -> Callable[..., Any]:
    axis, keys = (2, "bksd") if case.heads_first else (1, "bskd")

    def write(cache: jax.Array, new: jax.Array, places: jax.Array) -> jax.Array:
        new = jnp.expand_dims(new, axis)
        if not case.scattered:
            return jax.lax.dynamic_update_slice_in_dim(cache, new, places[0], axis)
        one = lambda cache, new, place: jax.lax.dynamic_update_slice_in_dim(cache, new, place, axis - 1)  # noqa: E731
        return jax.vmap(one)(cache, new, places)

    def step(caches: Any, weights: Any, x: jax.Array, places: jax.Array) -> Any:
        after = []
        for w, (k, v) in zip(weights, caches, strict=True):
            q = jnp.einsum("be,ekgd->bkgd", x, w["q"])
            k, v = (
                write(c, jnp.einsum("be,ekd->bkd", x, w[n]), places) for c, n in zip((k, v), "kv", strict=True)
            )
            scores = jnp.einsum(f"bkgd,{keys}->bkgs", q, k, preferred_element_type=jnp.float32)
            mixed = jnp.einsum(f"bkgs,{keys}->bkgd", jax.nn.softmax(scores).astype(x.dtype), v)
            x = x + jnp.einsum("bkgd,kgde->be", mixed, w["o"])
            after.append((k, v))
        return after, x

    return step


def arguments(case: Cache, batch: int) -> Any:
    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    keys, queries, columns = case.keys, case.queries, case.columns
    dim = keys * queries * columns
    cache = of(*((batch, keys, PLACES) if case.heads_first else (batch, PLACES, keys)), columns)
    weights = {
        "q": of(dim, keys, queries, columns),
        "k": of(dim, keys, columns),
        "v": of(dim, keys, columns),
        "o": of(keys, queries, columns, dim),
    }
    return [(cache, cache)] * LAYERS, [weights] * LAYERS, of(batch, dim), jax.ShapeDtypeStruct((batch,), jnp.int32)


def bytes_of(case: Cache) -> int:
    """Of one cache of a device."""
    return 2 * BATCH * PLACES * case.keys * case.columns


@pytest.mark.parametrize("case", TURNED + AS_IT_LIES, ids=str)
def test_which_are_turned(case: Cache) -> None:
    graph = trace(step_of(case), arguments(case, BATCH), {}).graph
    crossing = traffic(graph, graph_rules(graph), "gpu")
    values = {v: np.array([NONE]) for v in range(len(graph.values))}
    found = [*turned_for_products(graph, (("data", 1),), crossing.read_caches, crossing.times, values)]
    assert sum(size for _, _, size in found) == (LAYERS + 1) * bytes_of(case) * (case in TURNED)
    assert all(stop == len(graph.ops) for _, stop, _ in found)


def test_heads_cut_to_one_a_device_leave_no_second_one() -> None:
    case = Cache()
    graph = trace(step_of(case), arguments(case, BATCH), {}).graph
    crossing = traffic(graph, graph_rules(graph), "gpu")
    values = {v: np.array([2, -1]) for v in range(len(graph.values))}
    axes = (("model", case.keys),)
    found = [*turned_for_products(graph, axes, crossing.read_caches, crossing.times, values)]
    assert sum(size for _, _, size in found) == LAYERS * bytes_of(case) // case.keys


def test_what_a_step_does_not_return_is_not_turned_back() -> None:
    case = Cache()

    def step(*given: Any) -> Any:
        return step_of(case)(*given)[1]

    graph = trace(step, arguments(case, BATCH), {}).graph
    assert not traffic(graph, graph_rules(graph), "gpu").read_caches


@pytest.mark.aot_gpu
@pytest.mark.usefixtures("cuda_compiler")
@pytest.mark.parametrize("case", [*TURNED, Cache(queries=1)], ids=str)
def test_compiled_for_gpu_the_step_takes_as_much(case: Cache) -> None:
    mesh = jaxplan.target("h100:1x1x8").mesh(data=8)
    sharded = jaxplan.auto_shard(step_of(case), mesh, donate_argnums=0, hardware="h100")
    given = arguments(case, 8 * BATCH)
    predicted = sharded.plan(*given).cost.peak_bytes
    compiled = compiled_memory(sharded.lower(*given).compile()).peak_bytes
    assert 0.95 * compiled < predicted < 1.1 * compiled
