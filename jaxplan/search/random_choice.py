"""Random assignments: what a search that has learnt nothing finds, and so the least that others must beat."""

from __future__ import annotations

from collections.abc import Sequence

from .arena import Arena, search_in_arena
from .base import Progress, SearchResult
from .problem import StrategyProblem

#: Assignments that are drawn.
DRAWS = 1_000


def solve(
    problem: StrategyProblem,
    *,
    time_limit_s: float | None = None,
    relative_gap: float = 1e-4,
    seed: int = 0,
    on_progress: Progress | None = None,
    hint: Sequence[int] | None = None,
) -> SearchResult:
    """The best of `DRAWS` random assignments, or the hint; no bound.  See `jaxplan.search.base.Search`."""

    def work(arena: Arena) -> None:
        for _ in range(DRAWS):
            arena.check_clock()
            arena.offer(arena.by_chance())

    return search_in_arena(
        problem, work, time_limit_s=time_limit_s, relative_gap=relative_gap, seed=seed, on_progress=on_progress,
        hint=hint, contract_only=True,
    )  # fmt: skip
