"""Plans that take as little memory as any."""

from __future__ import annotations

import dataclasses
import math

from ..search import Decision, SearchResult, Space, decide, least_peak, solve

NEAR = 1.02
"""A peak this much over the least is as good to tell a user, and leaves room for a sensible plan."""

NEAR_LEAST_S = 20.0
"""A refusal is not worth a longer search."""


def near_least_peak(
    space: Space, seed: int, *, only_within: float = math.inf
) -> tuple[Decision | None, SearchResult]:
    """The cheapest decision near the least peak; None when nothing is possible, or not within `only_within` bytes.

    The assignment of the least peak itself reshards as it likes, which its rows don't see: near it, the cheapest one
    has no copies but those that it needs.
    """
    least = least_peak(space.problem)
    if not least.found or least.peak_bytes > only_within:
        return None, least
    near = dataclasses.replace(space.problem, limit_bytes=int(least.peak_bytes * NEAR) + 1)
    cheap = solve(near, time_limit_s=NEAR_LEAST_S, relative_gap=0.01, seed=seed, hint=least.assignment)
    chosen = cheap if cheap.found else least
    return decide(space, chosen.assignment), chosen
