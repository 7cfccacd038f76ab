"""The memory side of a reduction: which time steps can exceed the limit at all, and what is alive in them.

Most time steps can't: even if every node chose its largest strategy they would fit.  Of the rest, a step whose
live set lies inside its neighbour's never binds first.  What remains is a short list of *peaks*, each with the
bytes that are alive whatever is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .contract import Contraction, Eliminate, Fold, Keep
from .problem import Ints, StrategyProblem


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """The peaks in the order of time: `constant_bytes[p]` alive at peak p in any case, and what depends on a
    choice.

    `time_steps[p]` is the time step of the problem that peak p stands for. `usages[node]` are (start, stop,
    bytes): alive at the peaks start <= p < stop, by the strategy of the node. `overflow` is the first time step
    at which not even the least choices fit, None when there is none.
    """

    time_steps: Ints
    constant_bytes: Ints
    usages: dict[int, list[tuple[int, int, Ints]]]
    overflow: int | None

    def profile(self, node: int, size: int) -> Ints:
        """[steps, strategies] bytes of the node, a row for each step at which they change."""
        own = self.usages.get(node, [])
        return _profile([(a, b) for a, b, _ in own], [u for _, _, u in own], size)[1]


_NO_PEAKS = Peaks(
    time_steps=np.zeros(0, np.int64), constant_bytes=np.zeros(0, np.int64), usages={}, overflow=None
)


def find_peaks(problem: StrategyProblem, graph: Contraction, limit_bytes: int | None) -> Peaks:
    """The peaks of the contracted graph under a limit; all local maxima when the limit is -1, none when None."""
    if limit_bytes is None:
        return _NO_PEAKS
    bounds = np.array([(u.start, u.stop) for u in problem.usages], dtype=np.int64).reshape(-1, 2)
    times, where = np.unique(bounds, return_inverse=True)
    spans = [(int(a), int(b)) for a, b in where.reshape(-1, 2)]
    steps = times.size
    if not steps:
        return _NO_PEAKS
    base, varying = _split(problem, graph, spans)
    constant = np.zeros(steps, dtype=np.int64)
    np.add.at(constant, where.reshape(-1, 2)[:, 0], base)
    np.subtract.at(constant, where.reshape(-1, 2)[:, 1], base)
    for node in [node for node in varying if graph.costs[node] is None]:
        # It was minimised out because at every peak its bytes don't depend on the choice: there the most is exact.
        # Elsewhere it is an upper bound that stays under the peak which made the step superfluous.
        own = varying.pop(node)
        at, rows = _profile(list(own), list(own.values()), next(iter(own.values())).size)
        np.add.at(constant, at, np.diff(rows.max(axis=1), prepend=0))
    constant = np.cumsum(constant)

    least_delta, most_delta = np.zeros(steps, np.int64), np.zeros(steps, np.int64)
    starts, stops = np.zeros(steps, np.int64), np.zeros(steps, np.int64)
    for own in varying.values():
        at, rows = _profile(list(own), list(own.values()), next(iter(own.values())).size)
        np.add.at(least_delta, at, np.diff(rows.min(axis=1), prepend=0))
        np.add.at(most_delta, at, np.diff(rows.max(axis=1), prepend=0))
        for start, stop in own:
            starts[start] += 1
            stops[stop] += 1
    least, most = constant + np.cumsum(least_delta), constant + np.cumsum(most_delta)
    over = np.flatnonzero(least > limit_bytes)
    kept = _local_maxima(np.flatnonzero(most > limit_bytes), constant, np.cumsum(starts), np.cumsum(stops))
    constant_bytes = constant[kept]
    position = np.searchsorted(kept, np.arange(steps)).tolist()
    usages: dict[int, list[tuple[int, int, Ints]]] = {}
    for node, own in varying.items():
        merged: dict[tuple[int, int], Ints] = {}
        for (start, stop), used in own.items():
            span = position[start], position[stop]
            if span[0] < span[1]:
                merged[span] = merged[span] + used if span in merged else used
        for (start, stop), used in sorted(merged.items(), key=lambda item: item[0]):
            least_used = used.min()
            constant_bytes[start:stop] += least_used
            if (used > least_used).any():
                usages.setdefault(node, []).append((start, stop, used - least_used))
    return Peaks(
        time_steps=times[kept],
        constant_bytes=constant_bytes,
        usages=usages,
        overflow=int(times[over[0]]) if over.size else None,
    )


def _split(
    problem: StrategyProblem, graph: Contraction, spans: list[tuple[int, int]]
) -> tuple[Ints, dict[int, dict[tuple[int, int], Ints]]]:
    """Each usage's bytes in any case; and what is above them, added up by node of the graph and interval."""
    owner, choice = _owners(graph, len(problem.nodes))
    # Many usages are alike, and so are the strategies they are chosen by: each pair of the two is looked at
    # once.
    seen: dict[int, tuple[int, Ints | None]] = {}
    base = np.zeros(len(spans), dtype=np.int64)
    varying: dict[int, dict[tuple[int, int], Ints]] = {}
    for i, (usage, span) in enumerate(zip(problem.usages, spans, strict=True)):
        node = owner[usage.node]
        used = graph.matrices.rows(graph.matrices.intern(usage.bytes), choice[usage.node])
        if id(used) not in seen:
            least = int(used.min())
            seen[id(used)] = least, np.subtract(used, least) if (used > least).any() else None
        base[i], above = seen[id(used)]
        if above is not None:
            own = varying.setdefault(node, {})
            own[span] = own[span] + above if span in own else above
    return base, varying


def _owners(graph: Contraction, count: int) -> tuple[list[int], list[Ints]]:
    """For each original node, the node of the graph it went into, and its strategy for each one of that node."""
    owner, rows = list(range(count)), graph.matrices.rows
    empty = np.zeros(0, np.int64)
    choice = [
        empty if costs is None else graph.matrices.intern(np.arange(costs.size)) for costs in graph.costs
    ]
    for step in reversed(graph.trail):
        if isinstance(step, Keep):
            choice[step.node] = rows(step.kept, choice[step.node])
        elif isinstance(step, Fold):
            choice[step.node], owner[step.node] = rows(step.follows, choice[step.into]), owner[step.into]
        elif isinstance(step, Eliminate):
            choice[step.node] = graph.matrices.intern(np.arange(step.size))
    return owner, choice


def _profile(spans: list[tuple[int, int]], used: list[Ints], size: int) -> tuple[Ints, Ints]:
    """The steps at which the sum of the usages changes, and the sum from each of them on, [steps, strategies]."""
    at, where = np.unique(np.array(spans, dtype=np.int64).reshape(-1, 2), return_inverse=True)
    rows = np.zeros((at.size, size), dtype=np.int64)
    for (start, stop), amount in zip(where.reshape(-1, 2).tolist(), used, strict=True):
        rows[start] += amount
        rows[stop] -= amount
    return at, np.cumsum(rows, axis=0)


def _local_maxima(steps: Ints, constant: Ints, starts: Ints, stops: Ints) -> Ints:
    """Drop each step whose live set lies inside that of the one before or after, with no more constant bytes.

    `starts` and `stops` count the varying usages that started and stopped up to a step: with no stop between
    two steps the earlier live set lies inside the later one.
    """
    kept: list[int] = []
    for step in steps.tolist():
        while kept and stops[step] == stops[kept[-1]] and constant[step] >= constant[kept[-1]]:
            kept.pop()
        if not kept or starts[step] > starts[kept[-1]] or constant[step] > constant[kept[-1]]:
            kept.append(step)
    return np.array(kept, dtype=np.int64)
