"""StrategyProblem: one strategy a node, node and edge costs, and a limit on the bytes alive at every time step.

This is the value that crosses from the cost model to the search.  It knows nothing of JAX, of programs or of
solvers: NumPy arrays, names, integers.  An assignment picks one strategy of every node; its objective is the
sum of the chosen node costs and of the chosen entries of the edge matrices; it is feasible when no chosen pair
is forbidden and, at every time step, the bytes of the usages alive then stay within the limit.

Arrays are shared by reference and never copied: an unrolled network has tens of thousands of edges, but only
some hundred distinct matrices.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, PlanFileError

SCHEMA = 1

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class Node:
    """One decision: `costs_s[i]` is the price in seconds of its strategy i; every strategy is possible by
    itself.
    """

    name: str
    costs_s: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class Edge:
    """What two nodes cost together: `costs_s[i, j]` in seconds for strategy i of `tail` and j of `head`.

    `allowed[i, j]` is False where the pair is impossible (the price there is ignored); None allows every pair.
    """

    tail: int
    head: int
    costs_s: Floats
    allowed: Bools | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Usage:
    """What a node keeps alive during the time steps `start <= t < stop`: `bytes[i]` under its strategy i."""

    node: int
    start: int
    stop: int
    bytes: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class StrategyProblem:
    """Choose one strategy a node, at the least cost, within `limit_bytes` at every time step (None: no limit).

    `verify()` says whether it is well formed; parallel edges and several usages of one node are.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    usages: tuple[Usage, ...] = ()
    limit_bytes: int | None = None

    def verify(self) -> StrategyProblem:
        """Return self, or raise ArgumentError naming every malformed node, edge and usage (the first 8 of
        them).
        """
        faults = _first(self._faults(), 8)
        if faults:
            raise ArgumentError("malformed StrategyProblem: " + "; ".join(faults))
        return self

    def _faults(self) -> Iterator[str]:
        sizes = [node.costs_s.shape[0] if node.costs_s.ndim == 1 else -1 for node in self.nodes]
        priced: dict[int, bool] = {}
        for i, (node, size) in enumerate(zip(self.nodes, sizes, strict=True)):
            if id(node.costs_s) not in priced:
                priced[id(node.costs_s)] = node.costs_s.dtype == np.float64 and bool(np.isfinite(node.costs_s).all())
            if size < 1:
                yield f"node {i} `{node.name}`: costs_s has shape {node.costs_s.shape}; needs a strategy"
            elif not priced[id(node.costs_s)]:
                yield f"node {i} `{node.name}`: costs_s must be finite float64 seconds, got {node.costs_s}"
        sound: dict[tuple[int, int], bool] = {}
        for i, edge in enumerate(self.edges):
            if not (0 <= edge.tail < len(sizes) and 0 <= edge.head < len(sizes)) or edge.tail == edge.head:
                yield f"edge {i}: joins nodes {edge.tail} and {edge.head}; needs two of {len(sizes)}"
                continue
            shape = (sizes[edge.tail], sizes[edge.head])
            if edge.costs_s.shape != shape or (edge.allowed is not None and edge.allowed.shape != shape):
                names = f"`{self.nodes[edge.tail].name}` -> `{self.nodes[edge.head].name}`"
                yield f"edge {i} {names}: matrix of shape {edge.costs_s.shape}, needs {shape}"
            key = (id(edge.costs_s), id(edge.allowed))
            if key not in sound:
                sound[key] = edge.costs_s.dtype == np.float64 and bool(np.isfinite(edge.costs_s).all())
                sound[key] &= edge.allowed is None or edge.allowed.dtype == np.bool_
            if not sound[key]:
                yield f"edge {i}: costs_s must be finite float64 seconds; mask the impossible in `allowed`"
        counted: dict[int, bool] = {}
        for i, usage in enumerate(self.usages):
            if id(usage.bytes) not in counted:
                counted[id(usage.bytes)] = usage.bytes.dtype == np.int64 and bool((usage.bytes >= 0).all())
            if not 0 <= usage.node < len(sizes) or usage.bytes.shape != (sizes[usage.node],):
                yield f"usage {i}: {usage.bytes.shape} bytes do not fit the strategies of node {usage.node}"
            elif not usage.start < usage.stop:
                yield f"usage {i} of `{self.nodes[usage.node].name}`: [{usage.start}, {usage.stop}) is empty"
            elif not counted[id(usage.bytes)]:
                yield f"usage {i} of `{self.nodes[usage.node].name}`: bytes must be int64, none negative"
        if self.limit_bytes is not None and self.limit_bytes < 0:
            yield f"limit_bytes={self.limit_bytes} is negative"

    def to_json(self) -> str:
        """The problem as JSON text, the same text for the same problem; each distinct array is written once."""
        table = _Table()
        nodes = [[node.name, table.index(node.costs_s)] for node in self.nodes]
        edges = [
            [e.tail, e.head, table.index(e.costs_s), None if e.allowed is None else table.index(e.allowed)]
            for e in self.edges
        ]
        usages = [[u.node, u.start, u.stop, table.index(u.bytes)] for u in self.usages]
        content = {
            "schema": SCHEMA,
            "limit_bytes": self.limit_bytes,
            "nodes": nodes,
            "edges": edges,
            "usages": usages,
            "arrays": table.rows,
        }
        return json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> StrategyProblem:
        """Read what `to_json` wrote; PlanFileError when it is cut short, of another schema, or malformed."""
        try:
            content = json.loads(text)
            if content["schema"] != SCHEMA:
                raise PlanFileError(
                    f"problem file has schema {content['schema']}; this jaxplan reads schema {SCHEMA}"
                )
            arrays = [_read_array(kind, values) for kind, values in content["arrays"]]
            problem = cls(
                nodes=tuple(Node(name=name, costs_s=arrays[c]) for name, c in content["nodes"]),
                edges=tuple(
                    Edge(tail=t, head=h, costs_s=arrays[c], allowed=None if a is None else arrays[a])
                    for t, h, c, a in content["edges"]
                ),
                usages=tuple(
                    Usage(node=n, start=a, stop=b, bytes=arrays[u]) for n, a, b, u in content["usages"]
                ),
                limit_bytes=content["limit_bytes"],
            )
        except (ValueError, KeyError, TypeError, IndexError) as error:
            if isinstance(error, PlanFileError):
                raise
            raise PlanFileError(f"not a problem file of schema {SCHEMA}: {error!r}") from error
        return problem.verify()


class _Table:
    """Arrays numbered in the order of their first appearance, equal ones once."""

    def __init__(self) -> None:
        self.rows: list[list[object]] = []
        self._by_id: dict[int, int] = {}
        self._by_content: dict[tuple[str, tuple[int, ...], bytes], int] = {}

    def index(self, array: NDArray[np.generic]) -> int:
        if id(array) not in self._by_id:
            key = (array.dtype.kind, array.shape, array.tobytes())
            if key not in self._by_content:
                self._by_content[key] = len(self.rows)
                rows = array.astype(np.int64) if array.dtype.kind == "b" else array
                self.rows.append([array.dtype.kind, rows.tolist()])
            self._by_id[id(array)] = self._by_content[key]
        return self._by_id[id(array)]


def _read_array(kind: str, values: Sequence[object]) -> NDArray[np.generic]:
    return np.array(values, dtype={"f": np.float64, "i": np.int64, "b": np.bool_}[kind])


def _first(faults: Iterator[str], count: int) -> list[str]:
    found = []
    for fault in faults:
        found.append(fault)
        if len(found) == count:
            break
    return found
