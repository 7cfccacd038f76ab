"""Operations behind the products that lead them, each behind what it reads."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import jax
import numpy as np

from jaxplan.cost.run_order import RunOrder
from jaxplan.ir import Graph, trace


def two_branches() -> tuple[Graph, list[int]]:
    """Two branches of two products each, one behind the other in the program, and their products."""

    def step(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        made = [jax.numpy.tanh(jax.numpy.tanh(x @ x) @ x) for x in (a, b)]
        return made[0], made[1]

    graph = trace(step, (np.zeros((8, 8), np.float32), np.zeros((8, 8), np.float32)), {}).graph
    return graph, [op.index for op in graph.ops if op.primitive == "dot_general"]


def ordered(graph: Graph, put: Sequence[int], leading: Collection[int], apart: Collection[int] = ()) -> list[int]:
    run = RunOrder(graph, graph.ops, leading, apart)
    for op in put:
        run.put([op])
    run.put(op.index for op in graph.ops)
    assert sorted(run.order) == list(range(len(graph.ops)))
    place = {op: i for i, op in enumerate(run.order)}
    producers = graph.producers()
    assert all(
        producers[v] < 0 or place[producers[v]] < place[op.index] for op in graph.ops for v in op.operands
    )
    return run.order


def test_what_stands_behind_a_product_comes_with_it() -> None:
    graph, (first, second, third, fourth) = two_branches()
    order = ordered(graph, (third, first, fourth, second), (first, second, third, fourth))
    tanhs = [op.index for op in graph.ops if op.primitive == "tanh"]
    assert order == [third, tanhs[2], first, tanhs[0], fourth, tanhs[3], second, tanhs[1]]


def test_a_product_brings_what_it_waits_for() -> None:
    graph, products = two_branches()
    order = ordered(graph, products[::-1], products)
    assert order.index(products[2]) < order.index(products[3]) < order.index(products[0])


def test_what_is_put_off_runs_when_it_is_wanted() -> None:
    graph, (first, second, third, fourth) = two_branches()
    order = ordered(graph, (third, fourth, second), (second, third, fourth), apart=(first,))
    assert order.index(first) > order.index(fourth)
    assert order.index(first) < order.index(second)
