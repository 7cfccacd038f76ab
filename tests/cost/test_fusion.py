"""Laws of fusion: what a step must read and write at the least, and what stays alive for what is computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxplan.cost import Traffic, simulate_memory, traffic
from jaxplan.ir import Graph, trace
from jaxplan.sharding import graph_rules

SIDE = 256
SIZE = SIDE * SIDE * 4
MATRIX = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
CHEAP: tuple[Callable[[Any], Any], ...] = (jnp.sin, jnp.abs, lambda x: x * 2, lambda x: x.T, lambda x: x + 1)


def crossing(fn: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> tuple[Graph, Traffic]:
    graph = trace(fn, args, {}, donate_argnums=donate).graph
    return graph, traffic(graph, graph_rules(graph), "tpu")


def whole(amounts: tuple[tuple[float, ...], ...]) -> float:
    """How many times a whole matrix crosses; vectors don't count."""
    return sum(size // SIZE for sizes in amounts for size in sizes)


@settings(deadline=None, max_examples=20)
@given(chain=st.lists(st.sampled_from(CHEAP), min_size=1, max_size=12))
def test_a_chain_of_cheap_operations_reads_its_argument_and_writes_its_result(
    chain: list[Callable[[Any], Any]],
) -> None:
    def step(x: Any) -> Any:
        for fn in chain:
            x = fn(x)
        return x

    _, crossed = crossing(step, MATRIX)
    assert (whole(crossed.reads), whole(crossed.writes)) == (1, 1)


@pytest.mark.parametrize("uses", [1, 2, 5])
def test_one_kernel_reads_a_tensor_once(uses: int) -> None:
    _, crossed = crossing(lambda x: sum(jnp.sin(x * n) for n in range(1, uses + 1)), MATRIX)
    assert whole(crossed.reads) == 1


def test_softmax_reads_once_for_the_maximum_once_for_the_sum_once_for_the_quotient() -> None:
    _, crossed = crossing(lambda x: jax.nn.softmax(x, axis=-1), MATRIX)
    assert (whole(crossed.reads), whole(crossed.writes)) == (3, 1)


def test_what_follows_a_product_is_written_instead_of_the_product() -> None:
    graph, crossed = crossing(lambda x, w, b: jax.nn.relu(x @ w + b), MATRIX, MATRIX, MATRIX)
    (product,) = [op for op in graph.ops if op.primitive == "dot_general"]
    assert not crossed.stored[product.results[0]]
    assert (whole(crossed.reads), whole(crossed.writes)) == (3, 1)


def test_a_product_that_two_kernels_read_is_written() -> None:
    graph, crossed = crossing(lambda x: jax.nn.softmax(x @ x, axis=-1), MATRIX)
    (product,) = [op for op in graph.ops if op.primitive == "dot_general"]
    assert crossed.stored[product.results[0]]


def peak(fn: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> int:
    """Matrices alive at the peak of an unpartitioned step."""
    graph, crossed = crossing(fn, *args, donate=donate)
    row = np.full(1, -1, np.int8)
    values = {v.index: row for v in graph.values if not v.constant}
    reads = {(op.index, i): row for op in graph.ops for i, v in enumerate(op.operands) if v in values}
    memory = simulate_memory(graph, (("x", 2),), crossed.stored, ["state"] * len(graph.inputs), values, reads)
    return memory.peak_bytes // SIZE


def test_the_next_value_of_a_donated_argument_is_written_over_it() -> None:
    def step(state: Any, gradient: Any) -> Any:
        return {"w": state["w"] * 0.9 + gradient}

    assert peak(step, {"w": MATRIX}, MATRIX, donate=(0,)) == 2
    assert peak(step, {"w": MATRIX}, MATRIX) == 3


def test_what_is_computed_again_keeps_alive_what_it_is_computed_from() -> None:
    def step(x: Any, keep: bool) -> Any:
        first = x @ x
        again = jnp.sin(first)
        second = first @ first
        last = (second @ second) @ x
        return last + again if keep else last

    without = peak(lambda x: step(x, False), MATRIX)
    assert peak(lambda x: step(x, True), MATRIX) == without + 1


def layers_backward(ws: Any, x: Any) -> Any:
    def loss(ws: Any) -> Any:
        body = jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), None))
        return jnp.sum(jax.lax.scan(body, x, ws)[0] ** 2)

    return jax.grad(loss)(ws), (x @ x) @ x


def test_on_gpu_a_weights_gradient_in_a_loop_waits_for_the_end_of_the_iteration() -> None:
    stack = jax.ShapeDtypeStruct((4, SIDE, SIDE), jnp.float32)
    graph = trace(layers_backward, (stack, MATRIX), {}).graph
    times = traffic(graph, graph_rules(graph), "gpu").times
    made = {v: op for op in graph.ops for v in op.results}
    for op in graph.ops:
        loops = [loop for loop in graph.loops if loop.start <= op.index < loop.stop]
        assert op.index <= times[op.index] and (times[op.index] == op.index if not loops else True)
        assert all(times[op.index] < loop.stop for loop in loops)
        for value in op.operands:
            if value in made and [x for x in graph.loops if x.start <= made[value].index < x.stop] == loops:
                assert times[made[value].index] <= times[op.index]
    stacks = [(op, made[op.operands[0]]) for op in graph.ops if op.primitive == "scan_stack"]
    stacks = [(op, made[last.operands[0]] if last.primitive == "transpose" else last) for op, last in stacks]
    gradients = [(op, product) for op, product in stacks if product.primitive == "dot_general"]
    assert gradients and all(times[product.index] == op.index for op, product in gradients)
    meanwhile = [i for op, product in gradients for i in range(product.index + 1, op.index)]
    assert any(graph.ops[i].primitive == "dot_general" for i in meanwhile)  # it waited


@pytest.mark.parametrize(("platform", "stored"), [("tpu", "float32"), ("gpu", "bfloat16")])
def test_scores_are_stored_as_they_are_exponentiated_on_tpu(platform: str, stored: str) -> None:
    """Three unrolled layers of attention, scores converted from bf16: 1055 MB compiled for v5e, 879 predicted before
    and 1030 since; a BERT of four layers 1441, 1271 and 1471 (jax 0.10.2, libtpu 0.0.42.1)."""

    def step(q: Any, k: Any) -> Any:
        def loss(q: Any) -> Any:
            scores = jnp.einsum("bthk,bshk->bhts", q, k).astype(jnp.float32) / 8
            weights = jax.nn.softmax(scores, -1).astype(q.dtype)
            return jnp.einsum("bhts,bshk->bthk", weights, k).astype(jnp.float32).sum()

        return jax.grad(loss)(q)

    shape = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)
    graph = trace(step, (shape, shape), {}).graph
    found = traffic(graph, graph_rules(graph), platform)
    (product,) = [op.results[0] for op in graph.ops if op.primitive == "dot_general"][:1]
    (argument,) = {op.operands[0] for op in graph.ops if op.primitive == "exp"}
    assert graph.values[argument].dtype == "float32"
    assert found.stored[argument] == (stored == "float32")
    assert found.stored[product] == (stored == "bfloat16")


def test_on_gpu_what_is_padded_for_a_product_is_written() -> None:
    """The gradient of all scores but the last token's: compiled for eight H100 there are three arrays of them at once,
    the scores, what is scattered to the labels, and their sum, padded."""

    def step(h: jax.Array, w: jax.Array, labels: jax.Array) -> Any:
        def loss(h: jax.Array, w: jax.Array) -> jax.Array:
            scores = jax.nn.log_softmax((h @ w)[:-1])
            return -jnp.take_along_axis(scores, labels[1:, None], axis=-1).mean()

        return jax.grad(loss, argnums=(0, 1))(h, w)

    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((SIDE, 64), (64, SIDE))]
    graph = trace(step, (*arguments, jax.ShapeDtypeStruct((SIDE,), jnp.int32)), {}).graph
    stored = traffic(graph, graph_rules(graph), "gpu").stored
    scores = [
        (op.primitive, stored[op.results[0]]) for op in graph.ops
        if op.primitive in ("add_any", "pad", "scatter-add") and len(graph.values[op.results[0]].shape) == 2
    ]  # fmt: skip
    assert scores == [("scatter-add", True), ("add_any", False), ("pad", True)]
