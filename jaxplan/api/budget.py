"""Searching within a memory budget: until what is found fits as simulated, and as cheap as that allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..search import SearchResult, Space, Termination
from .between import nearer
from .found import Found, Nothing
from .told import Told

if TYPE_CHECKING:
    from .candidates import Pipeline

LEFT_GAP = 0.01
"""A gap that what fits is left with, where what is cheaper by the rows is over budget."""

PROOF_ROUNDS = 3
"""Searches for something cheaper that fits than what fits."""

MEMORY_ROUNDS = 6
"""Searches with a tightened limit before giving up on a budget that only the decided layouts overrun."""


def _between(strict: int, loose: int, excess: int) -> int:
    """A limit between one that lets nothing through and one that lets too much through, by so many bytes."""
    return max(loose - excess, (loose + strict) // 2) if strict < loose else loose


def within_budget(
    pipeline: Pipeline, space: Space, search: Callable[..., SearchResult],
    loosely: Callable[..., SearchResult] | None = None,
) -> Found | Nothing:  # fmt: skip
    """What `search` finds within a limit of bytes such that the simulation is within the budget.

    The search's memory rows and the simulation differ a little both ways.  Where the simulation is over budget,
    `loosely(limit, space)` is told what the rows lack, and, where nothing fits so, the rows are tightened: what is
    over budget again need not be proved.  `search(limit, begin, space)` goes on from what fits.  The bound is that
    of the budget's own rows (`Pipeline.rows_bytes`).
    """
    result = first = search(pipeline.rows_bytes)
    if not first.found:
        return Nothing(space=space, result=first)
    found, excess = pipeline.as_found(space, first, first.bound_s)
    if excess <= 0:
        return found
    over = [found]
    if loosely is not None:
        told = Told(pipeline, space)
        for _ in range(MEMORY_ROUNDS):
            told.tell(over[-1])
            pipeline.say(f"{excess} bytes over budget once copies are counted: searching again")
            limit = told.limit_bytes(over[-1])
            result = loosely(max(limit, 0), told.space)
            if not result.found:
                break
            found, excess = pipeline.as_found(space, result, first.bound_s)
            if excess <= 0:
                return _proved(pipeline, found, limit, told, [], search)
            over.append(found)
    limit, strict = pipeline.rows_bytes, 0
    loose, excess = min(limit, first.peak_bytes - 1), over[0].memory.peak_bytes - pipeline.budget_bytes
    for _ in range(1, MEMORY_ROUNDS):
        limit = _between(strict, loose, excess)
        result = search(max(limit, 0)) if loosely is None else loosely(max(limit, 0), space)
        if not result.found:
            strict = limit
            if result.termination is not Termination.INFEASIBLE:
                break
            continue
        found, excess = pipeline.as_found(space, result, first.bound_s)
        if excess <= 0:
            return _proved(pipeline, found, limit, Told(pipeline, space), over, search) if loosely else found
        over.append(found)
        loose = min(limit, result.peak_bytes - 1)
    # what fits the simulation, if anything, costs no less than what the budget's own rows let through
    return Nothing(space=space, result=dataclasses.replace(result, bound_s=first.bound_s))


def _proved(
    pipeline: Pipeline, found: Found, limit: int, told: Told, over: Sequence[Found], search: Callable[..., SearchResult]
) -> Found:
    """The cheapest that fits of `found`, found at `limit`, what a search that proves more comes to there, and,
    while that is not known to be within `LEFT_GAP`, what searches find that are told what the rows lack of plans
    `over` the budget: their limit leaves out what overruns it, and takes in the room that others leave."""
    best, overrun, seen = found, list(over), {one.result.assignment for one in over}
    asked = set[tuple[int, int]]()  # with nothing more told the same limit is the same search
    for _ in range(1 + PROOF_ROUNDS):
        search_key = limit, len(told.space.problem.usages)
        if best.result.gap <= pipeline.options.relative_gap or search_key in asked:
            break
        asked.add(search_key)
        result = search(limit, best.result.assignment, told.space)
        if not result.found or result.assignment in seen:
            break
        seen.add(result.assignment)
        other, excess = pipeline.as_found(found.space, result, found.result.bound_s)
        if excess > 0:
            overrun.append(other)
            best = nearer(pipeline, best, other)
        elif other.result.objective_s < best.result.objective_s:
            best = other
        if best.result.gap <= LEFT_GAP or (excess == 0 and not overrun):
            break
        for one in overrun:
            told.tell(one)
        limit = told.limit_bytes(overrun[-1]) if overrun else min(limit - excess, pipeline.rows_bytes)
        overrun = []
    return best
