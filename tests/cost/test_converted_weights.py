"""Weights that a TPU converts apart are those that XLA for TPU converts apart."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxplan
from jaxplan.cost import traffic
from jaxplan.cost.converted_weights import converted_weights
from jaxplan.ir import Graph, trace
from jaxplan.sharding import NONE, graph_rules

DEVICES, ROWS = 8, 256
AXES = (("data", DEVICES),)
WEIGHTS = {
    "btd,dhk->bthk": [(1024, 8, 128), (1024, 2, 256), (1024, 6, 128), (1024, 8, 64), (1024, 1, 128)],
    "btd,dnhk->btnhk": [(1024, 3, 8, 128), (1024, 8, 3, 128), (1024, 3, 8, 64)],
    "bthk,hkd->btd": [(8, 128, 1024)],
    "btd,hdk->bthk": [(8, 1024, 128)],
    "btd,df->btf": [(1024, 3072)],
}
APART = [(1024, 8, 128), (1024, 2, 256), (1024, 1, 128), (1024, 3, 8, 128), (1024, 8, 3, 128)]

NEWER = {(1024, 8, 64), (1024, 3, 8, 64)}
"""Those that libtpu 0.0.50 (jax 0.12) converts apart as well; 0.0.42 (jax 0.10) doesn't, and the model counts its."""


def project(weights: Any, x: Any) -> Any:
    loss = jnp.float32(0)
    for equation, shapes in WEIGHTS.items():
        for place, shape in enumerate(shapes):
            h = jnp.tanh(x).reshape(*x.shape[:-1], *shape[:2]) if equation.startswith("bthk") else jnp.tanh(x)
            made = jnp.einsum(equation, h, weights[equation][place].astype(jnp.bfloat16))
            loss += jnp.sum(jnp.square(made.astype(jnp.float32)))
    return loss


def arguments(dtype: Any = jnp.float32) -> Any:
    weights = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, dtype), WEIGHTS, is_leaf=lambda s: isinstance(s, tuple))
    return weights, jax.ShapeDtypeStruct((DEVICES, ROWS, 1024), jnp.bfloat16)


def found(function: Any, given: Any, cut: int | None = None) -> tuple[Graph, list[Any]]:
    """What is converted apart, the batch over all devices, and the weights' dimension `cut` too."""
    graph = trace(function, given, {}).graph
    moved = traffic(graph, graph_rules(graph), "tpu")
    whole = np.full(1, NONE)
    values = {value: whole for value in range(len(graph.values))}
    for value in graph.inputs[:-1]:
        if cut is not None and len(graph.values[value].shape) > 2:
            values[value] = np.array([cut])
    reads = {(op.index, place): whole for op in graph.ops for place in range(len(op.operands))}
    return graph, [*converted_weights(graph, AXES, moved.stored, moved.times, values, reads)]


def converted(function: Any, given: Any) -> list[tuple[int, ...]]:
    """The shapes of what is converted to bf16 in a kernel of its own, as compiled for v5e; the batch over all chips."""
    mesh = jaxplan.target("tpu-v5e:2x4").mesh(data=DEVICES)
    weights, *xs = given
    shardings = (NamedSharding(mesh, PartitionSpec()), *[NamedSharding(mesh, PartitionSpec("data"))] * len(xs))
    text = jax.jit(function, in_shardings=shardings).lower(weights, *xs).compile().as_text()
    entry = text[text.index("\nENTRY") :]
    shapes = re.findall(r" = bf16\[([\d,]+)\]\S* convert\(", entry)
    return [tuple(int(n) for n in dims.split(",")) for dims in shapes]


@pytest.mark.aot_tpu
def test_they_are_those_that_are_compiled_so() -> None:
    gradients = jax.grad(project, (0, 1))
    graph, predicted = found(gradients, arguments())
    shapes = sorted(graph.values[one.value].shape for one in predicted)
    assert shapes == sorted(APART)
    assert set(converted(gradients, arguments())) - NEWER == set(shapes), "XLA converts others apart"
    for one in predicted:
        (forward, *_, last) = [reader for reader, _ in graph.uses()[one.value]]
        assert one.start <= forward < last < one.stop
        rows = 2 if graph.values[one.value].shape[-2] == 1 else 1  # tiles of bf16 have two at least
        assert one.size == rows * graph.values[one.value].bytes


@pytest.mark.aot_tpu
@pytest.mark.parametrize("passes", [1, 2])
def test_what_four_products_read_is_converted_once(passes: int) -> None:
    """Forward passes of one set of weights, each of which converts it, and their backward passes."""

    def loss(weights: Any, *xs: Any) -> Any:
        return sum(jnp.sum(jnp.square(jnp.tanh(x) @ weights.astype(x.dtype)).astype(jnp.float32)) for x in xs)

    weights = jax.ShapeDtypeStruct((1024, 4096), jnp.float32)
    x = jax.ShapeDtypeStruct((DEVICES, ROWS, 1024), jnp.bfloat16)
    graph, predicted = found(jax.grad(loss, tuple(range(passes + 1))), (weights, *[x] * passes))
    gradients = jax.grad(loss, tuple(range(passes + 1)))
    compiled = converted(gradients, (weights, *[x] * passes))
    assert [graph.values[one.value].shape for one in predicted] == compiled == [(1024, 4096)] * (passes - 1)
    assert [one.size for one in predicted] == [2 * 1024 * 4096] * (passes - 1)


def test_nothing_is_converted_that_is_narrow_or_moved() -> None:
    gradients = jax.grad(project, (0, 1))
    assert not found(gradients, arguments(jnp.bfloat16))[1]
    assert not found(gradients, arguments(), cut=0)[1]


def test_loops_convert_their_stacks_before_they_begin() -> None:
    def loss(stack: Any, x: Any) -> Any:
        def layer(x: Any, weights: Any) -> Any:
            heads = jnp.einsum("btd,dhk->bthk", x, weights.astype(jnp.bfloat16))
            return jnp.tanh(heads.reshape(x.shape)), None

        return jnp.sum(jax.lax.scan(layer, x, stack)[0].astype(jnp.float32))

    stack = jax.ShapeDtypeStruct((4, 1024, 8, 128), jnp.float32)
    assert not found(jax.grad(loss), (stack, arguments()[1]))[1]


def looks_up(tied: bool, form: str) -> Any:
    """The loss of what follows from rows of a table, with the same table for its logits, or another."""

    def loss(tables: Any, words: Any) -> Any:
        table, other = (t.astype(jnp.bfloat16) for t in tables)
        h, head = jnp.tanh(table[words]), table if tied else other
        logits = h @ head.T if form == "transposed" else jnp.einsum("bd,vd->bv", h, head)
        return jnp.mean(jax.nn.logsumexp(logits.astype(jnp.float32), -1))

    return loss


@pytest.mark.aot_tpu
@pytest.mark.parametrize(("tied", "form"), [(True, "transposed"), (True, "as it is"), (False, "as it is")])
def test_a_table_is_converted_whole_before_its_rows_are_gathered(tied: bool, form: str) -> None:
    tables = [jax.ShapeDtypeStruct((words, 512), jnp.float32) for words in (4096, 8192)]
    given = tables, jax.ShapeDtypeStruct((DEVICES * ROWS,), jnp.int32)
    gradients = jax.grad(looks_up(tied, form))
    graph, predicted = found(gradients, given)
    assert converted(gradients, given) == [(4096, 512)]
    (one,) = predicted
    readers = [op.index for op in graph.ops if op.primitive in ("gather", "dot_general")]
    assert graph.values[one.value].shape == (4096, 512) and one.size == 4096 * 512 * 2
    assert one.start == readers[0]
    assert one.stop > readers[2] if tied else one.stop == readers[0] + 1
