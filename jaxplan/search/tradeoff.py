"""The frontier of step time and peak memory, by the way that the problem allows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from .base import SearchResult, Termination
from .frontier import trace_frontier
from .frontier_elimination import TooWide
from .ilp import solve
from .known import BudgetSearch, Known, Tradeoff, Weigh
from .least_peak import least_peak
from .problem import StrategyProblem
from .program import OutOfTime
from .sweep import sweep_frontier

#: Seconds that one budget of a sweep may take by tables, and again by a search.
BUDGET_S = 10.0

#: The part of the time that stretches are walked for, if budgets have to be searched for the rest.
WALK_SHARE = 0.6

#: Time steps that tables over a whole problem carry, the sums one of them may take, and their part of the time.  What
#: merging hides adds up over the tables: where they are larger, stretches prove more in less time.
WHOLE_ROWS, WHOLE_SUMS, WHOLE_SHARE = 2, 100_000, 0.25

#: The part of the time that may be spent on the least peak, without which there is no small end of the frontier.
LEAST_SHARE = 0.25

#: The gap of a search that only looks what there is about.
ROUGH_GAP = 0.1

#: Of the least peak that is given, relatively.
LEAST_GAP = 1e-3


def tradeoff(
    problem: StrategyProblem,
    *,
    eps: float,
    time_limit_s: float,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
    weigh: Weigh | None = None,
) -> tuple[Tradeoff, str]:
    """The frontier and, in words, how it was found; `limit_bytes` is not looked at.

    Args:
      eps: plans whose times differ by less, relatively, or whose peaks by less of what lies between the smallest and
        the largest, are not parted; time_limit_s: no stretch or search begins after it; loading
        compiled code is not counted.
      weigh: the bytes of an assignment with what the problem does not count.  Where what counts fewest needs more of
        them than something faster, that end of the frontier is left where searching it is dear.
    """
    begun, known = time.monotonic(), Known(problem, eps, weigh)
    try:
        found = trace_frontier(
            problem, width=eps, most_sums=WHOLE_SUMS, most_rows=WHOLE_ROWS,
            deadline=begun + WHOLE_SHARE * time_limit_s,
        )  # fmt: skip
        if found.regret_bound <= eps:
            return found.thinned(eps), f"by elimination over {found.rows} time steps"
        known.add(found)
    except (TooWide, OutOfTime):
        pass
    # compiled code, and what compiles it, are loaded by those who need them; no time of the search's
    loading = time.monotonic()
    from .stretches import walk_frontier
    from .warm import load_walk

    load_walk()
    begun += time.monotonic() - loading

    def within(gap: float) -> BudgetSearch:
        def search(limited: StrategyProblem, start: tuple[int, ...]) -> SearchResult:
            return solve(limited, time_limit_s=BUDGET_S, relative_gap=gap, seed=seed, hint=start or None)

        return search

    search, rough = within(max(eps / 10, 1e-6)), within(ROUGH_GAP)

    least = least_peak(problem, time_limit_s=max(BUDGET_S, LEAST_SHARE * time_limit_s), seed=seed)
    if least.found:
        known.note(least.assignment)
    elif least.termination is not Termination.INFEASIBLE:
        # out of time: nothing is known of the smallest end, but that is no proof that there is none
        known.ask(search, None, ())
    if not known.points:
        return known.tradeoff(0, rows=0, largest=0), "nothing is possible"
    smallest = known.front()[0]
    stretches = walk_frontier(
        known, search, rough=rough, deadline=begun + WALK_SHARE * time_limit_s,
        on_stretch=lambda points, budget: say(f"{points} points; next those within {budget} bytes"),
    )  # fmt: skip
    deadline = begun + time_limit_s
    searched = 0
    if known.slack_at(known.top_bytes) > eps:
        # whatever the time: without the fastest end there is no frontier
        known.ask(search, None, known.front()[-1].assignment)
        searched += 1

    def cover(limit: int) -> bool:
        # no longer than the search that comes after it: one budget would have all of what is left
        stretches.deadline = min(deadline, time.monotonic() + BUDGET_S)
        return stretches.cover(limit)

    # at the very end, within a grain of the next point, nothing is promised
    alone = known.gap_at(smallest.peak_bytes) is not None
    if alone and known.slack_at(smallest.peak_bytes) > eps and time.monotonic() < deadline:
        # what is left there is what has the least bytes: little where one time step has them all
        if not cover(smallest.peak_bytes) and time.monotonic() < deadline:
            known.ask(search, smallest.peak_bytes, known.front()[0].assignment)
            searched += 1
    searched += sweep_frontier(
        known, search, rough=rough, deadline=deadline, first=cover,
        on_point=lambda count, gaps: say(f"{count} budgets searched; {gaps} gaps were open"),
    )  # fmt: skip
    rows, largest = stretches.rows_carried, stretches.largest
    least_bytes = int(least.peak_bytes * (1 - LEAST_GAP)) if least.termination is Termination.OPTIMAL else 0
    found = known.tradeoff(least_bytes, rows=rows, largest=largest).thinned(eps)
    ways = ["by elimination of all"] if known.whole else []
    ways += ["by elimination, stretch by stretch"] if largest else []
    ways += [f"by {searched} searches under different budgets"] if searched or not ways else []
    return replace(found, spent_bytes=known.spent_bytes), ", and ".join(ways)
