"""The loose ends of a program: values that no product leads to, or that lead to no product.

Weights on their way to the products that read them, and gradients on their way out: within the body of a loop, or the
step around all loops, nothing that is done to them waits for each other, and compilers start it together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .graph import Graph

_Body = tuple[tuple[int, int], ...]
"""(start, stop) of the loops around an operation, outer first."""


def start_shares(graph: Graph, products: Sequence[bool], sums: Sequence[bool]) -> tuple[float, ...]:
    """For every value: 1 if it is no loose end, else 1 over how many of them its body has on this side.

    Args:
      products, sums: for every operation whether it is a matrix product, and whether it sums anything, as products do.
    """
    bodies: list[_Body] = [tuple(loops) for loops in graph.loops_around()]
    producers = graph.producers()
    early, late = _early(graph, products, bodies, producers), _late(graph, products, bodies, producers)
    read = {
        (v, bodies[op.index]) for op in graph.ops if products[op.index] for v in op.operands if early[v]
    }
    fetched = Counter(body for _, body in read)
    finished = Counter(
        bodies[op.index]
        for op in graph.ops
        if sums[op.index] and all(late[v] for v in op.results) and not all(late[v] for v in op.operands)
    )
    shares = []
    for value, maker in enumerate(producers):
        body = bodies[maker] if maker >= 0 else ()
        count = finished[body] if late[value] else fetched[body] if early[value] else 1
        shares.append(1.0 / max(count, 1))
    return tuple(shares)


def _early(graph: Graph, products: Sequence[bool], bodies: Sequence[_Body], producers: Sequence[int]) -> list[bool]:
    """Whether no product of its body leads to a value."""
    early = [True] * len(graph.values)
    for op in graph.ops:
        here = len(bodies[op.index])
        for value in op.results:
            early[value] = not products[op.index] and op.primitive != "carry_init"
            for operand in op.operands:
                maker = producers[operand]
                if maker >= 0 and len(bodies[maker]) > here:
                    early[value] = False  # made by a loop that has ended
                elif maker < 0 or bodies[maker] == bodies[op.index]:
                    early[value] &= early[operand]
    return early


def _late(graph: Graph, products: Sequence[bool], bodies: Sequence[_Body], producers: Sequence[int]) -> list[bool]:
    """Whether a value leads to no product of its body."""
    late = [True] * len(graph.values)
    for op in reversed(graph.ops):
        here = len(bodies[op.index])
        onward = not products[op.index] and op.primitive != "carry_next" and all(late[v] for v in op.results)
        for operand in op.operands:
            maker = producers[operand]
            depth = len(bodies[maker]) if maker >= 0 else 0
            if depth < here:
                late[operand] = False  # read by a loop further in
            elif depth == here:
                late[operand] &= onward
    return late

