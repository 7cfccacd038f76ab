"""Compiled kernels of local search under a limit: what is alive at the peaks, and single changes that respect it."""

from __future__ import annotations

import numpy as np
from numba import njit

from .flat import Flat
from .problem import Bools, Floats, Ints
from .tables import random

#: Changes that one repair may take.
MOST_REPAIRS = 2_000


@njit(cache=True, nogil=True)
def alive_bytes(flat: Flat, chosen: Ints) -> Ints:
    """The bytes alive at every peak."""
    delta = np.zeros(flat.peaks + 1, np.int64)
    for n in range(flat.size.size):
        s = chosen[n]
        for u in range(flat.use_start[n], flat.use_start[n + 1]):
            used = flat.bytes[flat.use_at[u] + s]
            delta[flat.use_from[u]] += used
            delta[flat.use_to[u]] -= used
    return np.cumsum(delta)[: flat.peaks]


@njit(cache=True, nogil=True)
def price_window(flat: Flat, window: Ints, price: Floats, unary_s: Floats) -> None:
    """Set `unary_s` of the nodes of a window: their prices plus `price[p]` for a byte alive at peak p."""
    before = np.zeros(flat.peaks + 1)
    for p in range(flat.peaks):
        before[p + 1] = before[p] + price[p]
    for i in range(window.size):
        n = window[i]
        a = flat.at[n]
        for s in range(flat.size[n]):
            unary_s[a + s] = flat.unary_s[a + s]
        for u in range(flat.use_start[n], flat.use_start[n + 1]):
            rate = before[flat.use_to[u]] - before[flat.use_from[u]]
            if rate > 0.0:
                for s in range(flat.size[n]):
                    unary_s[a + s] += rate * flat.bytes[flat.use_at[u] + s]


@njit(cache=True, nogil=True)
def fitting(flat: Flat, limit: int, left: Bools) -> Bools:
    """Which of the strategies `left` stay within a limit at every peak if all other nodes keep the least they can."""
    fits = left.copy()
    changed = True
    while changed:
        changed = False
        spare, least = np.full(flat.peaks, limit, np.int64), np.empty(flat.use_at.size, np.int64)
        for n in range(flat.size.size):
            mine = fits[flat.at[n] : flat.at[n] + flat.size[n]]
            if not mine.any():
                return np.zeros_like(fits)
            for u in range(flat.use_start[n], flat.use_start[n + 1]):
                least[u] = flat.bytes[flat.use_at[u] : flat.use_at[u] + flat.size[n]][mine].min()
                spare[flat.use_from[u] : flat.use_to[u]] -= least[u]
        for n in range(flat.size.size):
            for u in range(flat.use_start[n], flat.use_start[n + 1]):
                most = least[u] + spare[flat.use_from[u] : flat.use_to[u]].min()
                for s in range(flat.size[n]):
                    if fits[flat.at[n] + s] and flat.bytes[flat.use_at[u] + s] > most:
                        fits[flat.at[n] + s], changed = False, True
    return fits


@njit(cache=True, nogil=True)
def total_cost(flat: Flat, chosen: Ints) -> float:
    """Nodes and edges, a forbidden pair at `forbidden_s`."""
    total = 0.0
    for n in range(flat.size.size):
        s = chosen[n]
        total += flat.unary_s[flat.at[n] + s]
        for k in range(flat.near_start[n], flat.near_start[n + 1]):
            other = flat.near_node[k]
            if other > n:
                total += flat.matrix_s[flat.near_own[k] + s * flat.size[other] + chosen[other]]
    return total


@njit(cache=True, nogil=True)
def _field(flat: Flat, n: int, chosen: Ints, out: Floats) -> None:
    """What each strategy of a node costs with its edges, all others staying as they are."""
    a, k = flat.at[n], flat.size[n]
    for s in range(k):
        out[s] = flat.unary_s[a + s]
    for e in range(flat.near_start[n], flat.near_start[n + 1]):
        row = flat.near_other[e] + chosen[flat.near_node[e]] * k
        for s in range(k):
            out[s] += flat.matrix_s[row + s]


@njit(cache=True, nogil=True)
def fits(flat: Flat, n: int, now: int, new: int, load: Ints) -> bool:
    """Whether a change adds nothing to any peak over the limit, and brings none over it."""
    for u in range(flat.use_start[n], flat.use_start[n + 1]):
        more = flat.bytes[flat.use_at[u] + new] - flat.bytes[flat.use_at[u] + now]
        if more > 0:
            for p in range(flat.use_from[u], flat.use_to[u]):
                if load[p] + more > flat.limit_bytes:
                    return False
    return True


@njit(cache=True, nogil=True)
def move(flat: Flat, n: int, new: int, chosen: Ints, load: Ints) -> None:
    for u in range(flat.use_start[n], flat.use_start[n + 1]):
        more = flat.bytes[flat.use_at[u] + new] - flat.bytes[flat.use_at[u] + chosen[n]]
        if more:
            for p in range(flat.use_from[u], flat.use_to[u]):
                load[p] += more
    chosen[n] = new


@njit(cache=True, nogil=True)
def settle(flat: Flat, chosen: Ints, load: Ints, most_sweeps: int) -> bool:
    """Give every node in turn its cheapest strategy that fits, until none changes; whether any did."""
    field = np.empty(flat.size.max())
    any_moved = False
    for _ in range(most_sweeps):
        moved = False
        for n in range(flat.size.size):
            k = flat.size[n]
            if k == 1:
                continue
            _field(flat, n, chosen, field)
            while True:
                best = chosen[n]
                for s in range(k):
                    if field[s] < field[best]:
                        best = s
                if best == chosen[n]:
                    break
                if flat.limit_bytes < 0 or fits(flat, n, chosen[n], best, load):
                    move(flat, n, best, chosen, load)
                    moved = True
                    break
                field[best] = np.inf
        any_moved |= moved
        if not moved:
            break
    return any_moved


@njit(cache=True, nogil=True)
def repair(flat: Flat, chosen: Ints, load: Ints) -> bool:
    """Bring the peaks under the limit, each time by the change that costs least a byte at the worst one.

    Whether all fit then.  A change may add to no peak over the limit, and bring none over it.
    """
    field = np.empty(flat.size.max())
    for _ in range(MOST_REPAIRS):
        if flat.limit_bytes < 0 or flat.peaks == 0:
            return True
        peak = np.argmax(load)
        need = load[peak] - flat.limit_bytes
        if need <= 0:
            return True
        best_rate, node, strategy = np.inf, -1, -1
        for n in range(flat.size.size):
            now = chosen[n]
            for u in range(flat.use_start[n], flat.use_start[n + 1]):
                if flat.use_from[u] <= peak < flat.use_to[u]:
                    used = flat.bytes[flat.use_at[u] + now]
                    ready = False
                    for s in range(flat.size[n]):
                        saved = used - flat.bytes[flat.use_at[u] + s]
                        if saved <= 0:
                            continue
                        if not ready:
                            _field(flat, n, chosen, field)
                            ready = True
                        if field[s] >= flat.forbidden_s > field[now]:
                            continue
                        rate = (field[s] - field[now]) / min(saved, need)
                        if rate < best_rate and fits(flat, n, now, s, load):
                            best_rate, node, strategy = rate, n, s
        if node < 0:
            return False
        move(flat, node, strategy, chosen, load)
    return False


@njit(cache=True, nogil=True)
def grow(flat: Flat, start: int, most: int, seed: int) -> Ints:
    """Up to `most` nodes that hang together, ascending: from `start` on, each beside one of them at random."""
    state = np.array([seed + 1, 0], dtype=np.uint64)
    found = np.empty(most, np.int64)
    seen = np.zeros(flat.size.size, np.bool_)
    found[0] = start
    seen[start] = True
    count, first = 1, 0
    # Those up to `first` have no neighbours left; the others stand in random order.
    while count < most and first < count:
        pick = first + random(state) % np.uint64(count - first)
        n = found[pick]
        found[pick], found[first] = found[first], n
        first += 1
        for e in range(flat.near_start[n], flat.near_start[n + 1]):
            other = flat.near_node[e]
            if not seen[other] and count < most:
                seen[other] = True
                found[count] = other
                count += 1
    return np.sort(found[:count])
