"""Rows of a graph's nodes that lie in rows and those that are copied, against what XLA's TPU compiler has alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import jaxplan
from jaxplan.cost.row_layouts import cut_to_columns, stays_in_rows
from jaxplan.ir import trace
from jaxplan.sharding import ELEMENTWISE, NONE

NODES, EDGES, COLUMNS = 32_768, 8_388_608, 64
S = jax.ShapeDtypeStruct

MESSAGES: dict[str, Callable[..., Any]] = {
    "product": lambda s, r, w: jax.nn.gelu(s @ w),
    "function": lambda s, r, w: jax.nn.gelu(s),
    "product of a function": lambda s, r, w: jax.nn.gelu(jnp.tanh(s) @ w),
    "residual": lambda s, r, w: s + jax.nn.gelu(s @ w),
    "difference": lambda s, r, w: jax.nn.gelu((s - r) @ w),
}


def network(message: Callable[..., Any]) -> Callable[..., Any]:
    """A layer that adds up what edges make of their nodes, and its update."""

    def loss(p: Any, x: Any, sender: Any, receiver: Any) -> Any:
        into, w, out = (p[name].astype(x.dtype) for name in ("in", "w", "out"))
        h = x @ into
        made = message(h[sender], h[receiver], w)
        found = jnp.tanh(jax.ops.segment_sum(made, receiver, NODES) @ out)
        return jnp.mean(found.astype(jnp.float32) ** 2)

    def step(p: Any, *batch: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p, *batch))

    return step


def shapes() -> tuple[Any, ...]:
    weights = {"in": (128, COLUMNS), "w": (COLUMNS, COLUMNS), "out": (COLUMNS, 128)}
    p = {name: S(shape, jnp.float32) for name, shape in weights.items()}
    return p, S((NODES, 128), jnp.bfloat16), S((EDGES,), jnp.int32), S((EDGES,), jnp.int32)


@pytest.mark.parametrize(
    ("message", "alive"),
    [
        ("product", 831_712_256),
        ("function", 567_452_672),
        ("product of a function", 700_630_528),
        ("residual", 834_841_088),
    ],
)
def test_memory_of_messages(message: str, alive: int) -> None:
    """Compiled for eight v5e (jax 0.10.2, libtpu 0.0.42.1): 2**20 rows of 64 bf16 columns a device are 134 MB, 268 in
    rows, which a gather makes, a product reads and a scatter adds."""
    planned = jaxplan.auto_shard(
        network(MESSAGES[message]), AbstractMesh((8,), ("data",)), hardware="tpu-v5e", donate_argnums=(0,),
        options={"search": "data", "compare_templates": False},
    )  # fmt: skip
    cost = planned.plan(*shapes()).cost
    assert cost.peak_bytes - cost.peak_parts.get("gaps", 0) == pytest.approx(alive, rel=0.015)


def test_a_message_that_is_weighed_takes_the_place_of_its_rows() -> None:
    """Compiled for v5e, f32[1048576, 64] of [65536, 64]: 1.02 of its bytes in rows (jax 0.10.2, libtpu 0.0.42.1)."""

    def step(x: Any, weights: Any, sender: Any, receiver: Any) -> Any:
        return jax.ops.segment_sum(jnp.tanh(x)[sender] * weights[:, None], receiver, 2**16).mean(1)

    edges = S((2**20,), jnp.int32)
    given = S((2**16, 64), jnp.float32), S((2**20,), jnp.float32), edges, edges
    planned = jaxplan.auto_shard(step, AbstractMesh((1,), ("data",)), hardware="tpu-v5e")
    parts = planned.plan(*given).cost.peak_parts
    made = sum(parts.get(part, 0) for part in ("activations", "copies", "gaps"))
    assert 1 <= made / (2**20 * 128 * 4) < 1.2


@pytest.mark.parametrize(
    ("message", "in_rows"),
    [("product", {"gather", "dot_general"}), ("residual", set()), ("difference", {"gather", "sub"}),
     ("function", {"gather", "tanh", "add", "mul"})],
)  # fmt: skip
def test_what_stays_in_rows(message: str, in_rows: set[str]) -> None:
    graph = trace(network(MESSAGES[message]), shapes(), {}, donate_argnums=(0,)).graph
    made = graph.producers()
    found = {graph.ops[made[value]].primitive for value in stays_in_rows(graph)}
    if message == "function":  # how its derivative is written is jax's
        assert found >= in_rows
        found -= ELEMENTWISE - in_rows
    assert found == in_rows


@pytest.mark.parametrize(("made", "padded"), [(NONE, 51_200_000), (0, 51_200_000), (1, None)])
def test_a_column_of_a_gradient_of_wider_rows_is_updated_in_rows(made: int, padded: int | None) -> None:
    """Of 16 columns over 16 devices; unless the gradient has one column a device, too."""

    def step(table: Any, at: Any, rows: Any) -> Any:
        return table - 0.1 * jnp.zeros_like(table).at[at].add(rows)

    graph = trace(step, (S((100_000, 16), jnp.float32), S((64,), jnp.int32), S((64, 16), jnp.float32)), {}).graph
    (scatter,) = [op for op in graph.ops if op.primitive == "scatter-add"]
    gradient, updated = scatter.results[0], [(graph.inputs[0], graph.outputs[0])]
    values = {graph.outputs[0]: np.array([1], np.int8), gradient: np.array([made], np.int8)}
    found = cut_to_columns(graph, (("d", 16),), gradient, updated, values)
    assert found.get(graph.inputs[0]) == padded
