"""Buffers that XLA for GPU fills together: what one number more or less in the program makes of the peak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.cost import filled_since, simulate_memory, traffic
from jaxplan.ir import Graph, trace
from jaxplan.sharding import graph_rules

AXES = (("data", 4), ("model", 2))
WHOLE = np.array([-1, -1], np.int8)
TABLE, STEPS, WIDTH = 4096, 16, 512
SCATTERED = (
    jax.ShapeDtypeStruct((TABLE, 64), jnp.float32),
    jax.ShapeDtypeStruct((8, 64), jnp.float32),
    jax.ShapeDtypeStruct((8,), jnp.int32),
)
TABLE_BYTES = TABLE * 64 * 4


def peak(fn: Callable[..., Any], *shapes: Any, platform: str = "gpu") -> int:
    """Bytes at the peak with everything replicated."""
    graph: Graph = trace(fn, shapes, {}).graph
    crossing = traffic(graph, graph_rules(graph), platform)
    made = {v.index: WHOLE for v in graph.values if not v.constant}
    reads = {(op.index, p): WHOLE for op in graph.ops for p, v in enumerate(op.operands) if v in made}
    return simulate_memory(
        graph, AXES, crossing.stored, ["batch"] * len(graph.inputs), made, reads, inside=crossing.inside,
        second_stacks=crossing.second_stacks, fills=crossing.fills, times=crossing.times, platform=platform,
    ).peak_bytes  # fmt: skip


def scattered(otherwise: float) -> Callable[..., Any]:
    """Rows added up in a table of zeros, and a `where` of the table's shape."""

    def step(table: Any, rows: Any, where: Any) -> Any:
        gradient = jnp.zeros_like(table).at[where].add(rows)
        return jnp.where(gradient > table, jax.lax.rsqrt(gradient), otherwise)

    return step


def test_zeros_that_are_written_over_are_kept_for_who_reads_them() -> None:
    assert peak(scattered(0.0), *SCATTERED) - peak(scattered(1.0), *SCATTERED) == TABLE_BYTES
    assert peak(scattered(0.0), *SCATTERED, platform="tpu") == peak(scattered(1.0), *SCATTERED, platform="tpu")


def moved(fn: Callable[..., Any], *shapes: Any, platform: str = "gpu") -> float:
    """Bytes that kernels read and write."""
    graph = trace(fn, shapes, {}).graph
    crossing = traffic(graph, graph_rules(graph), platform)
    return sum(map(sum, crossing.reads)) + sum(map(sum, crossing.writes))


def test_zeros_that_are_kept_are_written_and_read() -> None:
    """Adagrad on eight tables of DLRM took 7.4 ms on eight H100, of which 5.2 were predicted."""
    assert moved(scattered(0.0), *SCATTERED) - moved(scattered(1.0), *SCATTERED) == 2 * TABLE_BYTES
    assert moved(scattered(0.0), *SCATTERED, platform="tpu") == moved(scattered(1.0), *SCATTERED, platform="tpu")


def layered(widths: tuple[int, ...]) -> Callable[..., Any]:
    """Loops one after the other, each stacking what it makes for its sum."""

    def step(x: Any) -> Any:
        total = jnp.zeros(())
        for width in widths:

            def squares(c: Any, _: None, width: int = width) -> Any:
                return c, (c @ c)[:width]

            _, made = jax.lax.scan(squares, x, None, length=STEPS)
            total += jnp.cumsum(made, axis=0).max()
        return total

    return step


@pytest.mark.parametrize(("platform", "more"), [("gpu", 1), ("tpu", -1)])
def test_equal_stacks_of_two_loops_are_there_from_the_first(platform: str, more: int) -> None:
    """Of unequal shape each is there when the loop before its own is done; for TPU equal ones are filled right before
    their own."""
    x = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    stack_bytes = STEPS * WIDTH * WIDTH * 4
    alike = peak(layered((WIDTH,) * 3), x, platform=platform)
    unlike = peak(layered((WIDTH, WIDTH - 8, WIDTH - 16)), x, platform=platform)
    assert alike - unlike == pytest.approx(more * stack_bytes, abs=0.04 * stack_bytes)


def test_what_is_summed_before_it_is_added_is_scattered_into_zeros() -> None:
    """GraphSAGE's gradients on H100: scattered onto the other addend only where both lie alike."""

    def step(table: Any, rows: Any, where: Any) -> Any:
        first = jnp.zeros_like(table).at[where].add(rows)
        return jnp.zeros_like(table).at[where + 1].add(rows * 2) + jnp.tanh(first), first

    graph = trace(step, SCATTERED, {}).graph
    crossing = traffic(graph, graph_rules(graph), "gpu")
    (fill,) = (one for one in crossing.fills if one.added)
    (first, made), (second, later) = *fill.written, *fill.added
    assert made < later
    known = filled_since(crossing.fills, lambda value: True)[0]
    assert known == {first: made}
    assert filled_since(crossing.fills, lambda value: True, lambda value: True)[0] == {first: made, second: made}
    assert second not in filled_since(crossing.fills, lambda value: None, lambda value: True)[0]


def recurrent(first: int, second: int | None = None) -> Callable[..., Any]:
    """Something large, a loop of `first` iterations that keeps what it computes, perhaps another one."""

    def loss(weights: Any, x: Any) -> Any:
        inner = jnp.sin(jax.lax.stop_gradient(jnp.tanh(jnp.cos(x) @ weights[0]))[:8, :WIDTH])

        def body(carry: Any, _: None) -> Any:
            return jnp.tanh(carry @ weights[1]), None

        inner, _ = jax.lax.scan(body, inner, None, length=first)
        if second is not None:
            inner, _ = jax.lax.scan(body, jnp.sin(inner), None, length=second)
        return inner.sum()

    return jax.grad(loss)


@pytest.mark.parametrize(("second", "early"), [(None, 1), (2 * STEPS, 2), (STEPS, 0)])
def test_a_stack_is_there_when_the_loop_before_is_done_on_tpu(second: int | None, early: int) -> None:
    """Its buffer waits for nothing; not where two loops have stacks of one shape (v5e: 1,031 MB, 879 without)."""
    x = jax.ShapeDtypeStruct((TABLE, WIDTH), jnp.float32)
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 2
    graph = trace(recurrent(STEPS, second), (weights, x), {}).graph
    crossing = traffic(graph, graph_rules(graph), "tpu")
    found = {when for fill in crossing.fills for _, when in fill.written}
    done = min(graph.loops, key=lambda loop: loop.start).stop
    assert found == set([0, done][:early]) and not any(fill.read for fill in crossing.fills)
