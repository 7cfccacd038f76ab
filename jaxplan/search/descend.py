"""Deterministic local search: from any assignment to one that no change of a single node improves.

It proves nothing.  The exact search rounds its relaxations with it, so that something feasible is known early,
and it is an algorithm of its own for problems too large for a proof.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from .base import Incumbent, Progress, SearchResult, Termination
from .contract import Matrices
from .flat import node_usages
from .problem import Floats, Ints, StrategyProblem
from .reduce import reduce

#: Sweeps over all nodes; a sweep that changes nothing ends the descent, most end within ten.
MOST_SWEEPS = 50

#: Peaks that one repair may bring down, one after the other.
MOST_REPAIRS = 1000


class Descent:
    """An assignment of one problem, with what each single change of it costs.

    Forbidden pairs are priced above anything else, so that a start that takes some can be led out of them.
    """

    def __init__(self, problem: StrategyProblem) -> None:
        self.problem = problem
        self.costs = [node.costs_s for node in problem.nodes]
        self._near: list[list[tuple[int, Floats]]] = [[] for _ in problem.nodes]
        matrices = Matrices()
        span = sum(float(np.ptp(costs)) for costs in self.costs)
        span += sum(float(np.ptp(edge.costs_s)) for edge in problem.edges)
        self.forbidden_s = 2.0 * span + 1.0
        priced: dict[int, Floats] = {}
        for edge in problem.edges:
            masked = matrices.masked(edge.costs_s, edge.allowed)
            for a, b, matrix in (
                (edge.tail, edge.head, masked),
                (edge.head, edge.tail, matrices.turned(masked)),
            ):
                if id(matrix) not in priced:
                    # Turned once more, so that the row of the neighbour's strategy lies in one piece.
                    priced[id(matrix)] = np.ascontiguousarray(np.minimum(matrix, self.forbidden_s).T)
                self._near[a].append((b, priced[id(matrix)]))
        self.limit = problem.limit_bytes
        self.peaks = max((usage.stop for usage in problem.usages), default=0)
        self._segments = node_usages(problem)
        self.chosen: list[int] = []
        self.load = np.zeros(self.peaks, dtype=np.int64)

    def start(self, assignment: Sequence[int]) -> None:
        """Take up an assignment."""
        self.chosen = [int(strategy) for strategy in assignment]
        self.load[:] = 0
        for node, segments in enumerate(self._segments):
            for start, stop, used in segments:
                self.load[start:stop] += used[self.chosen[node]]

    def field(self, node: int) -> Floats:
        """What each strategy of the node would cost, with its edges, the others staying as they are."""
        total = self.costs[node].copy()
        for other, rows in self._near[node]:
            total += rows[self.chosen[other]]
        return total

    def excess(self, node: int) -> Ints | None:
        """Bytes over the limit at the worst peak where the node is alive, for each strategy; None if none can
        be.
        """
        if self.limit is None or not self._segments[node]:
            return None
        worst: Ints | None = None
        for start, stop, used in self._segments[node]:
            over = int(self.load[start:stop].max()) - int(used[self.chosen[node]]) - self.limit + used
            worst = over if worst is None else np.maximum(worst, over)
        assert worst is not None
        return np.maximum(worst, 0) if worst.max() > 0 else None

    def allowed(self) -> bool:
        """Whether no chosen pair is forbidden."""
        return all(
            edge.allowed is None or bool(edge.allowed[self.chosen[edge.tail], self.chosen[edge.head]])
            for edge in self.problem.edges
        )

    def move(self, node: int, strategy: int) -> None:
        """Change one choice."""
        for start, stop, used in self._segments[node]:
            self.load[start:stop] += used[strategy] - used[self.chosen[node]]
        self.chosen[node] = strategy

    def sweep(self) -> bool:
        """Give every node in turn its cheapest strategy that adds no excess; say whether anything changed."""
        changed = False
        for node in range(len(self.costs)):
            if self.costs[node].size == 1:
                continue
            field, excess = self.field(node), self.excess(node)
            now = self.chosen[node]
            if excess is not None:
                field = np.where(excess <= excess[now], field, np.inf)
            best = int(np.argmin(field))
            if field[best] < field[now]:
                self.move(node, best)
                changed = True
        return changed

    def repair(self, deadline: float = math.inf) -> bool:
        """Bring down the worst peak by the changes that cost least a byte, until all fit; say whether they do."""
        if self.limit is None:
            return True
        for _ in range(MOST_REPAIRS):
            if not self.peaks or self.load.max() <= self.limit:
                return True
            if time.monotonic() > deadline or not self._lower(int(np.argmax(self.load))):
                return False
        return False

    def _lower(self, peak: int) -> bool:
        """Change nodes that are alive at a peak, the cheapest a byte first, until it fits; False if none helps."""
        assert self.limit is not None
        need = int(self.load[peak]) - self.limit
        offers: list[tuple[float, int, int, int]] = []
        for node, segments in enumerate(self._segments):
            used = next((u for start, stop, u in segments if start <= peak < stop), None)
            if used is None:
                continue
            saved = used[self.chosen[node]] - used
            candidates = np.flatnonzero(saved > 0)
            if candidates.size:
                field = self.field(node)
                rate = (field[candidates] - field[self.chosen[node]]) / np.minimum(saved[candidates], need)
                # Of two that cost as much a byte, the one that saves more.
                at = int(np.lexsort((-saved[candidates], rate))[0])
                offers.append((float(rate[at]), -int(saved[candidates[at]]), node, int(candidates[at])))
        stale: set[int] = set()
        for _, _, node, strategy in sorted(offers):
            if self.load[peak] <= self.limit:
                break
            # The rate of a node was reckoned before its neighbour changed.
            if node not in stale:
                self.move(node, strategy)
                stale.update(other for other, _ in self._near[node])
        return bool(offers)

    def descend(self, assignment: Sequence[int], deadline: float = math.inf) -> list[int]:
        """Settle from an assignment: down in cost, then within the limit, then down again without leaving it."""
        self.start(assignment)
        for _ in range(2):
            for _ in range(MOST_SWEEPS):
                if time.monotonic() > deadline or not self.sweep():
                    break
            if self.repair(deadline):
                for _ in range(MOST_SWEEPS):
                    if time.monotonic() > deadline or not self.sweep():
                        break
        return list(self.chosen)


def solve(
    problem: StrategyProblem,
    *,
    time_limit_s: float | None = None,
    relative_gap: float = 1e-4,
    seed: int = 0,
    on_progress: Progress | None = None,
    hint: Sequence[int] | None = None,
) -> SearchResult:
    """Local search alone, from the cheapest strategy of each node and from the hint: no bound, hence FEASIBLE
    at best.
    """
    best = Incumbent(problem.verify(), on_progress)
    deadline = math.inf if time_limit_s is None else best.started + time_limit_s
    try:
        if hint is not None:
            best.offer(hint)
        reduction = reduce(problem)
        if reduction.infeasible:
            return best.result(Termination.INFEASIBLE, reduction.infeasible)
        descent = Descent(reduction.problem)
        start = [int(np.argmin(node.costs_s)) for node in reduction.problem.nodes]
        best.offer(reduction.lift(descent.descend(start, deadline)))
    except KeyboardInterrupt:
        return best.result(Termination.INTERRUPTED)
    if not best.found or time.monotonic() > deadline:
        return best.result(Termination.TIME_LIMIT, "local search reached nothing feasible")
    return best.result(Termination.FEASIBLE)
