"""Weights' gradients that XLA for TPU makes in the kernels of their updates, at the end of a step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxplan
from jaxplan.cost.with_updates import with_updates
from jaxplan.hardware import compile_for
from jaxplan.ir import Graph, trace
from jaxplan.lowering import compiled_memory
from jaxplan.sharding import UNREDUCED
from models import Case, moe

AXES = (("d", 8),)
WHOLE, CUT, SUMMED = np.array([-1], np.int8), np.array([1], np.int8), np.array([UNREDUCED], np.int8)


def step(state: tuple[Any, Any], x: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
    """A head behind a layer, and the mean of its logits' squares; gradients go into a moment and the weights."""

    def loss(weights: dict[str, jax.Array]) -> jax.Array:
        y = jnp.tanh(x @ weights["layer"])
        return ((y @ weights["head"]).astype(jnp.float32) ** 2).mean()

    weights, moments = state
    value, gradients = jax.value_and_grad(loss)(weights)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
    return (jax.tree.map(lambda w, m: w - 0.1 * m, weights, moments), moments), value


def weights_of(rows: int, words: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        "head": jax.ShapeDtypeStruct((rows, words), jnp.float32),
        "layer": jax.ShapeDtypeStruct((rows, rows), jnp.float32),
    }


def clipped(state: tuple[Any, Any], x: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
    """What updates is scaled by the norm of all gradients."""

    def loss(weights: dict[str, jax.Array]) -> jax.Array:
        return ((jnp.tanh(x @ weights["layer"]) @ weights["head"]).astype(jnp.float32) ** 2).mean()

    weights, moments = state
    gradients = jax.grad(loss)(weights)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))
    moments = jax.tree.map(lambda m, g: 0.9 * m + g / jnp.maximum(norm, 1.0), moments, gradients)
    return (jax.tree.map(lambda w, m: w - 0.1 * m, weights, moments), moments), norm


def measured(state: tuple[Any, Any], x: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
    """The norm is returned and nothing else."""
    new, _ = step(state, x)
    grown = jax.tree.map(lambda m, old: m - 0.9 * old, new[1], state[1])
    return new, jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grown)))


def graph_of(rows: int = 64, words: int = 256, of: Any = step) -> Graph:
    weights, x = weights_of(rows, words), jax.ShapeDtypeStruct((32, rows), jnp.float32)
    return trace(of, ((weights, weights), x), {}, donate_argnums=(0,)).graph


def late(
    made: np.ndarray, settled: np.ndarray, axes: tuple[tuple[str, int], ...] = AXES, of: Any = step
) -> set[tuple[int, ...]]:
    """Shapes of what runs late where the head is kept, and its gradient made, in these layouts."""
    graph = graph_of(of=of)
    values = dict.fromkeys(range(len(graph.values)), WHOLE)
    for value in graph.values:
        if value.shape in ((64, 256), (256, 64)):
            values[value.index] = settled
    for op in graph.ops:
        if op.primitive == "dot_general":
            shape = graph.values[op.results[0]].shape
            values[op.results[0]] = made if shape in ((64, 256), (256, 64)) else SUMMED
    found = with_updates(graph, axes, values)
    assert set(found.values()) <= {len(graph.ops) - 1}
    return {graph.values[graph.ops[index].results[0]].shape for index in found}


def test_a_gradient_that_nobody_adds_to_is_made_with_its_update() -> None:
    assert {tuple(sorted(shape)) for shape in late(CUT, CUT)} == {(64, 256)}


@pytest.mark.parametrize(("made", "settled"), [(SUMMED, CUT), (WHOLE, CUT), (CUT, WHOLE)])
def test_gradients_that_are_sent_are_not(made: np.ndarray, settled: np.ndarray) -> None:
    assert not late(made, settled)


def test_an_update_that_waits_for_a_norm_is_a_kernel_of_its_own() -> None:
    assert not late(CUT, CUT, of=clipped)
    assert late(CUT, CUT, of=measured)


def test_one_device_runs_its_products_where_they_stand() -> None:
    assert not late(CUT, CUT, (("d", 1),))


@pytest.mark.aot_tpu
def test_compiled_for_tpu_the_logits_gradient_waits() -> None:
    """Of experts behind which the plan cuts the head over the words by both axes: 35 % under without it.

    What is left of it, 9 %, are two arrays of experts that wait in main memory for a product which XLA runs behind a
    scatter, and the model before it, in vector memory.
    """
    config = moe.Config(
        n_layers=2, dim=512, n_heads=8, n_kv_heads=8, head_dim=64, hidden_dim=1024, n_experts=8, top_k=2,
        vocab_size=16000, seq_len=256, batch_size=32,
    )  # fmt: skip
    case = Case(name="moe", model=moe, config=config, what="a mixture of experts")
    mesh = jaxplan.target("tpu-v5e:2x4").mesh(data=4, model=2)
    sharded = jaxplan.auto_shard(case.step(), mesh, donate_argnums=0, hardware="tpu-v5e")
    predicted = sharded.plan(*case.shapes()).cost.peak_bytes
    compiled = compiled_memory(compile_for(sharded.lower(*case.shapes()), mesh)).peak_bytes
    assert 0.9 * compiled < predicted < 1.1 * compiled
