"""Loose ends against a search for products before and behind every value."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxplan.ir import Graph, start_shares, total_shares, trace

SQUARE = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def graph_of(step: Any, *shapes: Any) -> Graph:
    return trace(step, shapes, {}).graph


def products(graph: Graph) -> list[bool]:
    return [op.primitive == "dot_general" for op in graph.ops]


def sums(graph: Graph) -> list[bool]:
    return [op.primitive in ("dot_general", "reduce_sum") for op in graph.ops]


def reached(graph: Graph, start: int, *, forward: bool) -> set[int]:
    """Operations that depend on value `start`, or that it depends on; for programs without loops."""
    found: set[int] = set()
    values = [start]
    while values:
        value = values.pop()
        for op in graph.ops:
            if op.index not in found and value in (op.operands if forward else op.results):
                found.add(op.index)
                values += op.results if forward else op.operands
    return found


def test_what_has_products_on_both_sides_starts_alone_and_nothing_else_does() -> None:
    def step(a: jax.Array, b: jax.Array, x: jax.Array) -> Any:
        hidden = jnp.tanh(x @ (2 * a))
        out = jnp.exp(hidden @ b)
        return out + 1, jnp.sum(hidden)

    graph = graph_of(step, SQUARE, SQUARE, SQUARE)
    is_product, shares = products(graph), start_shares(graph, products(graph), sums(graph)).sent
    for value in range(len(graph.values)):
        sides = [any(is_product[op] for op in reached(graph, value, forward=f)) for f in (False, True)]
        if all(sides):
            assert shares[value] == 1.0
    ends = {graph.values[v].index for v in graph.inputs[:2]} | set(graph.outputs)
    assert all(shares[value] < 1.0 for value in ends)


def test_the_gradients_of_a_loops_body_share_one_start() -> None:
    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w["a"]) @ w["b"], None), x, weights)[0])

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    stacked = jax.ShapeDtypeStruct((4, 8, 8), jnp.float32)
    graph = graph_of(step, {"a": stacked, "b": stacked}, SQUARE)
    starts = start_shares(graph, products(graph), sums(graph))
    shares = starts.sent
    backward = [loop for loop in graph.loops][-1]
    gradients = [
        op.results[0] for op in graph.ops[backward.start : backward.stop]
        if op.primitive == "dot_general" and shares[op.results[0]] < 1.0
    ]  # fmt: skip
    assert len(gradients) == 2  # of both weights; the gradient of what came in goes on to the next iteration
    assert sum(shares[value] for value in gradients) <= 1.0
    assert [starts.gathered[value] for value in gradients] == [1.0, 1.0]  # after their sums, by themselves


def test_what_a_loop_adds_up_shares_one_start_within_it_and_behind_it() -> None:
    """Gradients of microbatches: nothing waits for them within the loop, but for what the next iteration needs."""

    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any, x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.tanh(x @ weights["a"]) @ weights["b"])

        def microbatch(carry: Any, x: jax.Array) -> Any:
            total, state = carry
            total = jax.tree.map(jnp.add, total, jax.grad(loss)(weights, x + state))
            return (total, jnp.tanh(x @ state)), None

        zeros = jax.tree.map(jnp.zeros_like, weights)
        (total, state), _ = jax.lax.scan(microbatch, (zeros, x[0]), x)
        return jax.tree.map(lambda w, g: w - 0.1 * g / 4, weights, total), state

    graph = graph_of(step, {"a": SQUARE, "b": SQUARE}, jax.ShapeDtypeStruct((4, 8, 8), jnp.float32))
    shares = start_shares(graph, products(graph), sums(graph)).sent
    carries = {op.operands[1]: op.operands[0] for op in graph.ops if op.primitive == "carry_next"}
    *added, (_, handed_on) = carries.items()
    assert [round(1 / shares[v]) for pair in added for v in pair] == [2] * 4
    assert shares[handed_on] == 1.0
    scaled = [op.results[0] for op in graph.ops if op.primitive == "div"]
    assert [round(1 / shares[v]) for v in scaled] == [2, 2]


def test_sums_alike_of_which_none_waits_for_another_start_together() -> None:
    def step(x: jax.Array, up: jax.Array, gate: jax.Array, down: jax.Array) -> Any:
        x = jnp.tanh(x @ up)
        x = (x - x.mean(axis=1, keepdims=True)) * (x * x).mean(axis=1, keepdims=True)  # both of the same x
        x = x - jnp.max(x * jnp.sum(x, axis=1, keepdims=True), axis=1, keepdims=True)  # one of the other
        return jnp.tanh((x @ up) * jnp.tanh(x @ gate)) @ down

    graph = graph_of(step, SQUARE, SQUARE, SQUARE, SQUARE)
    adding = [op.primitive in ("dot_general", "reduce_sum", "reduce_max") for op in graph.ops]
    shares = start_shares(graph, products(graph), adding).sent
    of = [(op.primitive, shares[op.results[0]]) for op in graph.ops if adding[op.index]]
    assert of[1:] == [
        ("reduce_sum", 0.5), ("reduce_sum", 0.5), ("reduce_sum", 1.0), ("reduce_max", 1.0),
        ("dot_general", 0.5), ("dot_general", 0.5), ("dot_general", 1.0),
    ]  # fmt: skip


def test_what_is_made_of_sums_alike_and_spread_again_is_gathered_together() -> None:
    def step(x: jax.Array, up: jax.Array, down: jax.Array) -> Any:
        x = x @ up
        mean, square = x.mean(axis=0), (x * x).mean(axis=0)
        scale = jax.lax.rsqrt(square - mean * mean)
        y = (x - mean[None]) * scale[None] + jnp.tanh(scale).sum()  # a number is spread, too, but starts by itself
        return y @ down

    graph = graph_of(step, SQUARE, SQUARE, SQUARE)
    adding = [op.primitive in ("dot_general", "reduce_sum") for op in graph.ops]
    starts = start_shares(graph, products(graph), adding)
    spread = [
        v for op in graph.ops if op.primitive in ("sub", "mul") for v in op.operands
        if graph.values[v].shape == (1, 8) and graph.values[op.results[0]].shape == (8, 8)
    ]  # fmt: skip
    assert len(spread) == 2
    assert [starts.gathered[v] for v in spread] == [0.5, 0.5]
    assert all(starts.gathered[v] == 1.0 for op in graph.ops if op.primitive == "tanh" for v in op.results)


def test_whichever_parts_of_a_total_are_summed_they_share_one_start() -> None:
    def norm(*gradients: jax.Array) -> Any:
        squares = [jnp.sum(g**2) for g in gradients]
        return jnp.sqrt(sum(squares)), jnp.sum(gradients[0])

    graph = graph_of(norm, *[SQUARE] * 4)
    shares = total_shares(graph)
    sums = [op.results[0] for op in graph.ops if op.primitive == "reduce_sum"]
    adds = [op.results[0] for op in graph.ops if op.primitive == "add"]
    assert [shares[v] for v in sums] == [0.125, 0.125, 0.125, 0.125, 0.5]  # the last is a total beside the norm
    # Python's `sum` begins with zero; the total itself is one start, if it is summed last
    assert [shares[v] for v in adds] == [0.125, 0.125, 0.125, 0.5]


def test_a_number_that_others_read_is_a_total_of_its_own() -> None:
    def step(a: jax.Array, b: jax.Array, c: jax.Array) -> Any:
        ours = jnp.sum(a) + jnp.sum(b)
        return jnp.exp(ours), ours + jnp.sum(c)

    graph = graph_of(step, SQUARE, SQUARE, SQUARE)
    shares = total_shares(graph)
    first, second = (op.results[0] for op in graph.ops if op.primitive == "add")
    assert (shares[first], shares[second]) == (0.5, 0.5)
    assert [shares[op.results[0]] for op in graph.ops if op.primitive == "reduce_sum"] == [0.25, 0.25, 0.5]


def test_totals_start_together_unless_one_waits_for_another() -> None:
    def step(a: jax.Array, b: jax.Array) -> Any:
        norm = jnp.sqrt(jnp.sum(a**2) + jnp.sum(b**2))
        clipped = [x / norm for x in (a, b)]
        return [x / jnp.max(x) for x in clipped], jnp.all(jnp.isfinite(a))

    graph = graph_of(step, SQUARE, SQUARE)
    shares = total_shares(graph)
    of = [(op.primitive, shares[op.results[0]]) for op in graph.ops if op.primitive.startswith("reduce")]
    assert sorted(of) == [("reduce_and", 0.5), *[("reduce_max", 0.5)] * 2, *[("reduce_sum", 0.25)] * 2]
