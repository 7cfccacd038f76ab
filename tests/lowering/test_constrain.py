"""What is pinned where the plan communicates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxplan
from jaxplan.ir import trace
from jaxplan.lowering import Orders, lower_flat, planned_constraints
from jaxplan.lowering.hlo import compiled_collectives
from jaxplan.sharding import UNREDUCED, Layout

AXES = (("data", 8),)
ROWS, WHOLE = np.array([0], np.int8), np.array([-1], np.int8)


def test_what_is_gathered_is_gathered_as_it_is_made_and_not_what_it_is_made_of() -> None:
    """Made explicit, the gather stood behind the select, as decided; compiled, mask and argument were gathered."""
    shapes = [jax.ShapeDtypeStruct((64, 64), dtype) for dtype in (jnp.float32, jnp.bool_)]
    traced = trace(lambda x, mask: jnp.cumsum(jnp.where(mask, x, 0.0), 0), shapes, {})
    graph, mesh = traced.graph, jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    values = dict.fromkeys(range(len(graph.values)), ROWS) | dict.fromkeys(graph.outputs, WHOLE)
    uses = {(op.index, i): op for op in graph.ops for i in range(len(op.operands))}
    reads = {use: WHOLE if op.primitive == "cumsum" else ROWS for use, op in uses.items()}
    constraints = planned_constraints(graph, values, reads, {}, Orders(axes=AXES, chosen={}))
    rows, whole = Layout(dims=(("data",), ())), Layout(dims=((), ()))
    compiled = lower_flat(traced, constraints, mesh, (rows, rows), (whole,), donate=()).compile()
    sent = compiled_collectives(compiled.as_text(), AXES)
    assert [(c.kind, c.bytes) for c in sent] == [("all_gather", 64 * 64 * 4)]


def test_a_result_is_brought_to_where_it_lies_in_steps() -> None:
    """Updated in rows over both axes and kept in columns over one, XLA gathered all of it ("involuntary full
    rematerialization")."""
    axes = (("data", 4), ("model", 2))
    traced = trace(lambda w, g: w - jnp.tanh(g), [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2, {})
    graph, mesh = traced.graph, jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows, columns = np.array([0, 0], np.int8), np.array([1, -1], np.int8)
    values = dict.fromkeys(range(len(graph.values)), rows)
    reads = {(op.index, i): rows for op in graph.ops for i in range(len(op.operands))}
    pins = planned_constraints(graph, values, reads, {}, Orders(axes=axes, chosen={}), (), {0: columns})
    ends = [Layout(dims=(("data", "model"), ())), Layout(dims=((), ("data",)))]
    compiled = lower_flat(traced, pins, mesh, (ends[0],) * 2, ends[1:], donate=()).compile()
    sent = {c.kind: c.bytes for c in compiled_collectives(compiled.as_text(), axes)}
    assert max(sent.values()) <= 64 * 64 * 4 / 4, sent


def test_places_that_are_scattered_to_in_each_row_are_pinned_as_they_are_read() -> None:
    """Labels whose batch two axes cut, beside logits whose words one of them does: of PPO on 4x4 v6e 412 MB of truth
    values, pred[16, 512, 50304], were all_gathered that no plan knew of (jax 0.10.2, libtpu 0.0.42.1)."""
    axes = (("data", 4), ("model", 2))
    shapes = [jax.ShapeDtypeStruct((16, 64), jnp.float32), jax.ShapeDtypeStruct((16,), jnp.int32)]

    def step(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.take_along_axis(x, labels[:, None], 1).sum())(logits)

    graph = trace(step, shapes, {}).graph
    scatter = next(op for op in graph.ops if op.primitive.startswith("scatter"))
    batch = np.array([-1, 0], np.int8)
    values = {v.index: batch for v in graph.values if len(v.shape) > 1}
    reads = {(op.index, i): values[v] for op in graph.ops for i, v in enumerate(op.operands) if v in values}
    pins = planned_constraints(graph, values, reads, {}, Orders(axes=axes, chosen={}))
    pinned = [pin.layout for pin in pins if pin.site == scatter.sites[1]]
    assert [layout.dims[0] for layout in pinned] == [("model",)]


def test_sums_that_all_readers_scatter_over_some_axes_are_pinned_as_they_are_read() -> None:
    """A gradient, its square for the norm and itself for the update; pinned whole before, 120 MB of a Mixer's were
    all_reduced over eight H100 where 82 were to be sent (jax 0.10.2)."""
    axes = (("data", 4), ("model", 2))
    shapes = [jax.ShapeDtypeStruct((256, 64), jnp.float32), jax.ShapeDtypeStruct((256, 32), jnp.float32)]

    def step(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        gradient = x.T @ y
        return jnp.sum(gradient**2), gradient * 2

    graph = trace(step, shapes, {}).graph
    (product,) = [op for op in graph.ops if op.primitive == "dot_general"]
    batch, cut, whole = (np.array(row, np.int8) for row in ([0, 0], [-1, 0], [-1, -1]))
    values = {v.index: batch if 256 in v.shape else cut if v.shape else whole for v in graph.values}
    values[product.results[0]] = np.array([UNREDUCED, UNREDUCED], np.int8)
    reads = {(op.index, i): cut for op in graph.ops for i, v in enumerate(op.operands) if graph.values[v].shape}
    reads |= {(product.index, i): np.array(row, np.int8) for i, row in enumerate(([0, 0], [0, 0]))}
    pins = planned_constraints(graph, values, reads, {}, Orders(axes=axes, chosen={}))
    site = graph.values[product.results[0]].site
    assert {pin.layout.dims for pin in pins if pin.site == site} == {(("model",), ())}


@pytest.mark.parametrize(("before", "at_once"), [(jnp.negative, True), (lambda x: x * 3, True), (jnp.sin, False)])
def test_sums_of_what_is_scaled_are_pinned_as_they_are_read(before: Callable[[Any], Any], at_once: bool) -> None:
    """XLA scales the sum instead, whole where that is pinned whole: a batch normalisation's gradients were all_reduced
    over eight H100 where a reduce_scatter was planned (jax 0.10.2)."""
    shapes = [jax.ShapeDtypeStruct((256, 64), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.float32)]
    graph = trace(lambda x, y: before(x).sum(axis=0) + y, shapes, {}).graph
    values = {v.index: ROWS if v.shape else WHOLE for v in graph.values}
    (total,) = [op.results[0] for op in graph.ops if op.primitive == "reduce_sum"]
    values[total] = np.array([UNREDUCED], np.int8)
    reads = {(op.index, i): ROWS for op in graph.ops for i, v in enumerate(op.operands) if graph.values[v].shape}
    pins = planned_constraints(graph, values, reads, {}, Orders(axes=AXES, chosen={}))
    (made,) = [pin.layout.dims for pin in pins if pin.site == graph.values[total].site]
    assert made == ((("data",),) if at_once else ((),))
    summed = [pin.layout.dims for pin in pins if pin.site == graph.ops[graph.producers()[total]].sites[0]]
    assert summed == ([(("data",), ())] if at_once else [])


@pytest.mark.aot_tpu
@pytest.mark.parametrize("turned", [False, True])
def test_what_is_cast_twice_is_pinned_wherever_it_is_made(turned: bool, tpu_topology: Callable[[str], Any]) -> None:
    """Cast for rows to be looked up by rows and columns, and for a product by rows, one cast is made for both: the
    product took the former, and gathered the logits' gradients (PPO on eight v5e, jax 0.10.2, libtpu 0.0.42.1); so does
    one whose weights are transposed first (a head tied by `x @ w.T`)."""
    target, axes = jaxplan.target("tpu-v5e:2x4"), (("data", 4), ("model", 2))
    mesh = target.mesh(**dict(axes))
    shapes = [((512, 256), jnp.float32), ((1024, 512), jnp.bfloat16)]

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        cast = (w.T if turned else w).astype(jnp.bfloat16)
        summed = ((1,), (1 if turned else 0,))
        return jnp.tanh(w.astype(jnp.bfloat16)), jax.lax.dot_general(x, cast, (summed, ((), ()))) * 2

    traced = trace(step, [jax.ShapeDtypeStruct(*shape) for shape in shapes], {})
    graph = traced.graph
    rows, columns, both, whole = (np.array(row, np.int8) for row in ([0, 0], [1, 1], [1, 0], [-1, -1]))
    values = dict.fromkeys(range(len(graph.values)), whole)
    reads = {(op.index, i): whole for op in graph.ops for i in range(len(op.operands))}
    values |= {graph.inputs[0]: rows, graph.inputs[1]: columns}
    for op in graph.ops:
        if op.primitive == "convert_element_type" and op.operands[0] == graph.inputs[0]:
            reads[op.index, 0] = values[op.results[0]] = rows
        if op.primitive == "transpose":
            reads[op.index, 0], values[op.results[0]] = rows, columns
            cast = op.index + 1
            reads[cast, 0] = values[graph.ops[cast].results[0]] = columns
        if op.primitive == "tanh":
            reads[op.index, 0] = values[op.results[0]] = both
        if op.primitive == "dot_general":
            reads[op.index, 0], reads[op.index, 1] = columns, columns if turned else rows
            values[op.results[0]] = np.array([UNREDUCED, UNREDUCED], np.int8)
    pins = planned_constraints(graph, values, reads, {}, Orders(axes=axes, chosen={}))
    ends = [Layout(dims=(("data", "model"), ())), Layout(dims=((), ("data", "model")))]
    results = [Layout(dims=(("model",), ("data",))), Layout(dims=((), ()))]
    lowered = lower_flat(traced, pins, mesh, ends, results, donate=())
    sent = compiled_collectives(lowered.compile(compiler_options=dict(target.compiler_options)).as_text(), axes)
    assert not [c for c in sent if c.kind == "all_gather" and c.bytes >= 1024 * 512 * 2], "of the product's operand"
    assert [c.bytes for c in sent if c.kind == "all_reduce"] == [1024 * 256 * 2]


def test_an_index_that_is_made_twice_is_pinned_wherever_it_is_made() -> None:
    """Rows are looked up by it, whole, and scattered back in pieces: XLA makes it once, and cut the lookup too."""

    def step(x: jax.Array, places: jax.Array) -> jax.Array:
        return jnp.zeros_like(x).at[places].add(jnp.tanh(x[places]))

    graph = trace(step, (jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((256,), "int32")), {}).graph
    gathered, scattered = graph.lookups()
    whole, rows = np.array([-1], np.int8), np.array([0], np.int8)
    values = dict.fromkeys(range(len(graph.values)), whole)
    reads = {(op.index, i): whole for op in graph.ops for i in range(len(op.operands))}
    for place in (1, 2):
        reads[scattered.index, place] = rows
    pins = planned_constraints(graph, values, reads, {}, Orders(axes=AXES, chosen={}))
    sites = {pin.site for pin in pins}
    places = gathered.operands[1], scattered.operands[1]
    assert places[0] != places[1]
    assert all(graph.values[v].site in sites for v in places)


def test_what_a_remat_body_reads_in_two_layouts_is_pinned_where_it_enters() -> None:
    """Behind the barrier the one reader's gather stood for the value itself: the other product gathered both operands
    (a mixture of experts with a shared expert on eight H100, jax 0.10.2)."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda x, down: jnp.cumsum(x, 0) + jnp.tanh(x @ up) @ down)
        return jax.grad(lambda down: jnp.sum(jnp.tanh(layer(jnp.tanh(layer(x, down)), down))))(down)

    traced = trace(step, [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (64, 256), (256, 64))], {})
    graph = traced.graph
    assert graph.barriers
    batch = {v.index for v in graph.values if v.shape[:1] == (64,) and v.index != graph.inputs[1]}
    values = {v.index: ROWS if v.index in batch else WHOLE for v in graph.values}
    reads = {(op.index, i): values[v] for op in graph.ops for i, v in enumerate(op.operands)}
    for op in graph.ops:
        if op.primitive.startswith("cumsum"):
            reads[op.index, 0] = values[op.results[0]] = WHOLE
        if op.primitive == "dot_general" and graph.values[op.results[0]].shape == (256, 64):
            values[op.results[0]] = np.array([UNREDUCED], np.int8)
    pins = planned_constraints(graph, values, reads, {}, Orders(axes=AXES, chosen={}))
    rows, whole = Layout(dims=(("data",), ())), Layout(dims=((), ()))
    compiled = lower_flat(traced, pins, mesh, (rows, whole, whole), (whole,), donate=()).compile()
    sent = compiled_collectives(compiled.as_text(), AXES)
    assert max(c.bytes for c in sent if c.kind == "all_gather") == 64 * 64 * 4, sent
