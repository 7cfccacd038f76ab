"""What is pinned where the plan communicates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxplan.ir import trace
from jaxplan.lowering import Orders, lower_flat, planned_constraints
from jaxplan.lowering.hlo import compiled_collectives
from jaxplan.sharding import Layout

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
