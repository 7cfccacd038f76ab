"""What XLA for GPU's kernels write beside other results."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..ir import Graph, Op
from .held_back import PRODUCTS


def written_beside(graph: Graph, walked: Sequence[Op], stored: Sequence[bool]) -> set[int]:
    """Values that a kernel writes beside sums of them, or beside what it makes of the same array element by element.

    Args:
      walked: a stretch of the program.
      stored: see `fusion.Traffic`.
    """
    producers, behind = graph.producers(), graph.behind()
    first = walked[0].index if walked else 0
    found = set[int]()
    made_of: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for op in walked:
        if op.primitive.startswith("reduce_") and "axes" in op.params:
            for value in _in_memory(graph, producers, first, stored, op.operands[:1]):
                if producers[value] < 0 or graph.ops[producers[value]].primitive not in PRODUCTS:
                    found.add(value)
        elif op.primitive not in PRODUCTS and len(op.results) == 1 and stored[op.results[0]]:
            for value in _in_memory(graph, producers, first, stored, op.operands):
                if _elements(graph, value) == _elements(graph, op.results[0]) > 1:
                    made_of.setdefault((value, behind[op.index]), []).append(op.results[0])
    for alike in made_of.values():
        if len(alike) > 1:
            found.update(alike)
    return found


def _in_memory(
    graph: Graph, producers: Sequence[int], first: int, stored: Sequence[bool], values: Sequence[int]
) -> set[int]:
    """What is in memory of that which these are made of, as large as they are."""
    met, ahead, found = set[int](), [*values], set[int]()
    while ahead:
        value = ahead.pop()
        if value in met:
            continue
        met.add(value)
        if stored[value] or producers[value] < first:
            found.add(value)
            continue
        size = _elements(graph, value)
        ahead += (v for v in graph.ops[producers[value]].operands if _elements(graph, v) == size)
    return found


def _elements(graph: Graph, value: int) -> int:
    return math.prod(graph.values[value].shape)
