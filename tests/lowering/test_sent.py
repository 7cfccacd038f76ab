"""In which types the partitioner's collectives are sent."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxplan.cost import CostModel, narrowed
from jaxplan.hardware import axis_links, load_profile
from jaxplan.ir import trace
from jaxplan.lowering import as_sent
from jaxplan.sharding import NONE, Collective, graph_rules

AXES = (("data", 8),)
STACK = (12, 64, 64)


def step(weights: jax.Array, x: jax.Array) -> jax.Array:
    """A loop slices its weights and converts them; another carries gradients of their shape in f32."""

    def layer(h: jax.Array, w: jax.Array) -> Any:
        return h + jax.nn.relu(h @ w.astype(jnp.bfloat16)), None

    def loss(weights: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2)

    return jax.lax.fori_loop(0, 3, lambda _, g: 0.9 * g + 0.1 * weights, jax.grad(loss)(weights))


def test_a_stack_is_gathered_in_bf16_whatever_else_has_its_shape() -> None:
    """For the operation that converts its slices; weights of twelve scanned layers under muon, +5 % before."""
    shapes = jax.ShapeDtypeStruct(STACK, jnp.float32), jax.ShapeDtypeStruct((256, 64), jnp.bfloat16)
    traced = trace(step, shapes, {})
    graph = narrowed(traced.graph, graph_rules(traced.graph), "tpu")
    slices = {op.results[0] for op in graph.ops if op.primitive == "scan_slice"}
    converts = [op for op in graph.ops if op.primitive == "convert_element_type" and slices & {*op.operands}]
    carries = [op for op in graph.ops if op.primitive == "carry_init" and graph.values[op.results[0]].shape == STACK]
    assert converts and carries
    whole = np.full(1, NONE, np.int8)
    values = {v.index: whole for v in graph.values}
    reads = {(op.index, place): whole for op in graph.ops for place in range(len(op.operands))}
    profile = load_profile("tpu-v5e")
    model = CostModel(profile=profile, axes=AXES, links=(axis_links(profile, AXES)["data"],))

    def sent(op: int) -> str:
        gather = Collective(
            kind="all_gather", axes=("data",), bytes=4 * 12 * 64 * 64, trips=1.0, scope="", shape=STACK, dtype="float32"
        )
        ((found, _),) = as_sent(graph, values, reads, [(gather, op)], AXES, model)
        return found.dtype

    assert {sent(op.index) for op in converts} == {"bfloat16"}
    assert {sent(op.index) for op in carries} == {"float32"}
