"""Random assignments: what a search that has learnt nothing finds, and so the least that others must beat."""

from __future__ import annotations

from .arena import Arena, searcher

#: Assignments that are drawn.
DRAWS = 1_000


def _draw(arena: Arena) -> None:
    for _ in range(DRAWS):
        arena.check_clock()
        arena.offer(arena.by_chance())


solve = searcher(_draw, contract_only=True)
"""The best of `DRAWS` random assignments, or the hint; no bound.  See `jaxplan.search.base.Search`."""
