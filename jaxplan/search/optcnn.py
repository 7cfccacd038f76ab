"""OptCNN's search: nodes and edges eliminated, one number an entry of a table; memory is not looked at.

Jia et al., "Exploring Hidden Dimensions in Parallelizing Convolutional Neural Networks" (ICML 2018, arXiv 1802.04924),
section 5.  Their rules, for nodes of two neighbours and for parallel edges, end at a small graph whose strategies are
tried one by one.  Here every node is eliminated, and where its table would be too large there are two ways on
(elimination.py): the relaxed one gives a bound, which holds under any memory limit, the conditioned one an assignment
that is never worse than its start.  What overflows the limit is repaired afterwards: the search does not see it.
"""

from __future__ import annotations

import time

from .arena import Arena, searcher
from .problem import Floats, Ints

#: Sums that the elimination of one node may take: at first, by how much more in the next round, and at most.
FIRST_SUMS, MORE_SUMS, MOST_SUMS = 1e4, 10.0, 1e7

#: A round takes at most so many times as long as the one before it, which took a tenth of the sums.
LONGER = 12.0

#: Conditioned eliminations in a row without gain that end a round.
PATIENCE = 8


def _eliminate(arena: Arena) -> None:
    sums, longest_s = FIRST_SUMS, 0.0
    while sums <= MOST_SUMS and time.monotonic() + LONGER * longest_s < arena.deadline:
        began = time.monotonic()
        chosen = arena.start.copy()
        arena.best.raise_bound(arena.eliminate(chosen, arena.flat.unary_s, sums, relaxed=True))
        offer_repaired(arena, chosen)
        improve(arena, chosen, arena.flat.unary_s, sums)
        improve(arena, chosen := arena.start.copy(), arena.flat.unary_s, sums)
        longest_s = time.monotonic() - began
        if arena.best.closed(arena.relative_gap):
            return
        sums *= MORE_SUMS


solve = searcher(_eliminate)
"""The assignment that is best without a memory limit, repaired into it; see `jaxplan.search.base.Search`."""


def improve(arena: Arena, chosen: Ints, unary_s: Floats, sums: float) -> None:
    """Conditioned eliminations of `chosen` until several in a row gain nothing, then offered."""
    cost_s, since = arena.cost_s(chosen, unary_s), 0
    while since < PATIENCE:
        arena.check_clock()
        arena.eliminate(chosen, unary_s, sums, relaxed=False)
        after_s = arena.cost_s(chosen, unary_s)
        since = 0 if after_s < cost_s else since + 1
        cost_s = min(after_s, cost_s)
    offer_repaired(arena, chosen)


def offer_repaired(arena: Arena, chosen: Ints) -> None:
    """Offer an assignment, brought within the limit where it is not."""
    fitting = arena.repaired(chosen)
    if fitting is not None:
        arena.offer(fitting)
