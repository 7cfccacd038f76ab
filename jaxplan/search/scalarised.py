"""Unity's search under a memory limit: seconds plus a price times bytes, the price found by bisection.

Unger et al., "Unity" (OSDI 2022), memory search: lambda * time + (1 - lambda) * memory is minimised for up to ten
lambdas, until the memory just fits.  Memory is one number there; here it is what is alive at the time steps that
overflow in the cheapest assignment, evenly priced.  Each minimisation is the elimination of optcnn.py.  One price
reaches assignments on the convex hull of time and memory alone: of those between two corners of it, none, however good.
"""

from __future__ import annotations

import math

import numpy as np

from . import moves
from .arena import Arena, searcher
from .optcnn import FIRST_SUMS, improve
from .problem import Ints

#: Prices that are tried, as in Unity's search.
PRICES = 10

#: The first price makes the overflowing bytes cost as much as the step; each that does not fit is so many times dearer.
DEARER = 8.0

#: Sums that the elimination of one node may take.
SUMS = 10 * FIRST_SUMS


def _bisect(arena: Arena) -> None:
    flat = arena.flat
    chosen = arena.start.copy()
    arena.best.raise_bound(arena.eliminate(chosen, flat.unary_s, SUMS, relaxed=True))
    improve(arena, chosen, flat.unary_s, SUMS)
    if arena.fits(chosen):
        return
    load = moves.alive_bytes(flat, chosen)
    over = np.maximum(load - flat.limit_bytes, 0).astype(np.float64)
    steps = over > 0
    too_low, enough = 0.0, math.inf
    price = abs(arena.cost_s(chosen)) / over.sum()
    for _ in range(PRICES):
        found = _at_price(arena, chosen, np.where(steps, price, 0.0))
        if arena.fits(found):
            enough = price
        else:
            too_low, chosen = price, found
        price = price * DEARER if math.isinf(enough) else (too_low + enough) / 2


solve = searcher(_bisect)
"""The best assignment at one price of all bytes, or the hint.  See `jaxplan.search.base.Search`."""


def _at_price(arena: Arena, chosen: Ints, prices: np.ndarray) -> Ints:
    """The best assignment found where a byte at each peak costs `prices`."""
    unary_s = arena.flat.unary_s.copy()
    moves.price_window(arena.flat, np.arange(arena.flat.size.size), prices, unary_s)
    found = chosen.copy()
    arena.check_clock()
    arena.eliminate(found, unary_s, SUMS, relaxed=True)
    improve(arena, found, unary_s, SUMS)
    return found
