"""Caches that a loop over tokens carries: which XLA for TPU copies before it."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxplan
from jaxplan._jax import HEADS_ARE_PADDED
from jaxplan.cost import traffic
from jaxplan.cost.turned_caches import turned_for_loops
from jaxplan.ir import trace
from jaxplan.lowering import compiled_memory
from jaxplan.sharding import NONE, graph_rules

# its front door hides the module behind the function of the same name
TURNED_CACHES = importlib.import_module("jaxplan.cost.turned_caches")

DIM, LAYERS, TOKENS = 256, 2, 4


class Cache(NamedTuple):
    """Sequences a device, heads of keys, queries a key, columns; heads before places; one token a step, no loop; each
    sequence written at a place of its own; places."""

    sequences: int = 16
    keys: int = 8
    queries: int = 1
    columns: int = 128
    heads_first: bool = False
    single: bool = False
    scattered: bool = False
    places: int = 2048


TURNED = [
    Cache(),
    Cache(keys=4, queries=2),
    Cache(heads_first=True),
    Cache(columns=256),
]
AS_IT_LIES = [
    Cache(sequences=1),
    Cache(keys=1, queries=8),
    Cache(keys=4, queries=2, heads_first=True),
    Cache(columns=64),
    Cache(single=True),
    Cache(scattered=True),
]


def step_of(case: Cache) -> Any:
    axis = 2 if case.heads_first else 1
    keys = "bksd" if case.heads_first else "bskd"

    def write(cache: jax.Array, new: jax.Array, place: jax.Array) -> jax.Array:
        new = jnp.expand_dims(new, axis)
        if not case.scattered:
            return jax.lax.dynamic_update_slice_in_dim(cache, new, place, axis)
        one = lambda cache, new, place: jax.lax.dynamic_update_slice_in_dim(cache, new, place, axis - 1)  # noqa: E731
        return jax.vmap(one)(cache, new, jnp.broadcast_to(place, cache.shape[:1]))

    def token(weights: Any, caches: Any, x: jax.Array, place: jax.Array) -> Any:
        after = []
        for w, (k, v) in zip(weights, caches, strict=True):
            q = jnp.einsum("be,ekgd->bkgd", x, w["q"])
            k, v = (
                write(c, jnp.einsum("be,ekd->bkd", x, w[n]), place) for c, n in zip((k, v), "kv", strict=True)
            )
            scores = jnp.einsum(f"bkgd,{keys}->bkgs", q, k, preferred_element_type=jnp.float32)
            scores = jnp.where(jnp.arange(case.places) <= place, scores, -1e30)
            mixed = jnp.einsum(f"bkgs,{keys}->bkgd", jax.nn.softmax(scores).astype(x.dtype), v)
            x = x + jnp.einsum("bkgd,kgde->be", mixed, w["o"])
            after.append((k, v))
        return after, x

    def step(caches: Any, weights: Any, x: jax.Array, place: jax.Array) -> Any:
        if case.single:
            return token(weights, caches, x, place)

        def body(carry: Any, _: None) -> Any:
            caches, x, place = carry
            caches, x = token(weights, caches, x, place)
            return (caches, x, place + 1), x

        (caches, _, _), xs = jax.lax.scan(body, (caches, x, place), None, length=TOKENS)
        return caches, xs

    return step


def arguments(case: Cache, devices: int = 1) -> Any:
    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    batch, keys, places, columns = devices * case.sequences, case.keys, case.places, case.columns
    cache = of(*((batch, keys, places) if case.heads_first else (batch, places, keys)), columns)
    weights = {
        "q": of(DIM, keys, case.queries, columns),
        "k": of(DIM, keys, columns),
        "v": of(DIM, keys, columns),
        "o": of(keys, case.queries, columns, DIM),
    }
    caches = [(cache, cache)] * LAYERS
    return caches, [weights] * LAYERS, of(batch, DIM), jax.ShapeDtypeStruct((), jnp.int32)


def bytes_of(case: Cache) -> int:
    """Of all caches of a device."""
    return 2 * LAYERS * 2 * case.sequences * case.places * case.keys * case.columns


@pytest.mark.parametrize("case", TURNED + AS_IT_LIES, ids=str)
def test_caches_are_turned_for_their_readers(case: Cache) -> None:
    traced = trace(step_of(case), arguments(case), {})
    crossing = traffic(traced.graph, graph_rules(traced.graph), "tpu")
    values = {v: np.array([NONE]) for v in range(len(traced.graph.values))}
    found = [*turned_for_loops(traced.graph, (("data", 1),), crossing.caches, crossing.times, values)]
    assert sum(one.size for one in found) == bytes_of(case) * (case in TURNED)
    for one in found:
        (loop,) = traced.graph.loops
        assert (one.start, one.stop) == (crossing.times[loop.start], crossing.times[loop.stop - 1] + 1)


def test_a_vector_that_a_loop_fills_is_no_cache() -> None:
    def step(filled: jax.Array, weights: jax.Array) -> jax.Array:
        def body(filled: jax.Array, i: jax.Array) -> Any:
            return jax.lax.dynamic_update_slice(filled, jnp.tanh(weights[0] @ filled)[None], (i,)), None

        return jax.lax.scan(body, filled, jnp.arange(8))[0]

    arguments = jax.ShapeDtypeStruct((8,), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    graph = trace(step, arguments, {}).graph
    assert any(op.primitive == "dynamic_update_slice" for op in graph.ops)
    assert not traffic(graph, graph_rules(graph), "tpu").caches


@pytest.mark.parametrize(("columns", "times"), [(128, 2), (64, 4)])
@pytest.mark.parametrize("cut", [True, False])
def test_one_head_a_device_is_padded_to_a_word_where_each_sequence_has_a_place(
    columns: int, times: int, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TURNED_CACHES, "HEADS_ARE_PADDED", True)
    case = Cache(columns=columns, scattered=True)
    traced = trace(step_of(case), arguments(case), {})
    crossing = traffic(traced.graph, graph_rules(traced.graph), "tpu")
    values = {v: np.array([NONE]) for v in range(len(traced.graph.values))}
    assert len(crossing.caches) == 2 * LAYERS
    for one in crossing.caches:
        values[one.carry] = np.array([2 if cut else NONE])
    found = [*turned_for_loops(traced.graph, (("model", case.keys),), crossing.caches, crossing.times, values)]
    assert sum(one.size for one in found) == cut * times * bytes_of(case) // case.keys


@pytest.mark.aot_tpu
def test_as_many_bytes_of_one_head_are_compiled() -> None:
    case = Cache(sequences=4, places=32768, scattered=True)  # too few sequences for the devices: heads are cut
    mesh = jaxplan.target("tpu-v5p:2x2x2").mesh(model=8)
    step = jaxplan.auto_shard(step_of(case), mesh, hardware="tpu-v5p", donate_argnums=0)
    compiled = compiled_memory(step.lower(*arguments(case)).compile()).peak_bytes
    plan = step.plan(*arguments(case))
    assert round(compiled / (bytes_of(case) / 8)) == (3 if HEADS_ARE_PADDED else 1)
    assert plan.cost.peak_bytes == pytest.approx(compiled, rel=0.05)


@pytest.mark.aot_tpu
@pytest.mark.parametrize("case", [TURNED[0], TURNED[1], TURNED[3], AS_IT_LIES[-1]], ids=str)
def test_as_much_is_compiled(case: Cache) -> None:
    turned, case = case in TURNED, case._replace(sequences=64)  # more than vector memory has a part in
    mesh = jaxplan.target("tpu-v5p:2x2x2").mesh(data=8)
    options = {"search": "data", "compare_templates": False}
    step = jaxplan.auto_shard(step_of(case), mesh, hardware="tpu-v5p", donate_argnums=0, options=options)
    compiled = compiled_memory(step.lower(*arguments(case, 8)).compile()).peak_bytes
    planned = step.plan(*arguments(case, 8)).cost.peak_bytes
    assert round(compiled / bytes_of(case)) == (2 if turned else 1)
    assert planned == pytest.approx(compiled, rel=0.12)
