"""Problems in the format of the IOPDDL contest (google/iopddl), read and written.

JSON, gzip-compressed where the name ends in .gz: a half-open live interval a node, an integer cost and memory use a
strategy, pairs of nodes with row-major cost matrices, and perhaps a usage limit.  A forbidden choice costs 10^18.  An
answer is a list of one strategy a node.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import ArgumentError, PlanFileError
from .flat import node_usages
from .problem import Bools, Edge, Floats, Node, StrategyProblem, Usage

#: What a forbidden choice costs (google/iopddl, README: "infinite" costs).
FORBIDDEN = 10**18

#: A price from here on is read as forbidden: the largest finite one of the published files is below 10^14.
LEAST_FORBIDDEN = 10**17


@dataclass(frozen=True, kw_only=True, eq=False)
class ContestProblem:
    """A problem as it was read, the contest's integers standing for seconds and bytes.

    `count` nodes are the file's own, first and in its order.
    """

    problem: StrategyProblem
    count: int

    def choices(self, assignment: Sequence[int]) -> list[int]:
        """The contest's answer for an assignment of the problem."""
        return [int(strategy) for strategy in assignment[: self.count]]


def read_contest(path: str | Path) -> ContestProblem:
    """Read a contest file; strategies keep their numbers.

    Pairs priced 10^18 are masked.  A strategy priced 10^18 by itself is masked in one edge of its node, or in an edge
    to an added node of one strategy.

    Raises:
      PlanFileError: it is no problem of the contest.
      OSError: it can't be read.
    """
    path = Path(path)
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        content = json.loads(raw)["problem"]
        return _parsed(content)
    except (ValueError, KeyError, TypeError, IndexError, EOFError, ArgumentError) as error:
        raise PlanFileError(
            f"{path} is no problem in the IOPDDL contest's format ({error!r}): it needs `problem` with "
            "`nodes.{intervals,costs,usages}`, `edges.{nodes,costs}` and perhaps `usage_limit`, as "
            "https://github.com/google/iopddl has them"
        ) from error


def _parsed(content: dict[str, object]) -> ContestProblem:
    node_rows: dict[str, list[list[int]]] = content["nodes"]  # type: ignore[assignment]  # checked by use
    edge_rows: dict[str, list[list[int]]] = content["edges"]  # type: ignore[assignment]
    interned: dict[tuple[object, ...], tuple[Floats, Bools | None]] = {}

    def split(shape: tuple[int, ...], values: list[int], barred: tuple[int, ...]) -> tuple[Floats, Bools | None]:
        key = (shape, tuple(values), barred)
        if key not in interned:
            costs = np.array(values, dtype=np.float64).reshape(shape)
            allowed = costs < LEAST_FORBIDDEN
            allowed[list(barred)] = False
            interned[key] = np.where(allowed, costs, 0.0), None if allowed.all() else allowed
        return interned[key]

    nodes, barred_of = [], {}
    for i, values in enumerate(node_rows["costs"]):
        costs, allowed = split((len(values),), values, ())
        nodes.append(Node(name=f"node{i}", costs_s=costs))
        if allowed is not None:
            barred_of[i] = tuple(int(s) for s in np.flatnonzero(~allowed))
    count = len(nodes)
    edges = []
    for (tail, head), values in zip(edge_rows["nodes"], edge_rows["costs"], strict=True):
        shape = (nodes[tail].costs_s.size, nodes[head].costs_s.size)
        costs, allowed = split(shape, values, barred_of.pop(tail, ()))
        edges.append(Edge(tail=tail, head=head, costs_s=costs, allowed=allowed))
    if barred_of:
        nodes.append(Node(name="anchor", costs_s=np.zeros(1)))
        for i, barred in barred_of.items():
            costs, allowed = split((nodes[i].costs_s.size, 1), [0] * nodes[i].costs_s.size, barred)
            edges.append(Edge(tail=i, head=count, costs_s=costs, allowed=allowed))
    usages = tuple(
        Usage(node=i, start=start, stop=stop, bytes=np.array(values, dtype=np.int64))
        for i, ((start, stop), values) in enumerate(
            zip(node_rows["intervals"], node_rows["usages"], strict=True)
        )
        if start < stop
    )
    limit = content.get("usage_limit")
    assert limit is None or isinstance(limit, int)
    problem = StrategyProblem(nodes=tuple(nodes), edges=tuple(edges), usages=usages, limit_bytes=limit)
    return ContestProblem(problem=problem.verify(), count=count)


def contest_text(problem: StrategyProblem, unit_s: float) -> str:
    """The problem as a contest file, its costs in whole units of `unit_s` seconds, rounded to the nearest.

    The contest knows one live interval a node: a node with several has followers after the problem's own nodes, one
    for each further interval, which must choose as it does and cost nothing.

    Raises:
      ArgumentError: a cost does not fit below what counts as forbidden.
    """
    usages = node_usages(problem)
    costs = [_units(node.costs_s, unit_s, node.name) for node in problem.nodes]
    intervals = [list(own[0][:2]) if own else [0, 0] for own in usages]
    used = [
        own[0][2].tolist() if own else [0] * node.costs_s.size
        for own, node in zip(usages, problem.nodes, strict=True)
    ]
    # The contest joins two nodes at most once.
    pairs: dict[tuple[int, int], list[list[int]]] = {}
    for edge in problem.edges:
        names = f"{problem.nodes[edge.tail].name} -> {problem.nodes[edge.head].name}"
        matrix = _units(edge.costs_s, unit_s, names, edge.allowed)
        pair = edge.tail, edge.head
        if edge.head < edge.tail:
            pair, matrix = pair[::-1], [list(row) for row in zip(*matrix, strict=True)]
        before = pairs.get(pair)
        pairs[pair] = matrix if before is None else [
            [min(a + b, FORBIDDEN) for a, b in zip(*rows, strict=True)] for rows in zip(before, matrix, strict=True)
        ]  # fmt: skip
    for node, own in enumerate(usages):
        for start, stop, amounts in own[1:]:
            pairs[node, len(costs)] = [
                [0 if i == j else FORBIDDEN for j in range(amounts.size)] for i in range(amounts.size)
            ]
            costs.append([0] * amounts.size)
            intervals.append([start, stop])
            used.append(amounts.tolist())
    content: dict[str, object] = {
        "nodes": {"intervals": intervals, "costs": costs, "usages": used},
        "edges": {
            "nodes": [list(pair) for pair in pairs],
            "costs": [[cost for row in matrix for cost in row] for matrix in pairs.values()],
        },
    }
    if problem.limit_bytes is not None:
        content["usage_limit"] = problem.limit_bytes
    return json.dumps({"problem": content}, separators=(",", ":")) + "\n"


def write_contest(problem: StrategyProblem, path: str | Path, unit_s: float) -> None:
    """Write `contest_text` to a file, the same bytes for the same problem."""
    path = Path(path)
    raw = contest_text(problem, unit_s).encode()
    path.write_bytes(gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)


def _units(costs_s: Floats, unit_s: float, name: str, allowed: Bools | None = None) -> list:
    most = float(np.abs(costs_s).max(initial=0.0)) / unit_s
    if not math.isfinite(most) or most >= LEAST_FORBIDDEN:
        raise ArgumentError(
            f"`{name}` costs {most:.3g} units of {unit_s:g} s: the format reads {LEAST_FORBIDDEN:.0e} and more as "
            "forbidden; take a larger unit"
        )
    whole = np.rint(costs_s / unit_s).astype(np.int64)
    return (whole if allowed is None else np.where(allowed, whole, FORBIDDEN)).tolist()
