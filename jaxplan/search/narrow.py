"""A problem with only some strategies left to some of its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np

from .problem import Bools, Edge, Floats, Ints, StrategyProblem

Table = TypeVar("Table", Floats, Bools)


def narrow(problem: StrategyProblem, kept: Mapping[int, Ints]) -> StrategyProblem:
    """The problem with the strategies `kept` (ascending) left to the nodes named, the same nodes by the same numbers.

    Strategy i of such a node is what was its strategy `kept[node][i]`.
    """
    if not kept:
        return problem

    def cut(edge: Edge) -> Edge:
        rows, columns = kept.get(edge.tail), kept.get(edge.head)
        if rows is None and columns is None:
            return edge
        allowed = None if edge.allowed is None else _part(edge.allowed, rows, columns)
        return replace(edge, costs_s=_part(edge.costs_s, rows, columns), allowed=allowed)

    return replace(
        problem,
        nodes=tuple(
            replace(node, costs_s=node.costs_s[kept[i]]) if i in kept else node
            for i, node in enumerate(problem.nodes)
        ),
        edges=tuple(map(cut, problem.edges)),
        usages=tuple(
            replace(usage, bytes=usage.bytes[kept[usage.node]]) if usage.node in kept else usage
            for usage in problem.usages
        ),
    )


def _part(matrix: Table, rows: Ints | None, columns: Ints | None) -> Table:
    some = matrix if rows is None else matrix[rows]
    return some if columns is None else np.ascontiguousarray(some[:, columns])
