"""The order from the results on: operands before who reads them, loops whole, and the results' own order decides."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxplan.ir import Graph, post_order, trace


def graph_of(function: Any, *shapes: tuple[int, ...]) -> Graph:
    return trace(function, tuple(np.zeros(shape, np.float32) for shape in shapes), {}).graph


def places(graph: Graph, primitive: str) -> list[int]:
    order = post_order(graph)
    return [order[op.index] for op in graph.ops if op.primitive == primitive]


def test_what_is_returned_first_is_met_first() -> None:
    def step(x: jax.Array, forward: bool) -> dict[str, jax.Array]:
        made = {"b": jnp.sin(x), "a": jnp.cos(x)}  # traced in this order, returned by name
        return made if forward else {"b": made["b"]}

    graph = graph_of(lambda x: step(x, True), (4,))
    (sine,), (cosine,) = places(graph, "sin"), places(graph, "cos")
    assert cosine < sine


def test_every_operation_has_a_place_behind_what_it_reads_and_loops_are_whole() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
                return jnp.tanh(x @ w), jnp.sum(x)

            x_, sums = jax.lax.scan(layer, x, w)
            return jnp.sum(x_) + jnp.sum(sums)

        return jax.value_and_grad(loss)(w)

    graph = graph_of(step, (3, 8, 8), (4, 8))
    order = post_order(graph)
    assert sorted(order) == list(range(len(graph.ops)))
    producers = graph.producers()
    outside = {op for loop in graph.loops for op in range(loop.start, loop.stop)}
    for op in graph.ops:
        before = [order[producers[v]] for v in op.operands if producers[v] >= 0]
        assert op.index in outside or all(place < order[op.index] for place in before)
    assert len(graph.loops) == 2
    for loop in graph.loops:
        inside = sorted(order[loop.start : loop.stop])
        assert inside == list(range(inside[0], inside[0] + len(inside)))


def test_a_body_begins_with_what_it_carries() -> None:
    def step(x: jax.Array) -> Any:
        def body(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            stacked = jnp.cos(x)
            return jnp.sin(x), stacked

        return jax.lax.scan(body, x, None, length=3)

    graph = graph_of(step, (4,))
    (sine,), (cosine,) = places(graph, "sin"), places(graph, "cos")
    assert sine < cosine


def test_gradients_are_combined_by_the_names_of_what_they_update() -> None:
    """Of an MLP of eight thousand on eight H100 head and layer_0 go together, as compiled by jax 0.10.2."""

    def step(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        def loss(params: dict[str, jax.Array]) -> jax.Array:
            made = x
            for name in ("layer_0", "layer_1", "head"):
                made = jnp.tanh(made @ params[name])
            return jnp.sum(made)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    weights = {name: np.zeros((8, 8), np.float32) for name in ("head", "layer_0", "layer_1")}
    graph = trace(step, (weights, np.zeros((4, 8), np.float32)), {}).graph
    order = post_order(graph)
    updates = [order[graph.producers()[value]] for value in graph.outputs]
    assert updates == sorted(updates)
