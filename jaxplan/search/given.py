"""No search: what it was given, such as the best of the plans that one would write by hand."""

from __future__ import annotations

from collections.abc import Sequence

from .base import Incumbent, Progress, SearchResult, Termination
from .problem import StrategyProblem


def solve(
    problem: StrategyProblem,
    *,
    time_limit_s: float | None = None,
    relative_gap: float = 1e-4,
    seed: int = 0,
    on_progress: Progress | None = None,
    hint: Sequence[int] | None = None,
) -> SearchResult:
    """The hint if it is feasible, and nothing without one: no bound.  See `jaxplan.search.base.Search`."""
    best = Incumbent(problem.verify(), on_progress)
    if hint is not None and best.offer(hint):
        return best.result(Termination.FEASIBLE)
    return best.result(Termination.TIME_LIMIT, "no feasible assignment was given")
