"""Orders of the axes of one dimension: what they let the partitioner do without moving every piece first."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.ir import trace
from jaxplan.lowering.order import resolve_orders
from jaxplan.sharding import NONE, graph_rules

AXES = (("data", 4), ("model", 2))


def orders_of(made: tuple[int, int], read: tuple[int, int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes of dimension 1 of a value that is made in one layout, and of the one that it is read in.

    Layouts give the dimension that "data" cuts and the one that "model" does.
    """
    graph = trace(lambda x: jnp.sin(jnp.cos(x)), (jax.ShapeDtypeStruct((64, 64), "float32"),), {}).graph
    rows = np.array(made, np.int8), np.array(read, np.int8)
    (before,), (between,), (after,) = graph.inputs, graph.ops[0].results, graph.ops[1].results
    found = resolve_orders(
        graph, graph_rules(graph), AXES, {before: rows[0], between: rows[0], after: rows[1]},
        {(0, 0): rows[0], (1, 0): rows[1]}, {0: rows[1]}, {0: rows[0], 1: rows[1]}, {}, platform="gpu",
    )  # fmt: skip
    return (
        found.layout("value", between, 0, rows[0], 2).dims[1], found.layout("read", 1, 0, rows[1], 2).dims[1],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("made", "read", "majors"),
    [
        ((1, 1), (NONE, 0), ("data", "model")),  # model is exchanged before data is gathered
        ((1, 1), (0, NONE), ("model", "data")),
        ((1, 1), (1, NONE), ("data", "model")),  # data stays
        ((1, 1), (NONE, 1), ("model", "data")),
        ((1, 1), (1, 0), ("data", "model")),
        ((1, 1), (0, 1), ("model", "data")),
    ],
)
def test_what_leaves_first_is_minor(made: tuple[int, int], read: tuple[int, int], majors: tuple[str, ...]) -> None:
    assert orders_of(made, read)[0] == majors
    # and what comes last, on the way back
    assert orders_of(read, made)[1] == majors
