"""What an assignment really costs, worked out from the problem alone: the judge of every search.

Nothing here has seen a reduction or an ILP.  Bytes are added as integers, so memory is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ArgumentError
from .problem import Bools, Floats, Ints, StrategyProblem


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The figures of one assignment.

    `peak_time` is the first time step at which `peak_bytes` are alive (0 without usages); `forbidden` are the
    indices of the edges whose chosen pair is not allowed, the price of which is not in `objective_s`;
    `feasible` says that there are none and that the peak is within the problem's limit.
    """

    objective_s: float
    peak_bytes: int
    peak_time: int
    feasible: bool
    forbidden: tuple[int, ...]


class Evaluator:
    """`evaluate` for many assignments of one problem: its arrays are laid out once, each distinct matrix once."""

    def __init__(self, problem: StrategyProblem) -> None:
        self._problem = problem
        self._sizes = np.array([node.costs_s.size for node in problem.nodes], dtype=np.int64)
        self._node_offset = np.cumsum(self._sizes) - self._sizes
        self._node_costs = _concatenate([node.costs_s for node in problem.nodes], np.float64)
        offset_of: dict[tuple[int, int], int] = {}
        prices, masks, total = [], [], 0
        keys = [(id(edge.costs_s), id(edge.allowed)) for edge in problem.edges]
        for key, edge in dict(zip(keys, problem.edges, strict=True)).items():
            offset_of[key] = total
            total += edge.costs_s.size
            prices.append(edge.costs_s.ravel())
            masks.append(np.ones(edge.costs_s.size, bool) if edge.allowed is None else edge.allowed.ravel())
        self._prices, self._masks = _concatenate(prices, np.float64), _concatenate(masks, np.bool_)
        self._edge_offset = np.array([offset_of[key] for key in keys], dtype=np.int64)
        self._tail = np.array([edge.tail for edge in problem.edges], dtype=np.int64)
        self._head = np.array([edge.head for edge in problem.edges], dtype=np.int64)
        usages = problem.usages
        self._usage_node = np.array([u.node for u in usages], dtype=np.int64)
        sizes = np.array([u.bytes.size for u in usages], dtype=np.int64)
        self._usage_offset = np.cumsum(sizes) - sizes
        self._usage_bytes = _concatenate([u.bytes for u in usages], np.int64)
        bounds = np.array([(u.start, u.stop) for u in usages], dtype=np.int64).reshape(-1, 2)
        self._times, where = np.unique(bounds, return_inverse=True)
        self._where = where.reshape(-1, 2)

    def largest_costs(self) -> Floats:
        """The largest of each node's costs, by amount."""
        if not self._sizes.size:
            return self._node_costs
        return np.maximum.reduceat(np.abs(self._node_costs), self._node_offset)

    @property
    def times(self) -> Ints:
        """The time steps, ascending, at which something starts or stops: bytes alive are constant between them."""
        return self._times

    def timeline_bytes(self, assignment: Sequence[int] | Ints) -> Ints:
        """The bytes alive from each of `times` until the next."""
        chosen = np.asarray(assignment, dtype=np.int64)
        delta = np.zeros(self._times.size + 1, dtype=np.int64)
        used = self._usage_bytes[self._usage_offset + chosen[self._usage_node]]
        np.add.at(delta, self._where[:, 0], used)
        np.subtract.at(delta, self._where[:, 1], used)
        return np.cumsum(delta)[:-1]

    def __call__(self, assignment: Sequence[int] | Ints) -> Evaluation:
        chosen = np.asarray(assignment, dtype=np.int64)
        if chosen.shape != self._sizes.shape:
            raise ArgumentError(
                f"assignment of {chosen.shape} choices for a problem of {self._sizes.size} nodes"
            )
        wrong = np.flatnonzero((chosen < 0) | (chosen >= self._sizes))
        if wrong.size:
            node = int(wrong[0])
            name, size = self._problem.nodes[node].name, self._sizes[node]
            raise ArgumentError(
                f"assignment picks strategy {chosen[node]} of node {node} `{name}`, which has {size}"
            )
        if self._edge_offset.size:
            entry = self._edge_offset + chosen[self._tail] * self._sizes[self._head] + chosen[self._head]
            allowed: Bools = self._masks[entry]
            edges_s = float(self._prices[entry[allowed]].sum())
            forbidden = tuple(np.flatnonzero(~allowed).tolist())
        else:
            edges_s, forbidden = 0.0, ()
        objective_s = float(self._node_costs[self._node_offset + chosen].sum()) + edges_s
        peak_bytes, peak_time = 0, 0
        if self._times.size:
            alive = self.timeline_bytes(chosen)
            at = int(np.argmax(alive))
            peak_bytes, peak_time = int(alive[at]), int(self._times[at])
        limit = self._problem.limit_bytes
        return Evaluation(
            objective_s=objective_s,
            peak_bytes=peak_bytes,
            peak_time=peak_time,
            feasible=not forbidden and (limit is None or peak_bytes <= limit),
            forbidden=forbidden,
        )


def evaluate(problem: StrategyProblem, assignment: Sequence[int] | Ints) -> Evaluation:
    """Price one assignment; ArgumentError when it has not one existing strategy for each node."""
    return Evaluator(problem)(assignment)


def _concatenate(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
