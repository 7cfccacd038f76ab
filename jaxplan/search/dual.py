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

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from . import messages, moves
from .base import Incumbent
from .flat import edge_numbers, flatten
from .problem import Bools, Floats, Ints, StrategyProblem
from .program import Timeline

#: Assignments are read off, prices moved, every so many sweeps there and back.
SWEEPS_A_ROUND = 4

#: Rounds of one ascent; most stop gaining before.
MOST_ROUNDS = 600

#: Peaks that are newly priced a round.
PEAKS_A_ROUND = 8

#: The highest price of a limit of bytes, in units of a forbidden pair's.
MOST_PRICE = 16.0

#: What rounding can add to a bound, in units of a forbidden pair's price.
ROUNDING = 1e-15

#: A round that closes less than this share of what is open between bound and best is a round without gain.
LEAST_GAIN = 1e-3

#: With prices on memory the bound rises and falls.  After so many rounds without gain the steps become shorter, to
#: this part, and the ascent ends where they are shorter than the least.
PATIENCE, SHORTER, LEAST_STEP = 12, 0.7, 0.02


class DualAscent:
    """The shifted costs of one problem: `node_s` by strategy, and `matrix + sent[tail] + sent[head]` for each edge."""

    def __init__(self, problem: StrategyProblem) -> None:
        self.problem, self.flat = problem, flatten(problem)
        self.node_s = self.flat.unary_s.copy()
        #: What each strategy has passed on to each of its edges; that of edge k begins at `sent_at[k]`.
        widths = np.repeat(self.flat.size, np.diff(self.flat.near_start))
        self.sent_at = np.cumsum(widths) - widths
        self.sent_s = np.zeros(int(widths.sum()))
        self.timeline = Timeline(problem)
        #: By peak, what a limit's worth of bytes alive there costs.
        self.price: dict[int, float] = {}
        #: Whether the prices come from a relaxation: better ones than the overflow of one assignment gives.
        self.settled = False
        # Prices without end, where nothing is feasible, would drown the costs in rounding.
        self._most_price_s = MOST_PRICE * self.flat.forbidden_s
        #: What the priced bytes cost within the limit, which is paid in no case.
        self.refund_s = 0.0
        #: What each strategy costs with its priced bytes, before anything is shifted.
        self.priced_s = self.flat.unary_s.copy()
        self._chosen = np.zeros(len(problem.nodes), dtype=np.int64)

    def copy(self) -> DualAscent:
        """The same bound, to be raised apart."""
        other = copy.copy(self)
        other.node_s, other.sent_s = self.node_s.copy(), self.sent_s.copy()
        other._chosen = self._chosen.copy()
        return other

    def within(self, limit_bytes: int) -> DualAscent:
        """The same bound under another limit, at the same prices a byte."""
        other, was = self.copy(), self.problem.limit_bytes
        other.problem = replace(self.problem, limit_bytes=limit_bytes)
        other.price = {peak: price * limit_bytes / was for peak, price in self.price.items()} if was else {}
        other.refund_s = math.fsum(other.price.values())
        return other

    def only(self, node: int, strategies: Ints) -> DualAscent:
        """The same bound of what has one of some strategies at a node: the others cost as much as a forbidden pair."""
        other, at = self.copy(), self.flat.at[node]
        gone = np.zeros(self.node_s.size, dtype=np.bool_)
        gone[at : at + self.flat.size[node]] = True
        gone[at + strategies] = False
        other.forbid(gone)
        return other

    def forbid(self, gone: Bools) -> None:
        """Let some strategies (`bool` by strategy) cost as much as a forbidden pair besides."""
        self.node_s[gone] += self.flat.forbidden_s

    def sweep(self) -> Ints:
        """There and back; the assignment read off on the way there, each node the best after the earlier ones."""
        for forward in (True, False):
            messages.sweep(self.flat, self.node_s, self.sent_s, self.sent_at, forward, self._chosen)
        return self._chosen.copy()

    def bound_s(self) -> float:
        """The lower bound after a sweep: the edges' minima are zero then, all costs are at the nodes."""
        least = np.minimum.reduceat(self.node_s, self.flat.at)
        return math.fsum(least.tolist()) - self.refund_s - self.noise_s

    @property
    def noise_s(self) -> float:
        """What rounding can add to a bound."""
        return ROUNDING * self.flat.forbidden_s

    def reprice(self, load: Ints, open_s: float) -> None:
        """Move the price of each priced or overflowing peak along its overflow, under the bytes `load` alive there.

        Polyak's step, where `open_s` separates the bound from what it can reach.
        """
        limit = self.problem.limit_bytes
        if not limit or not self.flat.peaks:
            return
        peaks = sorted({*self.price, *self.timeline.worst(load, limit, PEAKS_A_ROUND)})
        over = {peak: float(load[peak]) / limit - 1.0 for peak in peaks}
        norm = sum(amount * amount for amount in over.values())
        if norm == 0.0:
            return
        step = open_s / norm
        self.set_prices({peak: self.price.get(peak, 0.0) + step * amount for peak, amount in over.items()})

    def set_prices(self, price_s: Mapping[int, float]) -> None:
        """Let a limit's worth of bytes alive at a peak cost `price_s[peak]`, at least 0; nothing at other peaks."""
        limit = self.problem.limit_bytes
        if not limit:
            return
        self.price = {peak: min(price, self._most_price_s) for peak, price in price_s.items() if price > 0.0}
        by_byte = np.zeros(self.flat.peaks)
        for peak, price in self.price.items():
            by_byte[peak] = price / limit
        priced_s = np.empty_like(self.priced_s)
        moves.price_window(self.flat, np.arange(self.flat.size.size), by_byte, priced_s)
        self.node_s += priced_s - self.priced_s
        self.priced_s = priced_s
        self.refund_s = math.fsum(self.price.values())

    def core(self, target_s: float) -> tuple[StrategyProblem, list[Ints]] | None:
        """The problem less all that can't lead under a cost, and which strategies of each node are left.

        None when nothing is.  Call it after a sweep.
        """
        slack = target_s - self.bound_s()
        numbers = edge_numbers(self.problem)
        extra = [costs - costs.min() for costs in np.split(self.node_s, self.flat.at[1:])]
        least = [costs.copy() for costs in extra]
        pairs: list[Floats] = []
        for edge, (ours, theirs) in zip(self.problem.edges, numbers.tolist(), strict=True):
            matrix = (
                edge.costs_s
                if edge.allowed is None
                else np.where(edge.allowed, edge.costs_s, self.flat.forbidden_s)
            )
            shifted = matrix + self._sent(edge.tail, ours)[:, None] + self._sent(edge.head, theirs)
            pairs.append(shifted)
            # A sweep ends with all costs at the lower nodes: there the edge has nothing left to say.
            if edge.tail > edge.head:
                extra[edge.tail] += shifted.min(axis=1)
            else:
                extra[edge.head] += shifted.min(axis=0)
        left = [np.flatnonzero(costs <= slack) for costs in extra]
        if not all(kept.size for kept in left):
            return None
        nodes = tuple(
            replace(node, costs_s=node.costs_s[kept])
            for node, kept in zip(self.problem.nodes, left, strict=True)
        )
        edges = []
        for edge, shifted in zip(self.problem.edges, pairs, strict=True):
            square = np.ix_(left[edge.tail], left[edge.head])
            mask = shifted[square] + least[edge.tail][left[edge.tail], None] <= slack - (
                least[edge.head][left[edge.head]]
            )
            if edge.allowed is not None:
                mask &= edge.allowed[square]
            edges.append(replace(edge, costs_s=edge.costs_s[square], allowed=None if mask.all() else mask))
        usages = tuple(replace(usage, bytes=usage.bytes[left[usage.node]]) for usage in self.problem.usages)
        return replace(self.problem, nodes=nodes, edges=tuple(edges), usages=usages), left

    def shifted(self, left: Sequence[Ints], core: StrategyProblem) -> tuple[StrategyProblem, float]:
        """A core with its costs as they are shifted, and what they lack of the original's in every assignment.

        With its priced bytes no node or pair costs less than nothing, and one strategy of each node costs nothing.  The
        bytes' price itself is not among the costs.
        """
        numbers = edge_numbers(self.problem)
        least = np.minimum.reduceat(self.node_s, self.flat.at)
        own_s = self.node_s - (self.priced_s - self.flat.unary_s)
        nodes = tuple(
            replace(node, costs_s=own_s[at + kept] - lowest)
            for node, at, kept, lowest in zip(core.nodes, self.flat.at, left, least, strict=True)
        )
        edges = []
        for edge, cut, (ours, theirs) in zip(self.problem.edges, core.edges, numbers.tolist(), strict=True):
            square = np.ix_(left[edge.tail], left[edge.head])
            moved = self._sent(edge.tail, ours)[:, None] + self._sent(edge.head, theirs)
            edges.append(replace(cut, costs_s=edge.costs_s[square] + moved[square]))
        return replace(core, nodes=nodes, edges=tuple(edges)), math.fsum(least.tolist())

    def _sent(self, node: int, number: int) -> Floats:
        begin = self.sent_at[number]
        return self.sent_s[begin : begin + self.flat.size[node]]


def ascend(
    dual: DualAscent, best: Incumbent, relative_gap: float, deadline: float, rounds: int = MOST_ROUNDS
) -> Ints:
    """Raise the bound of `best` until the gap is closed, little is gained, or the deadline.

    Returns the assignment that was read off last; it may overflow or take a forbidden pair.
    """
    top_s, since, step, prices = -math.inf, 0, 1.0, dual.price
    chosen = dual.sweep()
    for _ in range(rounds):
        for _ in range(SWEEPS_A_ROUND):
            chosen = dual.sweep()
        bound_s = dual.bound_s()
        best.raise_bound(bound_s)
        if best.closed(relative_gap) or time.monotonic() > deadline:
            break
        # Until something feasible is known, a tenth of the bound stands for what is open.
        open_s = best.objective_s - bound_s if best.found else 0.1 * abs(bound_s)
        since = 0 if bound_s - top_s > LEAST_GAIN * open_s else since + 1
        if bound_s > top_s:
            top_s, prices = bound_s, dual.price
        if not dual.settled:
            dual.reprice(moves.alive_bytes(dual.flat, chosen), step * open_s)
        if since and (dual.settled or not dual.price):
            break
        if since == PATIENCE:
            step, since = step * SHORTER, 0
            if step < LEAST_STEP:
                break
    if prices != dual.price:
        dual.set_prices(prices)
        chosen = dual.sweep()
    return chosen
