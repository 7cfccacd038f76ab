"""Live intervals against a walk that runs every loop and notes who reads what when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxplan.ir import Graph, live_intervals, trace


def shape(*extents: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(extents, jnp.float32)


def executed(graph: Graph) -> list[int]:
    """Indices of operations in the order they run, every loop run twice: what one iteration leaves, the next finds."""
    bodies = {loop.start: loop.stop for loop in reversed(graph.loops) if loop.stop > loop.start}

    def run(start: int, stop: int, outer: bool) -> list[int]:
        order, at = [], start
        while at < stop:
            if at in bodies and (outer or at != start):
                order += 2 * run(at, bodies[at], False)
                at = bodies[at]
            else:
                order.append(at)
                at += 1
        return order

    return run(0, len(graph.ops), True)


def alive_by_walking(graph: Graph) -> list[set[int]]:
    """For every operation the values that exist while it runs: made before, and read now or later.

    A value read at a later moment is needed at every moment from the one at which it was last made.
    """
    order = executed(graph)
    alive: list[set[int]] = [set() for _ in graph.ops]
    made: dict[int, int] = {}
    for moment, index in enumerate(order):
        op = graph.ops[index]
        for value in op.operands:
            if value in made:
                for between in range(made[value], moment + 1):
                    alive[order[between]].add(value)
        for value in op.results:
            made[value] = moment
            alive[index].add(value)
    for value in graph.outputs:
        if value in made:
            for between in range(made[value], len(order)):
                alive[order[between]].add(value)
    return alive


def _chain(w: Any, x: Any) -> Any:
    y = jnp.tanh(x @ w)
    return (y @ w) + y


def _scan(w: Any, x: Any) -> Any:
    scale = jnp.sin(w)  # made outside, read in every iteration
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ scale) + c, None), x, None, length=4)[0] @ w


def _grad_of_scan(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=4)[0].sum()

    return jax.grad(loss)(w)


def _nested(w: Any, x: Any) -> Any:
    def outer(c: Any, _: Any) -> Any:
        k = jnp.cos(c)
        return jax.lax.scan(lambda d, _: (jnp.tanh(d @ w) + k, None), c, None, length=2)[0] + k, None

    return jax.lax.scan(outer, x, None, length=3)[0]


def _while(w: Any, x: Any) -> Any:
    kept = jnp.sin(x)
    return jax.lax.while_loop(lambda c: c.sum() < 3, lambda c: c @ w + kept, x) + kept


PROGRAMS = [_chain, _scan, _grad_of_scan, _nested, _while]


@pytest.mark.parametrize("program", PROGRAMS)
def test_whatever_a_walk_finds_alive_is_in_its_interval(program: Callable[..., Any]) -> None:
    graph = trace(program, (shape(8, 8), shape(8, 8)), {}).graph
    intervals = live_intervals(graph)
    for at, values in enumerate(alive_by_walking(graph)):
        for value in values:
            start, stop = intervals[value]
            assert start <= at < stop, (graph.ops[at].primitive, graph.values[value])


@pytest.mark.parametrize("program", PROGRAMS)
def test_intervals_are_no_longer_than_the_walk_needs(program: Callable[..., Any]) -> None:
    """Except for what is allocated for its whole loop: carries and stacks."""
    graph = trace(program, (shape(8, 8), shape(8, 8)), {}).graph
    alive = alive_by_walking(graph)
    makers = graph.producers()
    around = {"carry_init", "scan_stack"}
    for value, (start, stop) in enumerate(live_intervals(graph)):
        if makers[value] < 0 or graph.ops[makers[value]].primitive in around:
            continue
        for at in range(start, stop):
            assert value in alive[at], (at, graph.ops[at].primitive, graph.ops[makers[value]].primitive)


def test_stacks_live_for_their_loop_and_as_long_as_they_are_read() -> None:
    graph = trace(_grad_of_scan, (shape(8, 8), shape(8, 8)), {}).graph
    forward, backward = (loop for loop in graph.loops if loop.stop > loop.start)
    intervals = live_intervals(graph)
    stacks = [op.results[0] for op in graph.ops if op.primitive == "scan_stack"]
    assert stacks
    for value in stacks:
        assert intervals[value] == (forward.start, backward.stop)


@pytest.mark.parametrize("donate", [(), (0,)])
def test_arguments_live_to_the_end_unless_they_are_donated(donate: tuple[int, ...]) -> None:
    graph = trace(
        lambda w, x: (x @ w).sum() * jnp.cos(x), (shape(8, 8), shape(8, 8)), {}, donate_argnums=donate
    ).graph
    w, x = (live_intervals(graph)[v] for v in graph.inputs)
    product = next(op.index for op in graph.ops if op.primitive == "dot_general")
    assert w == (0, product + 1 if donate else len(graph.ops))
    assert x == (0, len(graph.ops))


def test_unused_arguments_take_no_time() -> None:
    graph = trace(lambda w, x: x * 2, (shape(8), shape(8)), {}, donate_argnums=(0,)).graph
    start, stop = live_intervals(graph)[graph.inputs[0]]
    assert start == stop


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_loops_around_an_operation_are_those_that_hold_it(program: Callable[..., Any]) -> None:
    graph = trace(program, (shape(8, 8), shape(8, 8)), {}).graph
    for op, around in zip(graph.ops, graph.loops_around(), strict=True):
        assert list(around) == [(a.start, a.stop) for a in graph.loops if a.start <= op.index < a.stop]
