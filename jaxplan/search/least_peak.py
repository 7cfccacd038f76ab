"""The least peak that any assignment reaches: what a user is told whose budget nothing fits."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from .base import Incumbent, SearchResult, Termination
from .descend import Descent
from .engine import Engine
from .problem import Edge, Floats, Ints, StrategyProblem
from .program import OutOfTime, Program, Timeline
from .reduce import reduce

#: A row for each of so many peaks, a round.
ROWS_A_ROUND = 8


def least_peak(
    problem: StrategyProblem, *, time_limit_s: float | None = 30.0, relative_gap: float = 1e-3, seed: int = 0
) -> SearchResult:
    """The assignment of the smallest peak, whatever it costs and whatever the limit is.

    OPTIMAL: no assignment has a peak under `(1 - relative_gap) * peak_bytes` (or 1e-6, HiGHS' own tolerance);
    `objective_s` is what this one costs, `bound_s` is -inf.  INFEASIBLE, with an empty assignment: the edges
    forbid everything.
    """
    zeros: dict[tuple[int, ...], Floats] = {}

    def free(costs: Floats) -> Floats:
        return zeros.setdefault(costs.shape, np.zeros(costs.shape))

    unpriced = StrategyProblem(
        nodes=tuple(replace(node, costs_s=free(node.costs_s)) for node in problem.verify().nodes),
        edges=tuple(
            Edge(tail=edge.tail, head=edge.head, costs_s=free(edge.costs_s), allowed=edge.allowed)
            for edge in problem.edges
            if edge.allowed is not None
        ),
        usages=problem.usages,
    )
    best = Incumbent(replace(problem, limit_bytes=None))
    deadline = math.inf if time_limit_s is None else best.started + time_limit_s
    reduction = reduce(unpriced, for_peak=True)
    if reduction.infeasible:
        return best.result(Termination.INFEASIBLE, reduction.infeasible)
    lowest = _Lowest(reduction.problem)
    termination = Termination.OPTIMAL
    try:
        _lower(lowest, Engine(deadline=deadline, seed=seed), relative_gap, deadline)
    except OutOfTime:
        termination = Termination.TIME_LIMIT
    except KeyboardInterrupt:
        termination = Termination.INTERRUPTED
    if lowest.chosen:
        best.offer(reduction.lift(lowest.chosen))
    return best.result(termination)


class _Lowest:
    """The allowed assignment of the smallest peak so far, of a reduced problem that has no prices."""

    def __init__(self, small: StrategyProblem) -> None:
        self.small, self.timeline = small, Timeline(small)
        self.chosen: list[int] = []
        self.peak_bytes = math.inf
        sizes = np.array([node.costs_s.size for node in small.nodes], dtype=np.int64)
        self._offset, self._total = np.cumsum(sizes) - sizes, int(sizes.sum())

    def alive(self, chosen: Ints) -> Floats:
        values = np.zeros(self._total)
        values[self._offset + chosen] = 1.0
        return self.timeline.bytes_at_peaks(values)

    def offer(self, chosen: Ints) -> Floats:
        """Keep an allowed assignment if its peak is smaller; the bytes alive at every peak."""
        alive = self.alive(chosen)
        if not self.chosen or alive.max(initial=0.0) < self.peak_bytes:
            self.chosen, self.peak_bytes = chosen.tolist(), float(alive.max(initial=0.0))
        return alive


def _lower(lowest: _Lowest, engine: Engine, relative_gap: float, deadline: float) -> None:
    """Bring the peak down to within the gap of its bound, by relaxations first and exactly then."""
    small, timeline = lowest.small, lowest.timeline
    program = Program(small, range(len(small.nodes)), for_peak=True)
    unit = program.peak_unit_bytes
    start = np.array([0] * len(small.nodes), dtype=np.int64)
    rows: set[int] = set()
    new, relaxed = timeline.worst(lowest.alive(start), -1.0, ROWS_A_ROUND), True
    while True:
        for peak in new:
            program.add_memory(peak)
        rows.update(new)
        answer = engine.run(
            program, unit=1.0, relative_gap=0.0 if relaxed else relative_gap / 2, relaxed=relaxed
        )
        if answer.infeasible:
            return
        bound_bytes = answer.bound * unit
        chosen = program.choice(answer.values)
        if relaxed:
            descent = Descent(replace(small, limit_bytes=math.ceil(bound_bytes)))
            settled = np.array(descent.descend(chosen.tolist(), deadline), dtype=np.int64)
            if descent.allowed():
                lowest.offer(settled)
            alive = timeline.bytes_at_peaks(answer.values)
        else:
            alive = lowest.offer(chosen)
        if lowest.chosen and lowest.peak_bytes - bound_bytes <= relative_gap * lowest.peak_bytes:
            return
        new = [p for p in timeline.worst(alive, bound_bytes * (1 + 1e-9), ROWS_A_ROUND) if p not in rows]
        if not new:
            if not relaxed:
                return
            relaxed = False
