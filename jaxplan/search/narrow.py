"""A problem with only some strategies left to some of its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from .problem import Edge, Ints, StrategyProblem


class SharedParts:
    """Rows and columns of arrays; equal parts of one array are one array, as what is priced once for all is shared."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], np.ndarray] = {}

    def of(self, array: np.ndarray, rows: Ints | None, columns: Ints | None = None) -> Any:
        """What is left of an array, which has to outlive this, with these rows and columns; None: all of them."""
        key = (id(array), *(-1 if index is None else index.tobytes() for index in (rows, columns)))
        if key not in self._made:
            some = array if rows is None else array[rows]
            self._made[key] = some if columns is None else np.ascontiguousarray(some[:, columns])
        return self._made[key]


def narrow(problem: StrategyProblem, kept: Mapping[int, Ints], parts: SharedParts | None = None) -> StrategyProblem:
    """The problem with the strategies `kept` (ascending) left to the nodes named, the same nodes by the same numbers.

    Strategy i of such a node is what was its strategy `kept[node][i]`.
    """
    if not kept:
        return problem
    part = (parts or SharedParts()).of

    def cut(edge: Edge) -> Edge:
        rows, columns = kept.get(edge.tail), kept.get(edge.head)
        if rows is None and columns is None:
            return edge
        allowed = None if edge.allowed is None else part(edge.allowed, rows, columns)
        return replace(edge, costs_s=part(edge.costs_s, rows, columns), allowed=allowed)

    return replace(
        problem,
        nodes=tuple(
            replace(node, costs_s=part(node.costs_s, kept[i])) if i in kept else node
            for i, node in enumerate(problem.nodes)
        ),
        edges=tuple(map(cut, problem.edges)),
        usages=tuple(
            replace(usage, bytes=part(usage.bytes, kept[usage.node])) if usage.node in kept else usage
            for usage in problem.usages
        ),
    )
