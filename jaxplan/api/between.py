"""Between a plan that fits its budget and a cheaper one that overruns it: as much of the latter as fits.

Where two assignments differ, they differ in parts that no edge joins: each is taken over, or not, at a price of its
own, and the simulation says whether the whole still fits.  (The idea is path relinking: F. Glover, M. Laguna, R. Marti,
"Fundamentals of scatter search and path relinking", Control and Cybernetics 29, 2000.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..disjoint import Disjoint
from ..search import Evaluator, decide
from .found import Found

if TYPE_CHECKING:
    from .candidates import Pipeline

SIMULATIONS = 24
"""At most: each takes a fraction of a second, as long as a search of a small problem."""

LEAST_GAIN = 1e-4
"""Of a step: parts that bring less are tried only where they take less memory."""


def nearer(pipeline: Pipeline, fits: Found, over: Found) -> Found:
    """`fits` with the parts of `over` that make it cheaper within the budget, largest gains first.

    What was over budget is tried again once another part has made room.
    """
    evaluator, left = Evaluator(fits.space.problem), SIMULATIONS
    chosen, other = np.array(fits.result.assignment), np.array(over.result.assignment)
    decision, memory, objective_s = fits.decision, fits.memory, fits.result.objective_s

    def taken(part: np.ndarray) -> np.ndarray:
        made = chosen.copy()
        made[part] = other[part]
        return made

    def saving(part: np.ndarray) -> float:
        return objective_s - evaluator(taken(part)).objective_s

    parts = sorted(((saving(part), part) for part in differing(fits, over)), key=lambda one: -one[0])
    tried = [(saved, part) for saved, part in parts if saved >= 0]
    moved = True
    while moved and left > 0:
        moved, failed = False, []
        for saved, part in tried[:left]:
            made = taken(part)
            decided = decide(fits.space, made.tolist())
            simulated = pipeline.simulate(decided)
            room = simulated.peak_bytes < memory.peak_bytes
            if simulated.peak_bytes <= pipeline.budget_bytes and (room or saved > LEAST_GAIN * objective_s):
                chosen, decision, memory, moved = made, decided, simulated, True
            else:
                failed.append((saved, part))
        left -= len(tried)
        tried = failed
    result = replace(
        fits.result, assignment=tuple(chosen.tolist()), objective_s=evaluator(chosen.tolist()).objective_s
    )
    if not result.objective_s < objective_s:
        return fits
    result = result.bounded(result.bound_s, pipeline.options.relative_gap)
    return replace(fits, result=result, decision=decision, memory=memory)


def differing(one: Found, other: Found) -> Iterator[np.ndarray]:
    """The nodes that two assignments of one problem decide differently, in parts that no edge joins."""
    problem = one.space.problem
    differ = np.array(one.result.assignment) != np.array(other.result.assignment)
    sets = Disjoint(len(problem.nodes))
    for edge in problem.edges:
        if differ[edge.tail] and differ[edge.head]:
            sets.join(edge.tail, edge.head)
    parts: dict[int, list[int]] = {}
    for node in np.flatnonzero(differ).tolist():
        parts.setdefault(sets.find(node), []).append(node)
    yield from map(np.array, parts.values())
