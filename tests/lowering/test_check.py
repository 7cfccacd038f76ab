"""What the partitioner sends and nobody decided is named, wherever it is sent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from jaxplan.ir import trace
from jaxplan.lowering import Orders, check, planned_constraints
from jaxplan.sharding import Layout, graph_rules

AXES = (("data", 8),)
ONE_AXIS = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
CUT, WHOLE = np.array([0], np.int8), np.array([-1], np.int8)


@pytest.mark.parametrize("decided", [True, False])
def test_what_is_gathered_for_a_result_is_unplanned_unless_it_was_decided(decided: bool) -> None:
    """The argument is cut and the result whole: gathered on the way, whether the decision knows of it or not."""
    traced = trace(jnp.sin, [jax.ShapeDtypeStruct((1024, 64), jnp.float32)], {})
    graph = traced.graph
    (argument,), (result,) = graph.inputs, graph.outputs
    row = CUT if decided else WHOLE
    checked = check(
        traced, graph_rules(graph), Orders(axes=AXES, chosen={}), AXES, ONE_AXIS,
        (Layout(dims=(("data",), ())),), (Layout(dims=((), ())),), {argument: row, result: row}, (),
        reads={(0, 0): row}, waited=(), platform="tpu",
    )  # fmt: skip
    assert [c.kind for c, _ in checked.collectives] == ["all_gather"]
    assert [c.kind for c, _ in checked.unplanned] == ([] if decided else ["all_gather"])


def test_what_one_reader_cuts_and_another_sums_whole_is_made_whole() -> None:
    """Handed on to the maker, the cut of the one reader had the sum of the other in parts, and all reduced; it took a
    second round to see."""

    def step(x: jax.Array, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        made = jnp.tanh(x)
        return made.sum(0), made * z

    traced = trace(step, [jax.ShapeDtypeStruct((1024, 64), jnp.float32)] * 2, {})
    graph = traced.graph
    (_, z), (_, product) = graph.inputs, graph.outputs
    values = {v: CUT if v in (z, product) else WHOLE for v in range(len(graph.values))}
    reads = {
        (op.index, position): CUT if op.results == (product,) else WHOLE
        for op in graph.ops
        for position in range(len(op.operands))
    }
    orders, mesh, rules = Orders(axes=AXES, chosen={}), ONE_AXIS, graph_rules(graph)
    whole, rows = Layout(dims=((), ())), Layout(dims=(("data",), ()))
    checked = check(
        traced, rules, orders, AXES, mesh, (whole, rows), (Layout(dims=((),)), rows), values,
        planned_constraints(graph, values, reads, {}, orders), reads=reads, waited=(), platform="tpu",
    )  # fmt: skip
    assert [c.kind for c, _ in checked.collectives if c.kind != "all_slice"] == []
    assert checked.rounds == 1


@pytest.mark.parametrize(("kept", "kinds"), [(0, ["all_gather"]), (1, ["collective_permute", "all_gather"])])
def test_what_two_readers_gather_and_another_takes_in_pieces_is_made_in_pieces(kept: int, kinds: list[str]) -> None:
    """Made as gathered, the third was computed on larger pieces and sliced; of a major axis it took two rounds."""

    def step(x: jax.Array, z: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        made = jnp.cos(x) * jnp.sin(x)
        return made @ w, jnp.exp(made), made * z

    rows = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
    traced = trace(step, [rows, rows, jax.ShapeDtypeStruct((64, 64), jnp.float32)], {})
    graph, axes = traced.graph, (("data", 4), ("model", 2))
    pieces, whole, gathered = (np.array(row, np.int8) for row in ([0, 0], [-1, -1], [0, -1] if kept == 0 else [-1, 0]))
    (_, z, w), (product, _, scaled) = graph.inputs, graph.outputs
    values = {v: pieces for v in range(len(graph.values))} | {v: gathered for v in (z, product, scaled)} | {w: whole}
    reads = {
        (op.index, position): whole if v == w else values[op.results[0]]
        for op in graph.ops
        for position, v in enumerate(op.operands)
    }
    orders = Orders(axes=axes, chosen={})
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    cut, part = Layout(dims=(("data", "model"), ())), Layout(dims=((axes[kept][0],), ()))
    checked = check(
        traced, graph_rules(graph), orders, axes, mesh, (cut, part, Layout(dims=((), ()))), (part, cut, part), values,
        planned_constraints(graph, values, reads, {}, orders), reads=reads, waited=(), platform="tpu",
    )  # fmt: skip
    assert [c.kind for c, _ in checked.collectives] == kinds
    assert checked.rounds == 1
