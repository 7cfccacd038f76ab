"""Elements taken by index and added to, as by a cross entropy: what is in memory for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxplan.cost import CostModel, MemoryProfile, Traffic, narrowed, step_memory, traffic
from jaxplan.cost.memory import _taken_out
from jaxplan.hardware import axis_links, load_profile
from jaxplan.ir import Graph, trace
from jaxplan.sharding import UNREDUCED, graph_rules, strategies

AXES = (("data", 8),)
ROWS, DIM, WORDS = 64, 32, 4096
H = jax.ShapeDtypeStruct((ROWS, DIM), jnp.bfloat16)
W = jax.ShapeDtypeStruct((DIM, WORDS), jnp.bfloat16)
Y = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
LOGITS = 2 * ROWS * WORDS
"""Bytes in bf16."""

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def crossed(fn: Callable[..., Any], *shapes: Any, platform: str) -> tuple[Graph, Traffic]:
    graph = trace(fn, shapes, {}).graph
    return graph, traffic(graph, graph_rules(graph), platform)


def memory(fn: Callable[..., Any], *shapes: Any, hardware: str, pending: Any = ()) -> MemoryProfile:
    """Of a device that has everything whole, but its share alone of the sum that `pending` primitives make last."""
    profile = load_profile(hardware)
    links = axis_links(profile, AXES)
    model = CostModel(profile=profile, axes=AXES, links=tuple(links[name] for name, _ in AXES))
    graph, crossing = crossed(fn, *shapes, platform=profile.kind)
    made = {v.index: np.array([-1], np.int8) for v in graph.values if not v.constant}
    reads = {(op.index, p): made[v] for op in graph.ops for p, v in enumerate(op.operands) if v in made}
    for op in [op for op in graph.ops if op.primitive in pending][-1:]:
        made[op.results[0]] = np.array([UNREDUCED], np.int8)
        reads |= {use: np.array([0], np.int8) for use in graph.uses()[op.results[0]]}
    return step_memory(graph, AXES, model, crossing, ["batch"] * len(graph.inputs), made, reads, {})


def stored(fn: Callable[..., Any], *shapes: Any, platform: str, primitive: str = "scatter-add") -> list[bool]:
    """Whether the results of a primitive are in memory."""
    graph, crossing = crossed(fn, *shapes, platform=platform)
    return [crossing.stored[op.results[0]] for op in graph.ops if op.primitive == primitive]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_one_element_of_each_row_is_selected_on_tpu(axis: int) -> None:
    """Scatters compiled for v5e, the gradients of `take_along_axis`: none with one index a row, one with two."""
    shape = jax.ShapeDtypeStruct((8, 16, 32), jnp.float32)

    def step(x: Any, labels: Any) -> Any:
        taken = jax.grad(lambda x: jnp.sum(jnp.take_along_axis(jnp.exp(x), labels, axis) ** 2))(x)
        return jnp.sum(taken * x)

    for indices, kept in ((1, False), (2, True)):
        size = [8, 16, 32]
        size[axis] = indices
        assert stored(step, shape, jax.ShapeDtypeStruct(size, jnp.int32), platform="tpu") == [kept]


def test_rows_that_are_counted_by_indices_are_scattered() -> None:
    def step(x: Any, labels: Any) -> Any:
        return jax.grad(lambda x: -jax.nn.log_softmax(x)[jnp.arange(ROWS), labels].mean())(x) @ x.T

    shape = jax.ShapeDtypeStruct((ROWS, WORDS), jnp.float32)
    assert stored(step, shape, Y, platform="tpu") == [True]


@pytest.mark.parametrize("form", ["convert", "slice"])
def test_a_gather_on_tpu_reads_bf16_logits_in_f32(form: str) -> None:
    """Three times the bf16 logits are what a loss and its gradient take, compiled for v5e: f32 ones beside them."""

    def loss(w: Any, h: Any, y: Any) -> Any:
        logits = (h @ w).astype(jnp.float32)
        if form == "slice":
            logits, y = logits[:-1], y[:-1]
        return cross_entropy(logits, y).mean()

    found = memory(jax.value_and_grad(loss), W, H, Y, hardware="tpu-v5e")
    assert found.parts["copies"] == pytest.approx(2 * LOGITS, rel=0.03)
    arrays = found.peak_bytes - found.parts["tables"]
    assert arrays == pytest.approx(3 * LOGITS + 2 * DIM * (2 * WORDS + ROWS), rel=0.03)


@pytest.mark.parametrize("wide", [False, True])
def test_log_probabilities_are_made_beside_the_gradient_on_tpu(wide: bool) -> None:
    """Of bf16 logits of all but the last row, whose gradient is written: 3.87 GB of a network on v5e, where the f32
    log-probabilities alone are taken from, and 2.97 were planned."""

    def loss(w: Any, h: Any, y: Any) -> Any:
        logits = jnp.matmul(h, w, preferred_element_type=jnp.float32 if wide else None).astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits[:-1]), y[:-1, None], 1).mean()

    graph = trace(jax.value_and_grad(loss, (0, 1)), (W, H, Y), {}).graph
    graph = narrowed(graph, graph_rules(graph), "tpu")
    crossing = traffic(graph, graph_rules(graph), "tpu")
    beside = [one for one in crossing.wide if one.made > one.gather]
    found = [(graph.values[graph.ops[one.gather].operands[0]], graph.ops[one.made]) for one in beside]
    assert [(value.dtype, op.primitive) for value, op in found] == ([] if wide else [("float32", "add_any")])


def test_sliced_log_probabilities_are_made_beside_the_gradient_on_tpu() -> None:
    """Of all rows, of which all but the last are taken from: 1,203 MB of a network on v5e, where 1,067 were planned."""

    def loss(w: Any, h: Any, y: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax((h @ w).astype(jnp.float32))[:-1], y[:-1, None], 1).mean()

    graph = trace(jax.value_and_grad(loss, (0, 1)), (W, H, Y), {}).graph
    graph = narrowed(graph, graph_rules(graph), "tpu")
    beside = [one for one in traffic(graph, graph_rules(graph), "tpu").wide if one.made > one.gather]
    assert [graph.ops[one.made].primitive for one in beside] == ["convert_element_type"]
    assert graph.values[graph.ops[beside[0].gather].operands[0]].shape == (ROWS - 1, WORDS)


def test_a_selection_compares_what_lies_on_each_device_on_tpu() -> None:
    """Made whole for readers of pieces, 13 GB of a vocabulary's gradients were written (a Hyena on eight v5e)."""

    def loss(logits: Any, y: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()

    logits = jax.ShapeDtypeStruct((8 * ROWS, 32 * WORDS), jnp.float32)
    graph = trace(jax.grad(loss), (logits, jax.ShapeDtypeStruct((8 * ROWS,), jnp.int32)), {}).graph
    rules = graph_rules(graph)
    (op,) = (op for op in graph.ops if op.primitive == "scatter-add")
    profile = load_profile("tpu-v5e")
    model = CostModel(profile=profile, axes=AXES, links=(axis_links(profile, AXES)["data"],))
    options = strategies(rules[op.index], AXES)
    seconds = model.op_seconds(op, rules[op.index], options, graph, traffic(graph, rules, "tpu"))
    whole = (options.results[0] < 0).all(axis=1)
    assert whole.sum() == 1 and seconds[~whole] == pytest.approx(float(seconds[whole][0]) / 8, rel=1e-3)


def test_capped_logits_are_made_once_on_tpu() -> None:
    """By the logits' own kernel, in f32 and with nothing to wait for: 2848 MB of a GPT were planned, 1988 compiled."""

    def loss(w: Any, h: Any, y: Any) -> Any:
        logits = 15 * jnp.tanh((h @ w).astype(jnp.float32) / 15)
        return cross_entropy(logits, y).mean()

    graph, crossing = crossed(jax.value_and_grad(loss, (0, 1)), W, H, Y, platform="tpu")
    gather = next(op for op in graph.ops if op.primitive == "gather")
    assert crossing.stored[gather.operands[0]] and crossing.wide == ()


def test_a_bias_may_be_added_before_elements_are_taken_on_tpu() -> None:
    """In f32, to bf16 logits: they are kept, and both are in memory for the gather (a DeBERTa on v5e: -14 %)."""

    def loss(w: Any, h: Any, y: Any, bias: Any) -> Any:
        return cross_entropy((h @ w).astype(jnp.float32) + bias, y).mean()

    bias = jax.ShapeDtypeStruct((WORDS,), jnp.float32)
    graph, crossing = crossed(jax.value_and_grad(loss, (0, 1)), W, H, Y, bias, platform="tpu")
    product = next(op for op in graph.ops if op.primitive == "dot_general")
    (wide,) = crossing.wide
    assert crossing.stored[product.results[0]] and graph.ops[wide.made].primitive == "add"
    assert not crossing.stored[graph.ops[wide.made].results[0]]


def test_what_is_gathered_from_wide_logits_is_gathered_at_once() -> None:
    """Whatever waits for its indices in the program: a logsumexp stands between them and the logits."""

    def loss(w: Any, h: Any, y: Any) -> Any:
        logits = (h @ w).astype(jnp.float32)[:-1]
        return (jax.nn.logsumexp(logits, 1) - jnp.take_along_axis(logits, y[:-1, None], 1)[:, 0]).mean()

    found = memory(jax.grad(loss, (0, 1)), W, H, Y, hardware="tpu-v5e")
    assert found.peak_bytes - found.parts["tables"] < (1 + 2 + 0.1) * LOGITS + 2 * DIM * (2 * WORDS + ROWS)


def test_a_slice_of_a_selection_is_selected_for_it() -> None:
    """One element a row of zeros, that a plan has whole on every device: XLA compares its slice's indices alone."""

    def step(h: Any, w: Any, y: Any) -> Any:
        return jax.grad(lambda h: jnp.take_along_axis(jax.nn.log_softmax(h @ w), y[:, None], 1).mean())(h)

    graph, _ = crossed(step, H, W, Y, platform="tpu")
    made = {v.index: np.array([-1], np.int8) for v in graph.values}
    reads = {(op.index, p): np.array([0], np.int8) for op in graph.ops for p, v in enumerate(op.operands)}
    makers = [*filter(lambda op: graph.values[op.results[0]].shape == (ROWS, WORDS), graph.ops)]
    inside = [any(v in op.results for op in makers) for v in range(len(graph.values))]
    taken = _taken_out(graph, inside, range(len(graph.ops)), made, reads)
    assert {op.primitive for op in makers if op.results[0] not in taken} == {"scatter-add"}


def test_a_table_is_gathered_from_as_it_is() -> None:
    graph, crossing = crossed(
        lambda table, y: table.astype(jnp.bfloat16)[y] @ jnp.ones((DIM, DIM), jnp.bfloat16),
        jax.ShapeDtypeStruct((WORDS, DIM), jnp.float32), Y, platform="tpu",
    )  # fmt: skip
    assert crossing.wide == ()
    assert not any(crossing.stored[op.results[0]] for op in graph.ops if op.primitive == "convert_element_type")


def test_what_is_padded_for_a_product_is_in_memory_on_tpu() -> None:
    """The gradient of `logits[:-1]`, which the product's kernel pads, and not that of all logits."""

    def loss(w: Any, h: Any, y: Any, cut: int) -> Any:
        return cross_entropy((h @ w)[:cut].astype(jnp.float32), y[:cut]).mean()

    def kept(cut: int) -> int:
        graph, crossing = crossed(
            jax.grad(lambda h, w, y: loss(w, h, y, cut)), H, W, Y, platform="tpu"
        )
        sizes = [v.shape for v in graph.values if crossing.stored[v.index] and v.dtype == "bfloat16"]
        return sizes.count((cut, WORDS))

    assert kept(ROWS - 1) == 2
    assert kept(ROWS) == 1


def test_zeros_that_are_scattered_into_and_added_are_no_buffer_on_gpu() -> None:
    """XLA for GPU scatters a label's gradient onto the softmax's, in its place: two f32 arrays, with the logits."""
    shape = jax.ShapeDtypeStruct((ROWS, WORDS), jnp.float32)

    def step(x: Any, y: Any) -> Any:
        return jax.grad(lambda x: cross_entropy(jnp.exp(x), y).mean())(x).T @ x

    assert not stored(step, shape, Y, platform="gpu")[-1]
    assert stored(step, shape, Y, platform="gpu", primitive="add_any")[-1]


def test_a_gather_on_gpu_takes_of_what_it_computes() -> None:
    def step(x: Any, y: Any) -> Any:
        return jnp.take_along_axis(jnp.where(x > 0, x, -1.0) * 2, y[:, None], 1)

    shape = jax.ShapeDtypeStruct((ROWS, WORDS), jnp.float32)
    for platform, kept in (("gpu", False), ("tpu", True)):
        assert any(stored(step, shape, Y, platform=platform, primitive="mul")) == kept


def test_what_a_sum_and_a_product_are_made_of_is_there_at_once_on_gpu() -> None:
    """A learned temperature: its gradient is a sum beside the one that two products read, three arrays at a time."""

    def loss(h: Any, w: Any, scale: Any, y: Any) -> Any:
        logits = jnp.where(y[:, None] > 3, -1e9, (h @ w) * scale)
        return cross_entropy(logits, y).mean()

    h, w = (jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (H, W))
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    found = memory(jax.grad(loss, (0, 1, 2)), h, w, scale, Y, hardware="h100")
    assert found.parts["activations"] == 3 * 2 * LOGITS
    found = memory(jax.grad(loss, (0, 1)), h, w, scale, Y, hardware="h100")
    assert found.parts["activations"] < 2.1 * 2 * LOGITS


def test_what_a_ring_of_products_reads_is_in_memory_on_tpu() -> None:
    def loss(w: Any, h: Any, y: Any) -> Any:
        return cross_entropy(h @ w, y).mean() + 0.5

    def copies(dtype: Any, pending: Any) -> int:
        h, w = (jax.ShapeDtypeStruct(x.shape, dtype) for x in (H, W))
        found = memory(lambda w, h, y: w - jax.grad(loss)(w, h, y), w, h, Y, hardware="tpu-v5e", pending=pending)
        return found.parts.get("copies", 0)

    assert copies(jnp.float32, ["dot_general"]) >= LOGITS
    assert copies(jnp.bfloat16, ["dot_general"]) < LOGITS / 4
    assert copies(jnp.float32, []) < LOGITS / 4
