"""What loops read and nobody keeps, because it is made of nothing: on GPU it lies in memory all the same.

An attention's mask is made of positions alone, at no price wherever it is read.  In a scanned layer jax makes it before
the loop, in the shape of the scores, and XLA for GPU hands it to the loop, which no kernel reaches across; so it is
there from the first loop that reads it to the last one.  Broadcast numbers are made inside again (XLA's
`WhileLoopConstantSinking`).  A mask of pred[2, 2, 8, 2048, 2048] takes 134 MB of a network of two layers, one of
pred[2, 8, 1, 512, 512] 4 MB of a GPT block (H100, jax 0.10.2); XLA for TPU hands over the positions' comparison and
broadcasts it inside (v5e).
"""

from __future__ import annotations

from typing import NamedTuple

from .residency import Flow


class Invariant(NamedTuple):
    """Attributes:
    value: what loops read; like: a value of its shape that is computed with it, and lies as it does.
    start, stop: from the first loop that reads it to the end of the last one.
    """

    value: int
    like: int
    start: int
    stop: int


def loop_invariants(flow: Flow) -> tuple[Invariant, ...]:
    """The values that are made of nothing outside of the loops that read them."""
    graph, found = flow.graph, dict[int, Invariant]()
    around, numbers = graph.loops_around(), _numbers(flow)
    for op in graph.ops:
        for value in op.operands if around[op.index] and op.results else ():
            maker, shape = flow.producers[value], graph.values[value].shape
            if maker < 0 or not flow.source[value] or value in numbers or shape != graph.values[op.results[0]].shape:
                continue
            inside = [loop for loop in around[op.index] if not loop[0] <= maker < loop[1]]
            if inside and shape:
                start, stop = inside[0]
                before = found.get(value, Invariant(value, op.results[0], start, stop))
                found[value] = before._replace(start=min(before.start, start), stop=max(before.stop, stop))
    return tuple(found.values())


def _numbers(flow: Flow) -> set[int]:
    """The values that are one number everywhere: what is computed of scalars alone."""
    found: set[int] = set()
    for value in flow.graph.values:
        if value.number is not None or (value.constant and not value.shape):
            found.add(value.index)
    for op in flow.graph.ops:
        if op.primitive != "iota" and op.operands and found.issuperset(op.operands):
            found.update(op.results)
    return found
