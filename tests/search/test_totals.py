"""What is summed to one number is not cut for it on TPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh

import jaxplan
from jaxplan.ir import trace
from jaxplan.search.totals import totals
from jaxplan.sharding import graph_rules

LAYERS, WIDTH = 8, 1024
MESH = AbstractMesh((4, 2), ("data", "model"))


def step(state: Any, x: Any) -> Any:
    """Adam on scanned layers, clipped by the gradient's norm."""

    def loss(weights: Any) -> Any:
        y, _ = jax.lax.scan(lambda y, w: (jax.nn.relu(y @ w["up"]) @ w["down"], None), x, weights)
        return jnp.mean(y**2)

    gradient = jax.grad(loss)(state["weights"])
    norm = optax.tree.norm(gradient)
    gradient = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), gradient)
    updates, moments = optax.adam(1e-3).update(gradient, state["moments"])
    return {"weights": optax.apply_updates(state["weights"], updates), "moments": moments}, norm


def shapes() -> tuple[Any, Any]:
    weights = {"up": (LAYERS, WIDTH, 4 * WIDTH), "down": (LAYERS, 4 * WIDTH, WIDTH)}
    shaped = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in weights.items()}
    state = {"weights": shaped, "moments": jax.eval_shape(optax.adam(1e-3).init, shaped)}
    return state, jax.ShapeDtypeStruct((8192, WIDTH), jnp.float32)


def test_a_norm_and_its_squares_are_found() -> None:
    graph = trace(step, shapes(), {}, donate_argnums=(0,)).graph
    found = totals(graph, graph_rules(graph))
    names = {graph.ops[index].primitive for index in found}
    assert "reduce_sum" in names and names & {"integer_pow", "square", "mul"}
    assert all(op.index not in found for op in graph.ops if op.primitive in ("dot_general", "sqrt", "div"))


def test_the_norm_of_a_whole_gradient_reads_no_slices_on_tpu() -> None:
    """A GPT of eight layers under data parallelism on v5e: 1003 MB sent for 398 planned, since then 398."""
    options = {"search": "data", "compare_templates": False, "progress": False}
    sharded = jaxplan.auto_shard(step, MESH, hardware="tpu-v5e", donate_argnums=0, options=options)
    summed = [c for c in sharded.plan(*shapes()).constraints if c.primitive == "reduce_sum"]
    assert not any(any(c.layout.dims) for c in summed)
