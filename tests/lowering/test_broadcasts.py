"""Broadcasts that XLA merges, and that are read in several layouts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan.inspection.matching import compiled_parts, planned_parts
from jaxplan.ir import trace
from jaxplan.lowering import compiled_collectives
from jaxplan.lowering.axis_orders import Orders
from jaxplan.lowering.broadcasts import ANEW, broadcast_anew

AXES = (("data", 4), ("model", 2))
MESH_ORDER = Orders(axes=AXES, chosen={})
ROWS, WIDTH = 4096, 256


def step_on(mesh: Any) -> Any:
    """Both halves are divided by one vector, and cut over other axes; every row of the second is looked up."""

    def laid(x: jax.Array, *spec: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def step(x: jax.Array, weights: tuple[jax.Array, jax.Array], counts: jax.Array, rows: jax.Array) -> Any:
        first = laid(laid(x @ weights[0], None, ("data", "model")) / counts[:, None], None, ("data", "model"))
        second = laid(laid(x @ weights[1], None, "data") / counts[:, None], None, "data")
        taken = laid(second.at[rows].get(mode="fill", fill_value=0), "model", "data")
        return jnp.sin(first), jnp.cos(taken)

    return step


def shapes() -> tuple[Any, ...]:
    of = jax.ShapeDtypeStruct
    weights = (of((WIDTH, WIDTH), jnp.float32),) * 2
    return of((ROWS, WIDTH), jnp.float32), weights, of((ROWS,), jnp.float32), of((2 * ROWS,), jnp.int32)


def test_reads_in_another_layout_than_most_are_found() -> None:
    """Of three divisions by one vector, two alike, and two masks of indices, by what they are computed of."""

    def step(x: jax.Array, counts: jax.Array, rows: jax.Array) -> Any:
        a, b, c = (x / counts[:, None] for x in (jnp.sin(x), jnp.cos(x), jnp.tan(x)))
        return a, b, c, jnp.take(a, rows, axis=0, mode="fill"), b.at[rows].get(mode="fill", fill_value=0)

    given = [((8, 4), jnp.float32), ((8,), jnp.float32), ((16,), jnp.int32)]
    graph = trace(step, [jax.ShapeDtypeStruct(*one) for one in given], {}).graph
    values = {v.index: np.array([-1, -1], np.int8) for v in graph.values if v.shape}
    reads = {(op.index, p): np.array([-1, -1], np.int8) for op in graph.ops for p in range(len(op.operands))}
    divisions = [op for op in graph.ops if op.primitive == "div"]
    gathers = [op for op in graph.ops if op.primitive == "gather"]
    assert len(divisions) == 3 and len(gathers) == 2
    assert not [*broadcast_anew(graph, values, reads, MESH_ORDER)]
    reads[divisions[1].index, 0] = np.array([1, -1], np.int8)
    values[gathers[1].results[0]] = np.array([0, -1], np.int8)
    found = {*broadcast_anew(graph, values, reads, MESH_ORDER)}
    assert (divisions[1].index, 1) in found
    assert len({op for op, _ in found if graph.ops[op].primitive == "gather"}) == 1
    assert {op for op, _ in found} <= {divisions[1].index, *(op.index for op in gathers)}


def test_reads_in_another_order_of_axes_are_found() -> None:
    """One bias is added to two batches, both cut by both axes, the second by "model" first."""

    def step(x: jax.Array, y: jax.Array, bias: jax.Array) -> Any:
        return jnp.sin(x) + bias[None, :], jnp.cos(y) + bias[None, :]

    given = [((8, 4), jnp.float32), ((8, 4), jnp.float32), ((4,), jnp.float32)]
    graph = trace(step, [jax.ShapeDtypeStruct(*one) for one in given], {}).graph
    additions = [op.index for op in graph.ops if op.primitive == "add"]
    rows = np.array([0, 0], np.int8)
    reads = {(op, 0): rows for op in additions} | {(op, 1): np.array([-1, -1], np.int8) for op in additions}
    values = {v.index: rows for v in graph.values if v.shape}
    assert len(additions) == 2 and not [*broadcast_anew(graph, values, reads, MESH_ORDER)]
    turned = Orders(axes=AXES, chosen={("read", additions[1], 0, 0): (1, 0)})
    assert [op for op, _ in broadcast_anew(graph, values, reads, turned)] == additions[1:]


def test_the_step_computes_what_it_did() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    step = step_on(mesh)
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (ROWS, WIDTH))
    weights = tuple(0.1 * jax.random.normal(key, (WIDTH, WIDTH)) for key in keys[1:3])
    counts = jnp.arange(1.0, ROWS + 1)
    rows = jax.random.randint(keys[3], (2 * ROWS,), -2 * ROWS, 2 * ROWS)
    planned = jaxplan.auto_shard(step, mesh, options={"compare_templates": False})
    plan = planned.plan(x, weights, counts, rows)
    assert any(one.why == ANEW for one in plan.constraints)
    for ours, plain in zip(planned(x, weights, counts, rows), jax.jit(step)(x, weights, counts, rows), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=2e-5, atol=2e-5)


@pytest.mark.aot_tpu
def test_nothing_is_sent_for_a_broadcast() -> None:
    """Each had been cut as the other: f32[4096, 64] and bool[8192, 256] gathered for them, beside what was planned."""
    mesh = jaxplan.target("tpu-v5e:2x4").mesh(**dict(AXES))
    sharded = jaxplan.auto_shard(step_on(mesh), mesh, hardware="tpu-v5e", options={"compare_templates": False})
    plan = sharded.plan(*shapes())
    compiled = compiled_collectives(sharded.lower(*shapes()).compile().as_text(), AXES)
    sent, said = Counter[str](), Counter[str]()
    for part in compiled_parts(compiled):
        sent[part.kind] += part.wire_bytes(AXES) * part.trips
    for part in planned_parts(plan.collectives, AXES):
        said[part.kind] += part.wire_bytes(AXES) * part.trips
    assert sent.total() == pytest.approx(said.total(), rel=0.03), (sent, said)


def test_a_plan_keeps_them(tmp_path: Any) -> None:
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    plan = jaxplan.auto_shard(step_on(mesh), mesh, hardware="tpu-v5e").plan(*shapes())
    plan.save(tmp_path / "plan.json")
    again = jaxplan.load_plan(tmp_path / "plan.json", mesh)
    assert again.constraints == plan.constraints
