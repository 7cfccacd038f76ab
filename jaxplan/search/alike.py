"""Which nodes of a problem are alike: colour refinement on costs, matrices and what is kept in memory.

Two nodes have the same colour after `depth` steps when no walk of at most that many edges tells them apart.  The
layers of an unrolled network are alike save near its ends: the more steps, the more layers at either end stand by
themselves.  Refined until nothing changes, every layer would (Weisfeiler and Leman 1968; for linear programs
Grohe et al. 2014, "Dimension reduction via colour refinement").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .contract import Matrices
from .problem import Ints, StrategyProblem

Hashes = NDArray[np.uint64]

# The finaliser of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_STEP = np.uint64(0x9E3779B97F4A7C15)


class Contents:
    """Arrays of a problem as numbers: equal contents, equal number, in the order of their first appearance."""

    def __init__(self, problem: StrategyProblem, matrices: Matrices) -> None:
        self._numbers: dict[int, int] = {}
        self._matrices = matrices
        self.costs = self._of([node.costs_s for node in problem.nodes])
        pairs = [(id(edge.costs_s), id(edge.allowed)) for edge in problem.edges]
        masked = {
            pair: matrices.masked(edge.costs_s, edge.allowed)
            for pair, edge in dict(zip(pairs, problem.edges, strict=True)).items()
        }
        self.masked = [masked[pair] for pair in pairs]
        self.edges = self._of(self.masked)
        self.usages = self._of([usage.bytes for usage in problem.usages])

    def _of(self, arrays: Sequence[np.ndarray]) -> Ints:
        ids = list(map(id, arrays))
        known = {
            number: self._numbers.setdefault(id(self._matrices.intern(array)), len(self._numbers))
            for number, array in dict(zip(ids, arrays, strict=True)).items()
        }
        return np.array([known[number] for number in ids], dtype=np.int64)


def colours(problem: StrategyProblem, contents: Contents, depth: int) -> Ints:
    """A colour for every node after `depth` steps, numbered in the order of their first node.

    Nodes of one colour have equal costs, hence equally many strategies; their neighbours are alike up to hash
    collisions, which make a worse fold and never a wrong one.
    """
    count = len(problem.nodes)
    tail = np.array([edge.tail for edge in problem.edges], dtype=np.int64)
    head = np.array([edge.head for edge in problem.edges], dtype=np.int64)
    matrix = contents.edges.astype(np.uint64)
    held = np.zeros(count, dtype=np.uint64)
    owners = np.array([usage.node for usage in problem.usages], dtype=np.int64)
    np.add.at(held, owners, _mix(contents.usages.astype(np.uint64)))
    colour = _split(contents.costs, held)
    for _ in range(depth):
        near = np.zeros(count, dtype=np.uint64)
        seen = _mix(colour.astype(np.uint64))
        np.add.at(near, tail, _mix(seen[head] + np.uint64(2) * matrix))
        np.add.at(near, head, _mix(seen[tail] + np.uint64(2) * matrix + np.uint64(1)))
        finer = _split(colour, near)
        if finer.max(initial=0) == colour.max(initial=0):
            break
        colour = finer
    return _by_first(colour)


def _mix(values: Hashes) -> Hashes:
    """A well mixed number for each: sums of them stand for multisets."""
    values = values * _STEP + _STEP
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIERS[0]
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIERS[1]
    return values ^ (values >> np.uint64(31))


def _split(colour: Ints, key: Hashes) -> Ints:
    """Colours split by a key: no two nodes are ever joined."""
    order = np.lexsort((key, colour))
    new = np.ones(order.size, dtype=np.int64)
    new[1:] = (np.diff(colour[order]) != 0) | (key[order][1:] != key[order][:-1])
    finer = np.empty_like(order)
    finer[order] = np.cumsum(new) - 1
    return finer


def _by_first(colour: Ints) -> Ints:
    _, first, inverse = np.unique(colour, return_index=True, return_inverse=True)
    rank = np.empty(first.size, dtype=np.int64)
    rank[np.argsort(first)] = np.arange(first.size)
    return rank[inverse.reshape(-1)]
