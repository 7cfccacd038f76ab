"""Orders of the axes of one dimension: what they let the partitioner do without moving every piece first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxplan.ir import trace
from jaxplan.lowering import compiled_collectives
from jaxplan.lowering.order import resolve_orders
from jaxplan.sharding import NONE, UNREDUCED, graph_rules

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
def test_what_leaves_first_is_minor(
    made: tuple[int, int], read: tuple[int, int], majors: tuple[str, ...]
) -> None:
    assert orders_of(made, read)[0] == majors
    # and what comes last, on the way back
    assert orders_of(read, made)[1] == majors


def test_a_dimension_that_is_taken_apart_takes_any_order_where_one_part_is_cut() -> None:
    """Rows in blocks: only axes that cut several of a dimension's parts have their order from these."""
    graph = trace(
        lambda x: jnp.sin(x.reshape(8, 8, 64)), (jax.ShapeDtypeStruct((64, 64), "float32"),), {}
    ).graph
    rules = graph_rules(graph)
    blocks = rules[0].results[0][0][0]
    (rows,), (parts,), (after,) = graph.inputs, graph.ops[0].results, graph.ops[1].results
    cut, moved = np.array((0, 0), np.int8), np.array((2, 0), np.int8)
    found = resolve_orders(
        graph, rules, AXES, {rows: cut, parts: cut, after: moved}, {(0, 0): cut, (1, 0): moved}, {0: moved},
        {0: np.array((blocks, blocks), np.int8), 1: moved}, {}, platform="gpu",
    )  # fmt: skip
    assert found.layout("value", parts, 0, cut, 3).dims[0] == ("model", "data")
    assert found.layout("read", 0, 0, cut, 2).dims[0] == ("model", "data")


def test_dimensions_that_take_one_anothers_order_along_turn_together() -> None:
    """Two pairs of products whose sums are scattered alike: either pair alone loses by turning, both gain."""

    def pairs(x: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array) -> jax.Array:
        return jnp.sin(x @ a @ b) + jnp.sin(x @ c @ d)

    graph = trace(pairs, (jax.ShapeDtypeStruct((64, 64), "float32"),) * 5, {}).graph
    rules = graph_rules(graph)
    whole, columns, rows = (np.array(row, np.int8) for row in ((NONE, NONE), (1, 1), (0, 0)))
    sums, mixed = np.array((UNREDUCED, UNREDUCED), np.int8), np.array((0, 1), np.int8)
    x, a, b, c, d = graph.inputs
    values = {x: whole, a: mixed, b: rows, c: mixed, d: rows}
    reads, factors = {}, {}
    layouts = {"dot_general": iter([(whole, columns, columns, 1), (columns, rows, sums, 0)] * 2)}
    for op in graph.ops:
        *operands, result, side = next(
            layouts.get(op.primitive, iter([(*([rows] * len(op.operands)), rows, -1)]))
        )
        values[op.results[0]] = result
        reads.update({(op.index, i): row for i, row in enumerate(operands)})
        factor = rules[op.index].operands[1][side][0] if side >= 0 else rules[op.index].operands[0][0][0]
        factors[op.index] = np.array((factor, factor), np.int8)
    found = resolve_orders(graph, rules, AXES, values, reads, {0: rows}, factors, {}, platform="gpu")
    first = graph.ops[0]
    assert found.layout("read", first.index, 1, columns, 2).dims[1] == ("model", "data")
    assert found.layout("output", 0, 0, rows, 2).dims[0] == ("model", "data")


def test_what_is_added_up_to_one_number_has_one_order() -> None:
    """A norm of two gradients, the first of which leaves its other axis first: XLA sums it once, not twice."""

    def norm(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sum(x) + jnp.sum(y), jnp.sin(x)

    graph = trace(norm, (jax.ShapeDtypeStruct((64, 64), "float32"),) * 2, {}).graph
    rules = graph_rules(graph)
    rows, moved, sums = (np.array(row, np.int8) for row in ((0, 0), (1, 0), (UNREDUCED, UNREDUCED)))
    values = {v.index: rows if v.shape else sums for v in graph.values}
    reads = {(op.index, i): values[v] for op in graph.ops for i, v in enumerate(op.operands)}
    whole = np.array((NONE, NONE), np.int8)
    factors = {
        op.index: np.array([rules[op.index].operands[0][0][0]] * 2, np.int8) if reads[op.index, 0] is rows else whole
        for op in graph.ops
    }
    sine = next(op for op in graph.ops if op.primitive == "sin")
    reads[sine.index, 0] = values[sine.results[0]] = factors[sine.index] = moved
    found = resolve_orders(graph, rules, AXES, values, reads, {0: whole, 1: moved}, factors, {}, platform="gpu")
    x, y = graph.inputs
    assert found.layout("value", x, 0, rows, 2).dims[0] == ("model", "data")
    assert found.layout("value", y, 0, rows, 2).dims[0] == ("model", "data")


def test_what_no_order_suits_turns_on_the_way() -> None:
    """One reader keeps "data", the other "model": whichever leads, what the other reads changes places first."""
    graph = trace(lambda x: [jnp.sin(x), jnp.cos(x)], (jax.ShapeDtypeStruct((64, 64), "float32"),), {}).graph
    both, data, model = (np.array(row, np.int8) for row in ((0, 0), (0, NONE), (NONE, 0)))
    (x,), (sin, cos) = graph.inputs, (op.results[0] for op in graph.ops)

    def turns(
        first: np.ndarray, second: np.ndarray, copies: dict[tuple[int, int], np.ndarray] | None = None
    ) -> list[tuple[int, bytes, bytes, bool]]:
        found = resolve_orders(
            graph, graph_rules(graph), AXES, {x: both, sin: first, cos: second}, {(0, 0): first, (1, 0): second},
            {0: first, 1: second}, {0: first, 1: second}, {}, platform="gpu",
            copies=copies,
        )  # fmt: skip
        assert all(turn.value == x and turn.axes == (0, 1) for turn in found.turns)
        return [(turn.use[1], turn.made, turn.taken, turn.late) for turn in found.turns]

    assert turns(data, data) == turns(model, model) == turns(both, model) == []
    assert turns(data, model) == [(1, both.tobytes(), model.tobytes(), False)]  # mesh order of equals
    # a whole copy that the second is cut out of needs no order
    assert turns(data, model, {(1, 0): np.array((NONE, NONE), np.int8)}) == []


def test_axes_that_stay_together_keep_their_order_beside_one_that_joins() -> None:
    """Three readers, the last of which wants "b" to lead what the second takes in the first's order."""
    axes = (("a", 2), ("b", 2), ("c", 2))
    graph = trace(lambda x: jnp.sin(jnp.cos(jnp.tan(x))), (jax.ShapeDtypeStruct((64, 64), "float32"),), {}).graph
    two, three, one = (np.array(row, np.int8) for row in ((0, 0, NONE), (0, 0, 0), (NONE, 0, NONE)))
    (x,), (tan, cos, sin) = graph.inputs, (op.results[0] for op in graph.ops)
    found = resolve_orders(
        graph, graph_rules(graph), axes, {x: two, tan: two, cos: three, sin: one},
        {(0, 0): two, (1, 0): three, (2, 0): one}, {0: one}, {0: two, 1: three, 2: one}, {}, platform="gpu",
    )  # fmt: skip
    assert not found.turns
    assert found.layout("value", cos, 0, three, 2).dims[0][0] == "b"
    assert found.layout("value", tan, 0, two, 2).dims[0] == ("b", "a")


def test_major_axes_that_lead_already_turn_nothing() -> None:
    axes = (("a", 2), ("b", 2), ("c", 2))
    graph = trace(lambda x: [jnp.sin(x), jnp.cos(x)], (jax.ShapeDtypeStruct((64, 64), "float32"),), {}).graph
    every, ab, ac = (np.array(row, np.int8) for row in ((0, 0, 0), (0, 0, NONE), (0, NONE, 0)))
    (x,), (sin, cos) = graph.inputs, (op.results[0] for op in graph.ops)
    found = resolve_orders(
        graph, graph_rules(graph), axes, {x: every, sin: ab, cos: ac}, {(0, 0): ab, (1, 0): ac}, {0: ab, 1: ac},
        {0: ab, 1: ac}, {}, platform="gpu",
    )  # fmt: skip
    (turn,) = found.turns
    led = {found.layout("value", x, 0, every, 2).dims[0][0]}
    assert led == {"a"} and {axes[axis][0] for axis in turn.axes} == {"b", "c"}


SUMMED = [((0, 1), "tpu", ("model", "data")), ((1, 0), "tpu", ("data", "model")), ((0, 1), "gpu", ("data", "model"))]
"""Dimensions that a product sums over, of which "model" cuts the first and "data" the second; where; the order of axes
in which its sums are scattered."""


@pytest.mark.parametrize(("contracted", "platform", "order"), SUMMED)
def test_sums_over_several_dimensions_are_scattered_in_the_order_of_these(
    contracted: tuple[int, int], platform: str, order: tuple[str, ...]
) -> None:
    shapes = jax.ShapeDtypeStruct((16, 64, 256), "float32"), jax.ShapeDtypeStruct((16, 64, 512), "float32")
    graph = trace(
        lambda x, y: jnp.sin(jax.lax.dot_general(x, y, ((contracted, contracted), ((), ())))), shapes, {}
    ).graph
    dot, sin = graph.ops
    cut, piece, parts = (np.array(row, np.int8) for row in ((1, 0), (0, 0), (UNREDUCED, UNREDUCED)))
    rules = graph_rules(graph)
    over = [rules[0].operands[0][d][0] for d in (1, 0)]
    (x, y), (z,), (w,) = graph.inputs, dot.results, sin.results
    found = resolve_orders(
        graph, rules, AXES, {x: cut, y: cut, z: parts, w: piece}, {(0, 0): cut, (0, 1): cut, (1, 0): piece},
        {0: piece}, {0: np.array(over, np.int8), 1: piece}, {}, platform=platform,
    )  # fmt: skip
    assert found.layout("read", 1, 0, piece, 2).dims[0] == order
    assert not found.turns


@pytest.mark.aot_tpu
@pytest.mark.parametrize(("contracted", "platform", "order"), [one for one in SUMMED if one[1] == "tpu"])
def test_so_xla_scatters_them(
    contracted: tuple[int, int], platform: str, order: tuple[str, ...], tpu_topology: Callable[[str], Any]
) -> None:
    """In the other order the whole sum is sent to all, and cut after that."""
    mesh = Mesh(np.array(tpu_topology("v5e:2x4").devices).reshape(4, 2), ("data", "model"))
    cut, whole = NamedSharding(mesh, P("model", "data")), NamedSharding(mesh, P())
    shapes = [jax.ShapeDtypeStruct((16, 64, width), "float32", sharding=cut) for width in (256, 512)]
    for axes, kind in ((order, "reduce_scatter"), (order[::-1], "all_reduce")):

        def product(x: Any, y: Any, axes: tuple[str, ...] = axes) -> Any:
            made = jax.lax.dot_general(x, y, ((contracted, contracted), ((), ())))
            made = jax.lax.with_sharding_constraint(made, whole)
            return jax.lax.with_sharding_constraint(made, NamedSharding(mesh, P(axes)))

        sent = compiled_collectives(jax.jit(product).lower(*shapes).compile().as_text(), AXES)
        assert [one.kind for one in sent] == [kind]
