"""Indices that XLA for TPU clamps for gathers and sorts for scatters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxplan
from jaxplan.cost import traffic
from jaxplan.cost.indices import (
    Prepared,
    gathered_for_sums,
    prepared,
    prepared_indices,
    same_indices,
    unviewed,
    validity_masks,
)
from jaxplan.ir import trace
from jaxplan.lowering import compiled_memory
from jaxplan.sharding import NONE, graph_rules

NODES, EDGES, COLUMNS = 2**16, 2**20, 64


def graph_network(layers: int, nodes: int = NODES) -> Any:
    """The gradient of layers that add up the neighbours of every node."""

    def step(weights: Any, x: Any, senders: Any, receivers: Any) -> Any:
        def loss(weights: Any) -> Any:
            h = x
            for i in range(layers):
                around = jax.ops.segment_sum(jnp.tanh(h @ weights[i])[senders], receivers, nodes)
                h = h + around
            return jnp.mean(h**2)

        return weights - jax.grad(loss)(weights)

    return step


def arguments(layers: int, nodes: int = NODES, edges: int = EDGES, columns: int = COLUMNS) -> tuple[Any, ...]:
    places = jax.ShapeDtypeStruct((edges,), jnp.int32)
    weights = jax.ShapeDtypeStruct((layers, columns, columns), jnp.float32)
    return weights, jax.ShapeDtypeStruct((nodes, columns), jnp.float32), places, places


def test_gathers_share_theirs_and_scatters_theirs() -> None:
    graph = trace(graph_network(3), arguments(3), {}).graph
    producers = graph.producers()
    found = [*prepared(graph, producers)]
    assert sorted((len(one.ops), one.sorts) for one in found) == [(3, False), (3, False), (3, True), (3, True)]
    for one in found:
        read = {unviewed(graph, producers, graph.ops[op].operands[1]) for op in one.ops}
        assert len(read) == 1
        assert all(graph.ops[op].primitive.startswith("scatter") == one.sorts for op in one.ops)
    assert graph.inputs[3] in {unviewed(graph, producers, graph.ops[one.ops[0]].operands[1]) for one in found}


def test_numbers_are_sorted_with_their_indices() -> None:
    def step(values: Any, places: Any) -> Any:
        return jax.ops.segment_sum(values, places, 8) + jax.ops.segment_sum(values**2, places, 8)

    shapes = jax.ShapeDtypeStruct((64,), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)
    graph = trace(step, shapes, {}).graph
    assert [len(one.ops) for one in prepared(graph, graph.producers())] == [1, 1]


def test_they_are_there_from_the_first_to_the_last_that_read_them_alike() -> None:
    graph = trace(graph_network(3), arguments(3), {}).graph
    times = range(len(graph.ops))
    axes = (("data", 4),)
    scatters = next(one for one in prepared(graph, graph.producers()) if one.sorts)
    first, second, third = scatters.ops
    cut, whole = np.array([0, NONE]), np.array([NONE, NONE])
    reads = {(first, 1): cut, (second, 1): whole, (third, 1): cut}
    found = [*prepared_indices(graph, axes, [scatters], times, reads)]
    alike, other = EDGES // 4 * 4, EDGES * 4
    lasting = [(first - 1, third + 1, alike)] * 2 + [(second - 1, second + 1, other)] * 2
    assert sorted(found) == sorted([*lasting, (first - 2, first, alike), (second - 2, second, other)])
    gathers = Prepared(scatters.ops, False)
    assert [*prepared_indices(graph, axes, [gathers], times, {(first, 1): cut})] == [(first - 1, first + 1, alike)]


@pytest.mark.aot_tpu
@pytest.mark.parametrize("case", [("tpu-v5e", 2**16, 2**20, 64, 2), ("tpu-v6e", 2**17, 2**22, 64, 3)], ids=str)
def test_as_much_is_compiled(case: tuple[str, int, int, int, int]) -> None:
    """The rows of all edges, twice where what is sorted lies on top of the first."""
    target, nodes, edges, columns, layers = case
    mesh = jaxplan.target(f"{target}:2x4").mesh(data=8)
    options = {"search": "data", "compare_templates": False}
    whole = dict.fromkeys(("x", "senders", "receivers"), "replicated")
    step = jaxplan.auto_shard(
        graph_network(layers, nodes), mesh, hardware=target, constraints=whole, options=options
    )
    shapes = arguments(layers, nodes, edges, columns)
    planned = step.plan(*shapes).cost.peak_bytes
    compiled = compiled_memory(step.lower(*shapes).compile()).peak_bytes
    assert -0.05 <= planned / compiled - 1 < 0.12


@pytest.mark.parametrize(("nodes", "held"), [(24576, True), (28672, False)])
def test_rows_of_small_tables_are_gathered_where_they_are_added_up(nodes: int, held: bool) -> None:
    """No and 0.6 GB of temporaries compiled for v5e."""
    shapes = arguments(2, nodes, EDGES, 128)
    graph = trace(graph_network(2, nodes), shapes, {}).graph
    crossing = traffic(graph, graph_rules(graph), "tpu")
    rows = [op.results[0] for op in graph.lookups() if op.primitive == "gather"]
    assert len(rows) == 4 and [crossing.stored[value] for value in rows] == [not held] * 4


def test_rows_that_something_else_reads_are_in_memory() -> None:
    def step(x: Any, senders: Any, receivers: Any) -> Any:
        most = jax.ops.segment_max(x[senders], receivers, 64)
        return jax.ops.segment_sum(x[senders], receivers, 64), most, jax.ops.segment_sum(x[receivers], senders, 64)

    edges = jax.ShapeDtypeStruct((4096,), jnp.int32)
    graph = trace(step, (jax.ShapeDtypeStruct((64, 128), jnp.float32), edges, edges), {}).graph
    found = {op.operands[1]: gathered_for_sums(graph, op) for op in graph.lookups() if op.primitive == "gather"}
    assert sorted(found.values()) == [False, True]


def test_gathers_that_fill_what_is_out_of_bounds_share_a_mask_on_gpu() -> None:
    graph = trace(graph_network(3), arguments(3), {}).graph
    times = range(len(graph.ops))
    reads = {(op.index, 1): np.array([0, NONE]) for op in graph.lookups()}
    found = [*validity_masks(graph, (("data", 4),), [*prepared(graph, graph.producers())], times, reads)]
    gathers = [op.index for op in graph.lookups() if op.primitive == "gather"]
    assert [size for *_, size in found] == [EDGES // 4]  # those of the gradients of `segment_sum`
    assert found[0][0] == gathers[3] and found[0][1] > gathers[5]


def test_indices_that_are_shown_alike_are_brought_elsewhere_once() -> None:
    graph = trace(graph_network(3), arguments(3), {}).graph
    found = same_indices(graph)
    by_shown: dict[int, set[int]] = {}
    for value, first in found.items():
        by_shown.setdefault(unviewed(graph, graph.producers(), value), set()).add(first)
    assert len(by_shown) == 2 and all(len(firsts) == 1 for firsts in by_shown.values())
    assert len(found) > 2
