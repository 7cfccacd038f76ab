"""What a problem measures: columns of its program, pairs of its edges, what it costs at least, and its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..disjoint import Disjoint
from .problem import Ints, StrategyProblem


def parts_apart(problem: StrategyProblem, rows: Sequence[int]) -> list[list[int]]:
    """The nodes, apart where neither an edge nor the memory row of one of the peaks `rows` joins them."""
    joined = Disjoint(len(problem.nodes))
    for edge in problem.edges:
        joined.join(edge.tail, edge.head)
    for peak in rows:
        live = [usage.node for usage in problem.usages if usage.start <= peak < usage.stop]
        for node in live[1:]:
            joined.join(live[0], node)
    parts: dict[int, list[int]] = {}
    for node in range(len(problem.nodes)):
        parts.setdefault(joined.find(node), []).append(node)
    return list(parts.values())


def columns(problem: StrategyProblem) -> int:
    """How many columns the program of the whole problem has."""
    return sum(node.costs_s.size for node in problem.nodes) + entries(problem)


def entries(problem: StrategyProblem) -> int:
    """How many pairs the edges allow."""
    return sum(
        edge.costs_s.size if edge.allowed is None else int(edge.allowed.sum()) for edge in problem.edges
    )


def least_sum(problem: StrategyProblem) -> float:
    """The cheapest strategy of every node and pair of every edge: a bound that is there at once."""
    least: dict[tuple[int, int], float] = {}
    for edge in problem.edges:
        key = (id(edge.costs_s), id(edge.allowed))
        if key not in least:
            least[key] = float((edge.costs_s if edge.allowed is None else edge.costs_s[edge.allowed]).min())
    edges_s = math.fsum(least[id(edge.costs_s), id(edge.allowed)] for edge in problem.edges)
    return math.fsum(float(node.costs_s.min()) for node in problem.nodes) + edges_s


def cost_within(problem: StrategyProblem, part: list[int], chosen: Ints) -> float:
    """What an assignment pays for the nodes of a part and the edges between them."""
    inside = set(part)
    nodes_s = math.fsum(float(problem.nodes[node].costs_s[chosen[node]]) for node in part)
    edges_s = math.fsum(
        float(edge.costs_s[chosen[edge.tail], chosen[edge.head]])
        for edge in problem.edges
        if edge.tail in inside
    )
    return nodes_s + edges_s
