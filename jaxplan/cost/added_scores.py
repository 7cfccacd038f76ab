"""Scores that are a sum of two products, one of them transposed: on TPU all three are in memory until the last is read.

The two products of latent attention, of the heads' own keys and of one rotated key for all heads, or of relative
positions: XLA for TPU makes one after the other.  The kernel of the second writes its result and the sum, and on the
way back some kernels read the sum and others add the two again (v5e, jax 0.10.2: bf16[4, 16, 1024, 1024], f32
likewise).  Where neither is transposed one kernel makes both, and what is exponentiated is kept as of one product (see
`scores`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..ir import Graph, Interval
from .scores import is_batched

_FOLLOWED = 16
"""Elementwise operations between a sum and its exponential, at most: scales, masks, the largest of each row."""


class AddedScores(NamedTuple):
    """Products' results and their sum."""

    products: tuple[int, int]
    total: int


def added_scores(graph: Graph, kinds: Sequence[str], producers: Sequence[int]) -> Iterator[AddedScores]:
    """All of a program.

    Args:
      kinds: of every operation, see `kind_of`; producers: see `Traffic`.
    """
    uses = graph.uses()
    for op in graph.ops:
        if op.primitive != "add" or len(set(op.operands)) < 2:
            continue
        made = [_product(graph, producers, value) for value in op.operands]
        results, turned = [result for result, _ in made], [moved for _, moved in made]
        if None not in results and any(turned) and _exponentiated(graph, kinds, uses, op.results[0]):
            first, second = (result for result in results if result is not None)
            yield AddedScores((first, second), op.results[0])


def kept_products(scores: Sequence[AddedScores], intervals: Sequence[Interval]) -> Iterator[tuple[int, int, int]]:
    """(result, start, stop): how long products' results are kept once they are added."""
    for one in scores:
        for value in one.products:
            start, stop = intervals[value].stop, intervals[one.total].stop
            if start < stop:
                yield value, start, stop


def _product(graph: Graph, producers: Sequence[int], value: int) -> tuple[int | None, bool]:
    """The result of a product with batch dimensions that a value is, transposed or not."""
    moved = False
    while (maker := producers[value]) >= 0 and graph.ops[maker].primitive == "transpose":
        value, moved = graph.ops[maker].operands[0], True
    return (value, moved) if maker >= 0 and is_batched(graph.ops[maker]) else (None, moved)


def _exponentiated(
    graph: Graph, kinds: Sequence[str], uses: Sequence[Sequence[tuple[int, int]]], value: int
) -> bool:
    shape, waiting = graph.values[value].shape, [(value, 0)]
    while waiting:
        value, far = waiting.pop()
        for reader, _ in uses[value]:
            op = graph.ops[reader]
            if op.primitive == "exp":
                return True
            if kinds[reader] == "fused" and far < _FOLLOWED and graph.values[op.results[0]].shape == shape:
                waiting.append((op.results[0], far + 1))
    return False
