"""The frontier of step time and peak memory, by the way that the problem allows."""

from __future__ import annotations

from collections.abc import Callable

from .base import SearchResult
from .frontier import TooWide, Tradeoff, trace_frontier
from .ilp import solve
from .least_peak import least_peak
from .problem import StrategyProblem
from .sweep import sweep_frontier

#: Seconds that one budget of a sweep may take.
BUDGET_S = 10.0


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
      eps: plans that differ by less, relatively, are not parted; time_limit_s: no search of a sweep begins after it.
    """
    try:
        found = trace_frontier(problem, width=eps)
        return found, f"by elimination over {found.rows} time steps"
    except TooWide:
        say("the problem is too dense for frontier tables: sweeping budgets")
    count = 0

    def search(limited: StrategyProblem, start: tuple[int, ...]) -> SearchResult:
        gap = max(eps / 10, 1e-6)
        return solve(limited, time_limit_s=BUDGET_S, relative_gap=gap, seed=seed, hint=start or None)

    def tell(searched: int, width: float) -> None:
        nonlocal count
        count = searched
        say(f"{searched} budgets searched; widest gap left {width:.2g}")

    least = least_peak(problem, time_limit_s=BUDGET_S, seed=seed)
    found = sweep_frontier(problem, search, least, eps=eps, time_limit_s=time_limit_s, on_point=tell)
    return found, f"by {count} searches under different budgets"
