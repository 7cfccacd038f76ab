"""FlexFlow's search: a random walk that takes a worse strategy now and then (Metropolis).

Jia, Zaharia and Aiken, "Beyond Data and Model Parallelism for Deep Neural Networks" (MLSys 2019, arXiv 1807.05358),
section 6.  A proposal gives a random node a random strategy; it is taken if it is cheaper, else with the probability
exp(-difference / temperature), and never where it overflows the memory limit (theirs pays a penalty).  Chains start in
turn from what the search was given, from the best so far and from a random assignment, at the temperatures of
`TEMPERATURES`.  The walk ends, as theirs does, when the best has not changed for half of the time, here counted in
chains, so that it does not depend on the machine.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from . import moves
from .arena import Arena, searcher
from .flat import Flat
from .problem import Ints
from .tables import random

#: Proposals between two looks at the clock.
PROPOSALS = 10_000

#: Proposals of a chain, a strategy, and at most: what FlexFlow's stand-alone simulator makes in all.
CHAIN_A_STRATEGY, MOST_CHAIN = 500, 250_000

#: Temperatures as shares of the first assignment's cost.  FlexFlow's runtime takes 20 ms and its stand-alone simulator
#: 0.2 ms, of steps of some 100 ms (flexflow-train r20.12).
TEMPERATURES = (2e-3, 2e-4, 2e-1)

#: Chains without a better assignment that are needed to end the walk, at least.
PATIENCE = 30


def _walk(arena: Arena) -> None:
    flat, best = arena.flat, arena.start.copy()
    if not (flat.size > 1).any():
        return
    fitting = arena.offer(best)
    least_s = arena.cost_s(best) if fitting else math.inf
    length, chain, last_gain = min(CHAIN_A_STRATEGY * int(flat.size.sum()), MOST_CHAIN), 0, 0
    while chain - last_gain < max(PATIENCE, chain / 2):
        chosen = (arena.start, best)[chain % 3].copy() if fitting and chain % 3 < 2 else arena.by_chance()
        heat_s = TEMPERATURES[chain // 3 % len(TEMPERATURES)] * abs(arena.cost_s(arena.start))
        chain += 1
        if not arena.fits(chosen):
            arena.check_clock()
            continue
        load, found = moves.alive_bytes(flat, chosen), chosen.copy()
        for done in range(0, length, PROPOSALS):
            arena.check_clock()
            cost_s = walk(flat, chosen, found, load, min(PROPOSALS, length - done), heat_s, arena.state)
            if cost_s < least_s and arena.offer(found):
                best, least_s, last_gain, fitting = found.copy(), cost_s, chain, True


solve = searcher(_walk, contract_only=True)
"""The best assignment on the walk, or the hint; no bound.  See `jaxplan.search.base.Search`."""


@njit(cache=True, nogil=True)
def walk(
    flat: Flat, chosen: Ints, found: Ints, load: Ints, proposals: int, heat_s: float, state: NDArray[np.uint64]
) -> float:
    """Propose so many changes of `chosen`, whose bytes alive are `load`; `found` keeps the cheapest on the way, whose
    cost is returned."""
    count = flat.size.size
    cost_s = moves.total_cost(flat, chosen)
    least_s = moves.total_cost(flat, found)
    for _ in range(proposals):
        n = int(np.int64(random(state) % np.uint64(count)))
        k = flat.size[n]
        if k == 1:
            continue
        now = chosen[n]
        new = int(np.int64(random(state) % np.uint64(k - 1)))
        if new >= now:
            new += 1
        more_s = flat.unary_s[flat.at[n] + new] - flat.unary_s[flat.at[n] + now]
        for e in range(flat.near_start[n], flat.near_start[n + 1]):
            row = flat.near_other[e] + chosen[flat.near_node[e]] * k
            more_s += flat.matrix_s[row + new] - flat.matrix_s[row + now]
        if more_s > 0.0 and (heat_s <= 0.0 or random(state) / 2.0**53 >= np.exp(-more_s / heat_s)):
            continue
        if flat.limit_bytes >= 0 and not moves.fits(flat, n, now, new, load):
            continue
        moves.move(flat, n, new, chosen, load)
        cost_s += more_s
        if cost_s < least_s:
            least_s = cost_s
            found[:] = chosen
    return least_s
