"""Bounds without a linear program: dual ascent by messages along the edges, with a price on memory.

The edges' and nodes' costs are shifted against each other (a reparametrisation: every assignment keeps its cost)
until the sum of their separate minima, a lower bound, is as high as it gets.  One sweep visits the nodes in order;
each collects what its edges to earlier nodes cost at least and passes its own costs on to its edges to later nodes;
the next sweep goes back.  This is TRW-S in the form of Kolmogorov, "A new look at reweighted message passing"
(2015), for pairwise terms.  A memory row is relaxed into the objective at a price per byte (Lagrange), which keeps the bound
valid and is moved along the overflow of the assignment at hand.

Given any assignment of known cost, a strategy or a pair that the bound shows to lead to nothing cheaper is deleted. What
is left is usually small enough for the linear program; for large problems this is minutes against hours.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from .contract import Matrices
from .problem import Bools, Edge, Floats, Ints, Node, StrategyProblem, Usage
from .program import Timeline, alive_at

#: Sweeps there and back; most problems stop gaining before.
MOST_SWEEPS = 200

#: Assignments are read off, prices moved, every so many sweeps.
SWEEPS_A_ROUND = 5

#: The ascent ends after a round that closes less than this share of what is open between bound and best.
LEAST_GAIN = 0.01


class DualAscent:
    """The shifted costs of one problem: `node[n]`, and `matrix[e] + tail[e][:, None] + head[e]` for edge e."""

    def __init__(self, problem: StrategyProblem) -> None:
        self.problem = problem
        self.node = [node.costs_s.copy() for node in problem.nodes]
        self.timeline = Timeline(problem)
        self.price: dict[int, float] = {}
        # What the priced bytes cost within the limit, which is paid in no case.
        self.refund_s = 0.0
        matrices = Matrices()
        self.before: list[list[int]] = [[] for _ in problem.nodes]
        self.after: list[list[int]] = [[] for _ in problem.nodes]
        self.ends: list[tuple[int, int]] = []
        self.by_tail: list[Floats] = []
        self.by_head: list[Floats] = []
        for number, edge in enumerate(problem.edges):
            matrix = matrices.masked(edge.costs_s, edge.allowed)
            low, high = edge.tail, edge.head
            if low > high:
                low, high, matrix = high, low, matrices.turned(matrix)
            self.ends.append((low, high))
            self.by_tail.append(matrix)
            self.by_head.append(matrices.turned(matrix))
            self.after[low].append(number)
            self.before[high].append(number)
        self.tail = [np.zeros(matrix.shape[0]) for matrix in self.by_tail]
        self.head = [np.zeros(matrix.shape[1]) for matrix in self.by_tail]

    def sweep(self) -> list[int]:
        """There and back; the assignment read off on the way there, each node the best after the earlier ones."""
        chosen: list[int] = []
        for node in range(len(self.node)):
            field = self.node[node].copy()
            costs = self.node[node]
            for e in self.before[node]:
                low = chosen[self.ends[e][0]]
                field += self.by_tail[e][low] + self.head[e]
                least = (self.by_head[e] + self.tail[e]).min(axis=1) + self.head[e]
                costs += least
                self.head[e] -= least
            chosen.append(int(np.argmin(field)))
            if self.after[node]:
                share = 1.0 / max(len(self.after[node]), len(self.before[node]))
                for e in self.after[node]:
                    self.tail[e] += share * costs
                self.node[node] = costs * (1.0 - share * len(self.after[node]))
        for node in range(len(self.node) - 1, -1, -1):
            costs = self.node[node]
            for e in self.after[node]:
                least = (self.by_tail[e] + self.head[e]).min(axis=1) + self.tail[e]
                costs += least
                self.tail[e] -= least
            if self.before[node]:
                share = 1.0 / max(len(self.after[node]), len(self.before[node]))
                for e in self.before[node]:
                    self.head[e] += share * costs
                self.node[node] = costs * (1.0 - share * len(self.before[node]))
        return chosen

    def bound_s(self) -> float:
        """The lower bound after a sweep: the edges' minima are zero then, all costs are at the nodes."""
        return math.fsum(float(costs.min()) for costs in self.node) - self.refund_s

    def reprice(self, chosen: Sequence[int], best_s: float, bound_s: float) -> None:
        """Move the price of each priced or overflowing peak along its overflow: Polyak's step, from best to bound."""
        limit = self.problem.limit_bytes
        if limit is None or not math.isfinite(best_s):
            return
        sizes = [node.costs_s.size for node in self.problem.nodes]
        values = np.zeros(sum(sizes))
        values[np.cumsum(sizes) - sizes + np.array(chosen)] = 1.0
        alive = self.timeline.bytes_at_peaks(values)
        peaks = sorted({*self.price, *self.timeline.worst(alive, limit, 1)})
        over = {peak: float(alive[peak]) / limit - 1.0 for peak in peaks}
        norm = sum(amount * amount for amount in over.values())
        if norm == 0.0:
            return
        step = (best_s - bound_s) / norm
        for peak, amount in over.items():
            old = self.price.get(peak, 0.0)
            # No step is larger than what is open: far from the optimum the overflow is a poor guide.
            new = max(0.0, old + float(np.clip(step * amount, -0.5 * old, best_s - bound_s)))
            self.price[peak] = new
            self.refund_s += new - old
            for node, used in alive_at(self.problem.usages, peak).items():
                self.node[node] += (new - old) / limit * used

    def survivors(self, target_s: float) -> list[Bools]:
        """For each node the strategies that may still lead under a cost of `target_s`; call it after a sweep."""
        slack = target_s - self.bound_s()
        left = []
        for node, costs in enumerate(self.node):
            extra = costs - costs.min()
            for e in self.before[node]:
                extra = extra + ((self.by_head[e] + self.tail[e]).min(axis=1) + self.head[e])
            left.append(extra <= slack)
        return left

    def pairs(self, target_s: float) -> list[Bools]:
        """For each edge the pairs [lower node, higher node] that may still lead under a cost; after a sweep."""
        slack = target_s - self.bound_s()
        least = [costs - costs.min() for costs in self.node]
        return [
            self.by_tail[e] + (self.tail[e] + least[low])[:, None] + (self.head[e] + least[high]) <= slack
            for e, (low, high) in enumerate(self.ends)
        ]


def ascend(
    dual: DualAscent,
    offer: Callable[[Sequence[int]], float],
    raise_bound: Callable[[float], None],
    closed: Callable[[], bool],
    deadline: float,
) -> None:
    """Sweep until the gap is closed, little is gained, or the deadline; `offer` returns the best cost so far."""
    last_s = -math.inf
    for number in range(MOST_SWEEPS):
        chosen = dual.sweep()
        if time.monotonic() > deadline:
            return
        if number % SWEEPS_A_ROUND:
            continue
        bound_s = dual.bound_s()
        raise_bound(bound_s)
        best_s = offer(chosen)
        if closed():
            return
        if number and bound_s - last_s < LEAST_GAIN * abs(best_s - bound_s):
            return
        last_s = bound_s
        dual.reprice(chosen, best_s, bound_s)
