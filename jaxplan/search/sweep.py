"""The frontier of step time and peak memory by searches under ever other budgets, where tables would be too wide.

A search under a budget finds a point and proves that no smaller budget allows anything faster than its bound.  Between
two neighbours on the frontier, a rectangle is open: of bytes, and of seconds.  The widest rectangle is cut first, by a
search under a budget in its middle, so that the sweep can be stopped at any time: what it has is a frontier, and
`Tradeoff.regret_bound` says how far from the true one it can be.  Narrow ones are searched at their largest budget,
which either closes them or leaves only what is under the point that was found.  Over the least peak steps are often
many times as long as a little farther on: there bytes are taken by equal factors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from .known import BudgetSearch, Gap, Known

#: A gap is narrow from this share of what lies between both ends of the frontier, flat from this one of its seconds.
NARROW, FLAT = 1 / 32, 0.05

#: Grains from which on a gap at the least peak is halved by factors.
GRAINS = 4


def sweep_frontier(
    known: Known,
    search: BudgetSearch,
    *,
    rough: BudgetSearch | None = None,
    deadline: float = math.inf,
    first: Callable[[int], bool] = lambda _: False,
    on_point: Callable[[int, int], None] | None = None,
) -> int:
    """Close the gaps of what is known of a frontier, the widest first; the number of searches.

    Args:
      known: with at least one point; search: an exact one; rough: one that asks first whether a budget is worth it
        (`Known.spend`).
      deadline: no search begins after it, in `time.monotonic` seconds.
      first: tried before a search: whether it closed the gap at a budget.
      on_point: told the number of searches so far and of the gaps that are left, after each.
    """
    searched = 0
    while time.monotonic() < deadline and (gaps := known.gaps()):
        widest = max(gaps, key=lambda gap: (gap.width, gap.low_bytes))
        if rough is not None and known.spend(widest.high_bytes, rough):
            continue
        budget = _budget(widest, known)
        if not first(budget) and time.monotonic() < deadline:
            known.ask(search, budget, widest.start)
            searched += 1
        if on_point is not None:
            on_point(searched, len(gaps))
    return searched


def _budget(gap: Gap, known: Known) -> int:
    wide = gap.high_bytes - gap.low_bytes
    if _flat(gap) and wide <= NARROW * known.span_bytes:
        return gap.high_bytes
    if not _flat(gap) and gap.low_bytes <= known.front()[0].peak_bytes and wide > GRAINS * known.grain_bytes > 0:
        return gap.low_bytes + math.isqrt(wide * known.grain_bytes)
    return gap.low_bytes + wide // 2


def _flat(gap: Gap) -> bool:
    return gap.slow_s <= (1 + FLAT) * gap.fast_s
