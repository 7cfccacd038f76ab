"""Searching on where what was found is over budget as simulated: as well proved as before, and no search twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxplan.api import Found, Pipeline
from jaxplan.api.budget import within_budget
from jaxplan.ir import Traced
from jaxplan.search import Evaluator, SearchResult, Space


def test_what_fits_a_tight_budget_is_proved_by_the_first_search(
    planner_for: Callable[..., Pipeline], chain: Callable[[int, int], Traced]
) -> None:
    planner = planner_for(chain(6, 8192), (8,), "h100", 2**36)
    space = planner.space({})
    roomy, _ = planner.as_found(space, planner.solve(space, planner.budget_bytes, None), 0.0)
    counted = Evaluator(space.problem)(roomy.result.assignment).peak_bytes
    planner.budget_bytes = (counted + roomy.memory.peak_bytes) // 2  # the rows let it through, the simulation doesn't
    asked: list[tuple[int, int]] = []

    def search(limit: int, begin: Sequence[int] | None = None, told: Space = space) -> SearchResult:
        asked.append((limit, len(told.problem.usages)))
        return planner.solve(told, limit, begin)

    def loosely(limit: int, told: Space) -> SearchResult:
        return replace(search(limit, None, told), bound_s=0.0)

    found = within_budget(planner, space, search, loosely)
    assert isinstance(found, Found) and found.memory.peak_bytes <= planner.budget_bytes
    first = planner.solve(space, planner.budget_bytes, None)
    assert asked[0] == (planner.budget_bytes, len(space.problem.usages)) and len(asked) > 1
    assert found.result.bound_s == min(first.bound_s, found.result.objective_s) > 0
    assert max(Counter(asked).values()) <= 2, "what was found loosely is looked for once more, to be proved"
