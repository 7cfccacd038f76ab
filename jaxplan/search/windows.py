"""Large neighbourhood search within the limit: parts of the graph assigned anew at once, the rest as it stands.

A window is a connected part of the graph, grown from a node at random, of any size from a few nodes to all.  It is
assigned by conditioned elimination (elimination.py) at the present prices of memory times a random factor: cheap
memory finds what a full repair pays for elsewhere, dear memory frees what others need.  What then overflows is
repaired, single changes follow, and what became cheaper is kept.

Near a tight limit this finds what prices on the whole problem can't: at no price do all parts together use just what
fits (the duality gap of the relaxation), while one part at a time needs to fit only beside the others.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import moves
from .alarm import NEVER
from .elimination import assign_window
from .flat import Flat
from .problem import Floats, Ints

#: The smallest window.
LEAST_NODES = 4

#: The logarithms of a window's prices spread so much together, and those of single peaks around that.
SPREAD, PEAK_SPREAD = 1.0, 0.3

#: Sums that one elimination of a node may take, mostly and now and then; and how often that is.
MOST_SUMS, MOST_RARE_SUMS, RARE = 3e4, 1e6, 0.2

#: Windows of a walk, and how much more than the best it may cost on the way, relatively.
WALK, LEAST_REACH, MOST_REACH = 100, 1e-4, 3e-2

#: Sweeps over all nodes that change one at a time, after each window.
SETTLING = 20

#: A window costs so many visits of all nodes beside its eliminations: what is alive, repairs, single changes.
VISITS = 4


class Found(NamedTuple):
    """An assignment within the limit, and its cost."""

    chosen: Ints
    cost_s: float


class Windows:
    """The windows of one problem.

    `pool_s` holds the matrices of `flat` as they are, and scratch from `pool_first` on; a raised `stop` (alarm.py) ends
    the window that is being assigned.
    """

    def __init__(
        self, flat: Flat, pool_s: Floats, pool_first: int, random: np.random.Generator, stop: NDArray[np.uint8] = NEVER
    ) -> None:
        self._stop = stop
        self._flat, self._pool_s, self._pool_first, self._random = flat, pool_s, pool_first, random
        self._unary_s = flat.unary_s.copy()
        self._local = np.full(flat.size.size, -1, dtype=np.int64)
        degree = np.diff(flat.near_start)
        self._visit = int(np.sum(flat.size * (degree + 1)))

    def improve(self, chosen: Ints, cost_s: float, prices: Floats, work: float, deadline: float) -> Found:
        """Assign windows anew until `work` sums are spent; `prices` are those of a byte at each peak.

        `chosen` fits and costs `cost_s`.  What costs a little more than the best is gone on from, too, for a walk
        of some windows.
        """
        flat, spent, steps, reach = self._flat, 0, 0, 0.0
        here, best = chosen, Found(chosen, cost_s)
        while spent < work and time.monotonic() < deadline:
            if steps % WALK == 0:
                here, reach = best.chosen, math.exp(self._random.uniform(math.log(LEAST_REACH), math.log(MOST_REACH)))
            steps += 1
            other = here.copy()
            spent += self._assign(other, prices)
            load = moves.alive_bytes(flat, other)
            if not moves.repair(flat, other, load):
                continue
            moves.settle(flat, other, load, SETTLING)
            other_s = moves.total_cost(flat, other)
            if other_s <= best.cost_s + reach * abs(best.cost_s):
                here = other
            if other_s < best.cost_s:
                best, steps = Found(other, other_s), 0
        return best

    def _assign(self, chosen: Ints, prices: Floats) -> int:
        """Assign one window; the sums that it took."""
        random = self._random
        window = self._window()
        factors = np.exp(SPREAD * random.standard_normal() + PEAK_SPREAD * random.standard_normal(prices.size))
        moves.price_window(self._flat, window, prices * factors, self._unary_s)
        sums = MOST_RARE_SUMS if random.random() < RARE else MOST_SUMS
        state = np.array([random.integers(1, 2**63), 0], dtype=np.uint64)
        assign_window(
            self._flat, self._unary_s, self._flat.near_own, self._pool_s, self._pool_first, window, self._local,
            chosen, math.log(sums), 1.0, False, state, self._stop,
        )  # fmt: skip
        return int(state[1]) + VISITS * self._visit

    def _window(self) -> Ints:
        """Nodes around one at random, in the problem's order; the logarithm of their number is uniform."""
        count = self._flat.size.size
        size = math.exp(self._random.uniform(math.log(min(LEAST_NODES, count)), math.log(count)))
        return moves.grow(self._flat, int(self._random.integers(count)), round(size), int(self._random.integers(2**62)))
