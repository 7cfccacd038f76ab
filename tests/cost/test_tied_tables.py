"""A tied table's product waits on TPU for the lookups' gradient that its kernel adds: XLA fuses the sum into it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.cost.tied_tables import after_lookups, tied_tables
from jaxplan.ir import Graph, trace
from jaxplan.sharding import NONE, UNREDUCED

TABLE = jax.ShapeDtypeStruct((512, 64), jnp.bfloat16)
WORDS = jax.ShapeDtypeStruct((4, 32), jnp.int32)


def step(tied: bool) -> Any:
    def loss(tables: tuple[jax.Array, jax.Array], weight: jax.Array, words: jax.Array) -> jax.Array:
        x = tables[0][words]
        for _ in range(2):
            x = x + jax.nn.relu(x @ weight) @ weight.T
        logits = x @ tables[0 if tied else 1].T
        return jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1).sum()

    return jax.grad(loss)


def graph_of(tied: bool) -> Graph:
    weight = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)
    return trace(step(tied), ((TABLE, TABLE), weight, WORDS), {}).graph


def of_table(graph: Graph) -> int:
    """The product that makes the gradient of what the logits are made with."""
    return next(
        op.index for op in graph.ops
        if op.primitive == "dot_general" and graph.values[op.results[0]].shape == TABLE.shape
    )


def rows(graph: Graph, row: int) -> tuple[dict[int, np.ndarray], dict[tuple[int, int], np.ndarray]]:
    """All whole on one axis, but for what the table's product makes."""
    values = {v.index: np.array([NONE], np.int8) for v in graph.values}
    values[graph.ops[of_table(graph)].results[0]] = np.array([row], np.int8)
    reads = {(op.index, p): np.array([NONE], np.int8) for op in graph.ops for p in range(len(op.operands))}
    return values, reads


@pytest.mark.parametrize(
    ("tied", "row", "waits"), [(True, NONE, True), (True, UNREDUCED, False), (True, 0, False), (False, NONE, False)]
)
def test_a_tied_tables_product_waits_for_the_lookups_gradient(tied: bool, row: int, waits: bool) -> None:
    """Not where it is summed over devices, or laid out otherwise, before it is added."""
    graph = graph_of(tied)
    times = range(len(graph.ops))
    later = after_lookups(graph, [*tied_tables(graph)], times, *rows(graph, row))
    scatter = max(op.index for op in graph.ops if op.primitive == "scatter-add")
    assert later[of_table(graph)] == (scatter if waits else of_table(graph))
    moved = {index for index, (before, after) in enumerate(zip(times, later, strict=True)) if before != after}
    assert bool(moved) is waits


@pytest.mark.parametrize(("dtype", "waits"), [(jnp.float32, True), (jnp.bfloat16, False)])
def test_what_is_summed_over_devices_behind_the_sum_waits_too(dtype: Any, waits: bool) -> None:
    """A Transformer-XL in f32 keeps its logits, 524 MB, to the end (v5e, jax 0.10.2); bf16 gradients that are added in
    f32 are summed over devices one by one."""

    def loss(table: jax.Array, words: jax.Array) -> jax.Array:
        rows, head = table.astype(dtype)[words], table.astype(dtype)
        return jax.nn.logsumexp((jnp.tanh(rows) @ head.T).astype(jnp.float32), axis=-1).sum()

    graph = trace(jax.grad(loss), (jax.ShapeDtypeStruct(TABLE.shape, jnp.float32), WORDS), {}).graph
    (one,) = tied_tables(graph)
    values = {v.index: np.array([NONE], np.int8) for v in graph.values}
    reads = {(op.index, p): np.array([NONE], np.int8) for op in graph.ops for p in range(len(op.operands))}
    for op, place in one.read:
        reads[op, place] = values[graph.ops[op].operands[place]] = np.array([UNREDUCED], np.int8)
    values[graph.ops[one.product].results[0]] = np.array([UNREDUCED], np.int8)
    later = after_lookups(graph, [one], range(len(graph.ops)), values, reads)
    assert (later[one.product] == one.scatter) is waits
