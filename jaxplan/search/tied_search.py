"""The search of a tied problem under pins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .base import SearchResult
from .contract import Matrices
from .ilp import solve_with_room
from .problem import Ints
from .tied import Tied, narrowed


class Alike(NamedTuple):
    """What a search of a tied problem found, and its assignment of the original; both None, where nothing is left."""

    found: SearchResult | None
    assignment: tuple[int, ...] = ()


def search_tied(
    tied: Tied,
    kept: Mapping[int, Ints],
    *,
    time_limit_s: float | None,
    relative_gap: float,
    seed: int,
    enough_s: float,
    matrices: Matrices,
) -> Alike:
    """The cheapest assignment of `tied` with only the strategies `kept` left; see `Folds.alike`."""
    left = narrowed(tied, kept)
    if left is None:
        return Alike(None)
    found, _ = solve_with_room(
        left.problem, time_limit_s=time_limit_s, relative_gap=relative_gap, seed=seed, matrices=matrices,
        enough_s=enough_s,
    )  # fmt: skip
    return Alike(found, left.lift(found.assignment) if found.found else ())
