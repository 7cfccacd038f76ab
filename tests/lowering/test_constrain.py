"""What is pinned where the plan communicates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.ir import trace
from jaxplan.lowering.constrain import gathered_products, made_whole, recut
from jaxplan.sharding import graph_rules

ROWS, COLUMNS = np.array([0], np.int8), np.array([1], np.int8)
WHOLE, PENDING = np.array([-1], np.int8), np.array([-2], np.int8)


@pytest.mark.parametrize(
    ("made", "read", "pinned"), [(COLUMNS, WHOLE, True), (COLUMNS, COLUMNS, False), (COLUMNS, ROWS, False),
                                 (PENDING, WHOLE, False), (WHOLE, COLUMNS, False)],
)  # fmt: skip
def test_a_product_that_is_gathered_is_pinned_in_its_pieces(made: np.ndarray, read: np.ndarray, pinned: bool) -> None:
    """A classifier's gradient under data parallelism sent 436 MB of operands on v5e, 235 since (242 planned)."""
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    graph = trace(lambda x, w: jnp.sin(x @ w), (shape, shape), {}).graph
    (product,) = (op for op in graph.ops if op.primitive == "dot_general")
    (reader,) = graph.uses()[product.results[0]]
    found = gathered_products(graph, {product.results[0]: made}, {reader: read})
    assert found == ({product.results[0]} if pinned else set())


@pytest.mark.parametrize(
    ("first", "second", "pinned"),
    [(ROWS, COLUMNS, True), (ROWS, ROWS, False), (COLUMNS, COLUMNS, False), (ROWS, WHOLE, False)],
)
def test_what_is_concatenated_is_pinned_where_one_of_its_readers_cuts_along_that(
    first: np.ndarray, second: np.ndarray, pinned: bool
) -> None:
    """A translator's attention: the reader that wanted none of it was given those pieces, and summed its product."""
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def step(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        both = jnp.concatenate([x, x], axis=1)
        return both @ w.T @ w, both.T @ x

    wide = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    graph = trace(step, (shape, wide), {}).graph
    (joined,) = (op.results[0] for op in graph.ops if op.primitive == "concatenate")
    one, other = graph.uses()[joined]
    found = made_whole(graph, graph_rules(graph), {joined: ROWS}, {one: first, other: second})
    assert found == ({joined} if pinned else set())


@pytest.mark.parametrize(
    ("made", "read", "pinned"), [(WHOLE, COLUMNS, True), (ROWS, COLUMNS, True), (COLUMNS, WHOLE, False)],
)  # fmt: skip
def test_what_a_reader_cuts_otherwise_is_pinned_as_it_is_made(made: np.ndarray, read: np.ndarray, pinned: bool) -> None:
    """What is only gathered hands nothing on: its pin would be one of thousands."""
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    graph = trace(lambda x: jnp.sin(jnp.cos(x)), (shape,), {}).graph
    value = graph.ops[0].results[0]
    (reader,) = graph.uses()[value]
    assert recut(graph, {value: made}, {reader: read}, [reader]) == ({value} if pinned else set())
