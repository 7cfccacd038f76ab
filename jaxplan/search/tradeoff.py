"""The frontier of step time and peak memory, by the way that the problem allows."""

from __future__ import annotations

import time
from collections.abc import Callable

from .base import SearchResult
from .frontier import TooWide, Tradeoff, trace_frontier
from .ilp import solve
from .least_peak import least_peak
from .problem import StrategyProblem
from .sweep import sweep_frontier

#: Seconds that one budget of a sweep may take.
BUDGET_S = 10.0

#: The part of the time that stretches are walked for, if budgets have to be searched for the rest.
WALK_SHARE = 0.6

#: Sums that tables over the whole of a small problem may take, and time steps that they carry.
WHOLE_SUMS, WHOLE_ROWS = 3_000_000, 2


def tradeoff(
    problem: StrategyProblem,
    *,
    eps: float,
    time_limit_s: float,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Tradeoff, str]:
    """The frontier and, in words, how it was found; `limit_bytes` is not looked at.

    Args:
      eps: plans that differ by less, relatively, are not parted; time_limit_s: no stretch or search begins after it.
    """
    deadline = time.monotonic() + time_limit_s
    try:
        found = trace_frontier(problem, width=eps, most_sums=WHOLE_SUMS, most_rows=WHOLE_ROWS)
        if found.regret_bound <= eps:
            return found, f"by elimination over {found.rows} time steps"
    except TooWide:
        pass
    # compiled code, and what compiles it, are loaded by those who need them
    from .stretches import walk_frontier

    count = 0

    def search(limited: StrategyProblem, start: tuple[int, ...]) -> SearchResult:
        gap = max(eps / 10, 1e-6)
        return solve(limited, time_limit_s=BUDGET_S, relative_gap=gap, seed=seed, hint=start or None)

    def tell(searched: int, width: float) -> None:
        nonlocal count
        count = searched
        say(f"{searched} budgets searched; widest gap left {width:.2g}")

    least = least_peak(problem, time_limit_s=BUDGET_S, seed=seed)
    walked, left = walk_frontier(
        problem, search, least, eps=eps, deadline=time.monotonic() + WALK_SHARE * time_limit_s,
        on_stretch=lambda points, budget: say(f"{points} points; next those within {budget} bytes"),
    )  # fmt: skip
    how = "by elimination, stretch by stretch"
    if not left:
        return walked, how
    # whether the walk came to anything but the least peak
    begun = walked.largest > 0
    found = sweep_frontier(
        problem, search, least, eps=eps, time_limit_s=max(deadline - time.monotonic(), 0.0),
        known=walked if begun else None, known_from=left, on_point=tell,
    )  # fmt: skip
    swept = f"by {count} searches under different budgets"
    return found, f"{how}, and {swept}" if begun else swept
