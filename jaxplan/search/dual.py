"""Bounds without a linear program: dual ascent by messages along the edges, with a price on memory.

The edges' and nodes' costs are shifted against each other (a reparametrisation: every assignment keeps its
cost) until the sum of their separate minima, a lower bound, is as high as it gets.  One sweep visits the nodes
in order; each collects what its edges to earlier nodes cost at least and passes its own costs on to its edges
to later nodes; the next sweep goes back.  This is TRW-S in the form of Kolmogorov, "A new look at reweighted
message passing" (2015), for pairwise terms.  A memory row is relaxed into the objective at a price per byte
(Lagrange), which keeps the bound valid and is moved along the overflow of the assignment at hand.

Given a target a little over the bound, `core` deletes every strategy and pair that can't lead to so low a cost.
The core is solved exactly: what it has under the target is optimal, and if there is nothing, the target is a
bound. On an unrolled network the relaxation reaches the same bound after fifty times as long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .base import Incumbent
from .contract import Matrices
from .problem import Bools, Floats, Ints, StrategyProblem
from .program import Timeline, alive_at

#: Sweeps there and back; most problems stop gaining before.
MOST_SWEEPS = 200

#: Assignments are read off, prices moved, every so many sweeps.
SWEEPS_A_ROUND = 5

#: Peaks that are newly priced a round.
PEAKS_A_ROUND = 1

#: The highest price of a limit of bytes, in units of what all choices together can make a difference.
MOST_PRICE = 1e3

#: The ascent ends after a round that closes less than this share of what is open between bound and best.
LEAST_GAIN = 0.01


class DualAscent:
    """The shifted costs of one problem: `node[n]`, and `matrix[e] + tail[e][:, None] + head[e]` for edge e."""

    def __init__(self, problem: StrategyProblem) -> None:
        self.problem = problem
        self.node = [node.costs_s.copy() for node in problem.nodes]
        self.timeline = Timeline(problem)
        self.price: dict[int, float] = {}
        #: Whether the prices come from a relaxation: better ones than the overflow of one assignment gives.
        self.settled = False
        span_s = sum(float(np.ptp(costs)) for costs in self.node)
        span_s += sum(float(np.ptp(edge.costs_s)) for edge in problem.edges)
        # Prices without end, where nothing is feasible, would drown the costs in rounding.
        self._most_price_s = MOST_PRICE * span_s
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
        """Move the price of each priced or overflowing peak along its overflow: Polyak's step, from best to
        bound.
        """
        limit = self.problem.limit_bytes
        if not limit:
            return
        alive = self.timeline.bytes_at_peaks(one_hot(self.problem, chosen))
        peaks = sorted({*self.price, *self.timeline.worst(alive, limit, PEAKS_A_ROUND)})
        over = {peak: float(alive[peak]) / limit - 1.0 for peak in peaks}
        norm = sum(amount * amount for amount in over.values())
        if norm == 0.0:
            return
        # Until something feasible is known, a tenth of the bound stands for what is open.
        open_s = best_s - bound_s if math.isfinite(best_s) else 0.1 * abs(bound_s)
        step = open_s / norm
        for peak, amount in over.items():
            old = self.price.get(peak, 0.0)
            # No leap: far from the optimum the overflow is a poor guide.
            self.set_price(peak, old + float(np.clip(step * amount, -0.5 * old, max(open_s, old))))

    def set_price(self, peak: int, price_s: float) -> None:
        """Let a limit's worth of bytes alive at a peak cost `price_s`, at least 0."""
        price_s = min(max(price_s, 0.0), self._most_price_s)
        change_s = price_s - self.price.get(peak, 0.0)
        limit = self.problem.limit_bytes
        if not limit or not change_s:
            return
        self.price[peak] = price_s
        self.refund_s += change_s
        for node, used in alive_at(self.problem.usages, peak).items():
            self.node[node] = self.node[node] + change_s / limit * used

    def core(self, target_s: float) -> tuple[StrategyProblem, list[Ints]] | None:
        """The problem less all that can't lead under a cost, and which strategies of each node are left.

        None when nothing is.  Call it after a sweep.
        """
        left = [np.flatnonzero(mask) for mask in self._strategies_under(target_s)]
        if not all(kept.size for kept in left):
            return None
        nodes = tuple(
            replace(node, costs_s=node.costs_s[kept])
            for node, kept in zip(self.problem.nodes, left, strict=True)
        )
        edges = []
        for edge, (low, high), allowed in zip(
            self.problem.edges, self.ends, self._pairs_under(target_s), strict=True
        ):
            square = np.ix_(left[edge.tail], left[edge.head])
            mask = (allowed if (edge.tail, edge.head) == (low, high) else allowed.T)[square]
            edges.append(replace(edge, costs_s=edge.costs_s[square], allowed=None if mask.all() else mask))
        usages = tuple(replace(usage, bytes=usage.bytes[left[usage.node]]) for usage in self.problem.usages)
        return replace(self.problem, nodes=nodes, edges=tuple(edges), usages=usages), left

    def _strategies_under(self, target_s: float) -> list[Bools]:
        """For each node the strategies that may still lead to a cost of at most `target_s`."""
        slack = target_s - self.bound_s()
        left = []
        for node, costs in enumerate(self.node):
            extra = costs - costs.min()
            for e in self.before[node]:
                extra = extra + ((self.by_head[e] + self.tail[e]).min(axis=1) + self.head[e])
            left.append(extra <= slack)
        return left

    def _pairs_under(self, target_s: float) -> list[Bools]:
        """For each edge the pairs [lower node, higher node] that may still lead there."""
        slack = target_s - self.bound_s()
        least = [costs - costs.min() for costs in self.node]
        return [
            self.by_tail[e] + (self.tail[e] + least[low])[:, None] + (self.head[e] + least[high]) <= slack
            for e, (low, high) in enumerate(self.ends)
        ]


def ascend(dual: DualAscent, best: Incumbent, relative_gap: float, deadline: float) -> list[int]:
    """Raise the bound of `best` until the gap is closed, little is gained, or the deadline.

    Returns the assignment that was read off last; it may overflow or take a forbidden pair.
    """
    last_s, chosen = -math.inf, []
    for number in range(MOST_SWEEPS):
        chosen = dual.sweep()
        if time.monotonic() > deadline:
            break
        if number % SWEEPS_A_ROUND == 0:
            bound_s = dual.bound_s()
            best.raise_bound(bound_s)
            open_s = best.objective_s - bound_s if best.assignment else abs(bound_s)
            if best.closed(relative_gap) or (number and bound_s - last_s < LEAST_GAIN * open_s):
                break
            last_s = bound_s
            if not dual.settled:
                dual.reprice(chosen, best.objective_s, bound_s)
    return chosen


def one_hot(problem: StrategyProblem, chosen: Sequence[int] | Ints) -> Floats:
    """An assignment as the values of all strategies of all nodes, in order."""
    sizes = np.array([node.costs_s.size for node in problem.nodes], dtype=np.int64)
    values = np.zeros(int(sizes.sum()))
    values[np.cumsum(sizes) - sizes + np.asarray(chosen)] = 1.0
    return values
