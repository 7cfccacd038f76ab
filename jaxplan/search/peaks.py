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
from .profiles import Profile


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


_NO_PEAKS = Peaks(
    time_steps=np.zeros(0, np.int64), constant_bytes=np.zeros(0, np.int64), usages={}, overflow=None
)


def find_peaks(problem: StrategyProblem, graph: Contraction, limit_bytes: int | None) -> Peaks:
    """The peaks of the contracted graph under a limit; all local maxima when the limit is -1, none when None."""
    if limit_bytes is None:
        return _NO_PEAKS
    times, spans = graph.spans
    steps = times.size
    if not steps:
        return _NO_PEAKS
    base, varying = _split(problem, graph)
    constant = np.zeros(steps, dtype=np.int64)
    np.add.at(constant, spans[:, 0], base)
    np.subtract.at(constant, spans[:, 1], base)
    free, deciding = list[Profile](), list[Profile]()
    for node, own in list(varying.items()):
        profile = graph.matrices.profiles.of(list(own), list(own.values()), next(iter(own.values())).size)
        if graph.costs[node] is None:
            # It was minimised out because at every peak its bytes don't depend on the choice: there the most is exact.
            # Elsewhere it is an upper bound that stays under the peak which made the step superfluous.
            free.append(profile)
            del varying[node]
        else:
            deciding.append(profile)
    constant = np.cumsum(constant + _added([(p.at, p.most_delta) for p in free], steps))
    least_delta = _added([(p.at, p.least_delta) for p in deciding], steps)
    most_delta = _added([(p.at, p.most_delta) for p in deciding], steps)
    own_spans = np.array([span for own in varying.values() for span in own], dtype=np.int64).reshape(-1, 2)
    starts, stops = (np.bincount(own_spans[:, side], minlength=steps) for side in (0, 1))
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
                merged[span] = graph.matrices.plus(merged[span], used) if span in merged else used
        for (start, stop), used in sorted(merged.items(), key=lambda item: item[0]):
            least_used, above = graph.matrices.above(used)
            constant_bytes[start:stop] += least_used
            if above is not None:
                usages.setdefault(node, []).append((start, stop, above))
    return Peaks(
        time_steps=times[kept],
        constant_bytes=constant_bytes,
        usages=usages,
        overflow=int(times[over[0]]) if over.size else None,
    )


def _added(changes: list[tuple[Ints, Ints]], steps: int) -> Ints:
    """The sum of (at, by how much) changes at each step."""
    total = np.zeros(steps, dtype=np.int64)
    if changes:
        np.add.at(total, np.concatenate([at for at, _ in changes]), np.concatenate([by for _, by in changes]))
    return total


def _split(
    problem: StrategyProblem, graph: Contraction
) -> tuple[Ints, dict[int, dict[tuple[int, int], Ints]]]:
    """Each usage's bytes in any case; and what is above them, added up by node of the graph and interval."""
    owner, choice = _owners(graph, len(problem.nodes))
    matrices, spans = graph.matrices, list(map(tuple, graph.spans[1].tolist()))
    base = np.zeros(len(spans), dtype=np.int64)
    varying: dict[int, dict[tuple[int, int], Ints]] = {}
    for i, (usage, bytes_, span) in enumerate(zip(problem.usages, graph.used, spans, strict=True)):
        node = owner[usage.node]
        base[i], above = matrices.above(matrices.rows(bytes_, choice[usage.node]))
        if above is not None:
            own = varying.setdefault(node, {})
            own[span] = matrices.plus(own[span], above) if span in own else above
    return base, varying


def _owners(graph: Contraction, count: int) -> tuple[list[int], list[Ints]]:
    """For each original node, the node of the graph it went into, and its strategy for each one of that node."""
    owner, rows = list(range(count)), graph.matrices.rows
    every = graph.matrices.every
    choice = [every(0 if costs is None else costs.size) for costs in graph.costs]
    for step in reversed(graph.trail):
        if isinstance(step, Keep):
            choice[step.node] = rows(step.kept, choice[step.node])
        elif isinstance(step, Fold):
            choice[step.node], owner[step.node] = rows(step.follows, choice[step.into]), owner[step.into]
        elif isinstance(step, Eliminate):
            choice[step.node] = every(step.size)
    return owner, choice


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
