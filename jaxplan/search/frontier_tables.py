"""Compiled kernels of frontier tables: for every joint choice of some nodes, all (seconds, bytes) worth having.

A table holds its frontiers one after the other; entry `e` has the points `begin[e]` to `begin[e + 1]`, ordered by
their first row of bytes (which is strictly increasing, and the seconds strictly decreasing, where there is one row).
`early` and `low` are what a point may stand for: no assignment that was given up in its favour has fewer seconds, or
bytes.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@njit(cache=True, nogil=True)
def meet(
    left_order: Ints, left_key: Ints, left_out: Ints, left_least: Floats, right_order: Ints, right_key: Ints,
    right_out: Ints, right_least: Floats, slack_s: float, most: int,
) -> tuple[Ints, Ints, Ints]:  # fmt: skip
    """The pairs of an entry of the left and one of the right table that agree on what both are over, and are worth it.

    Args:
      left_order, right_order: the entries by ascending key; key: what both tables are over, as a number.
      left_out, right_out: together the entry of the new table; least: what an entry's cheapest point costs.
      slack_s: pairs that cost more are left out; most: where there are more pairs than this, one more is returned.

    Returns the left entries, the right ones, and those of the new table, ascending by the last.
    """
    room, made = 1024, 0
    lefts, rights, outs = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
    start = 0
    for mine in left_order:
        while start < right_order.size and right_key[right_order[start]] < left_key[mine]:
            start += 1
        stop = start
        while stop < right_order.size and right_key[right_order[stop]] == left_key[mine]:
            theirs = right_order[stop]
            stop += 1
            if left_least[mine] + right_least[theirs] > slack_s:
                continue
            if made == room:
                room *= 2
                lefts, rights, outs = _grown(lefts, room), _grown(rights, room), _grown(outs, room)
            lefts[made], rights[made], outs[made] = mine, theirs, left_out[mine] + right_out[theirs]
            made += 1
            if made > most:
                return lefts[:made], rights[:made], outs[:made]
    order = np.argsort(outs[:made], kind="mergesort")
    return lefts[:made][order], rights[:made][order], outs[:made][order]


@njit(cache=True, nogil=True)
def combine(
    first: Ints, lefts_in: Ints, rights_in: Ints, choices: Ints, left_begin: Ints, left_seconds: Floats,
    left_bytes: Ints, left_early: Floats, left_low: Ints, right_begin: Ints, right_seconds: Floats, right_bytes: Ints,
    right_early: Floats, right_low: Ints, width: float, base: float, step_s: float, price_s: Floats, slack_s: float,
    spare: Ints,
) -> tuple[Ints, Floats, Ints, Floats, Ints, Ints, Ints, Ints]:  # fmt: skip
    """The best sums of a point of the left and a point of the right table, for each entry of a new one.

    Args:
      first: pairs `first[e]` to `first[e + 1]` are of entry e; lefts_in, rights_in, choices: of each pair the entries
        of both tables and the strategy of the node that is eliminated.
      width, base: points whose bytes, with the base added, differ by a factor under 1 + width are taken for one, the
        fastest of them; 0: never.
      step_s: points whose seconds differ by less are taken for one, the smallest of them; 0: never.
      price_s, slack_s, spare: a sum is left out whose seconds and bytes, at a price for each row, are over the slack,
        or whose bytes are over what a row can spare.
    """
    entries, rows = first.size - 1, left_bytes.shape[1]
    room = 1024
    seconds, earlies, made = np.empty(room), np.empty(room), 0
    sizes, lows = np.empty((room, rows), np.int64), np.empty((room, rows), np.int64)
    lefts, rights, chosen = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
    begin = np.zeros(entries + 1, np.int64)
    # most sums are left out where there is a slack: room for those that stay is made as they come
    space = 256
    t, early = np.empty(space), np.empty(space)
    m, low = np.empty((space, rows), np.int64), np.empty((space, rows), np.int64)
    i1, i2, which = np.empty(space, np.int64), np.empty(space, np.int64), np.empty(space, np.int64)
    for entry in range(entries):
        k = 0
        for pair in range(first[entry], first[entry + 1]):
            a, b = lefts_in[pair], rights_in[pair]
            for i in range(left_begin[a], left_begin[a + 1]):
                for j in range(right_begin[b], right_begin[b + 1]):
                    t[k] = left_seconds[i] + right_seconds[j]
                    early[k] = left_early[i] + right_early[j]
                    priced = early[k]
                    fits = True
                    for row in range(rows):
                        m[k, row] = left_bytes[i, row] + right_bytes[j, row]
                        low[k, row] = left_low[i, row] + right_low[j, row]
                        priced += price_s[row] * low[k, row]
                        fits = fits and low[k, row] <= spare[row]
                    if priced > slack_s or not fits:
                        continue
                    i1[k], i2[k], which[k] = i, j, choices[pair]
                    k += 1
                    if k == space:
                        space *= 2
                        t, early = _grown(t, space), _grown(early, space)
                        m, low = _grown2(m, space), _grown2(low, space)
                        i1, i2, which = _grown(i1, space), _grown(i2, space), _grown(which, space)
        if rows == 1:
            kept = _slower(t[:k], early[:k], low[:k], step_s, _front(t[:k], m[:k], early[:k], low[:k], width, base))
        else:
            kept = _vector_front(t[:k], m[:k], early[:k], low[:k], width, base, step_s)
        if made + kept.size > room:
            room = max(2 * room, made + kept.size)
            seconds, earlies = _grown(seconds, room), _grown(earlies, room)
            sizes, lows = _grown2(sizes, room), _grown2(lows, room)
            lefts, rights, chosen = _grown(lefts, room), _grown(rights, room), _grown(chosen, room)
        for x in kept:
            seconds[made], sizes[made], earlies[made], lows[made] = t[x], m[x], early[x], low[x]
            lefts[made], rights[made], chosen[made] = i1[x], i2[x], which[x]
            made += 1
        begin[entry + 1] = made
    some = slice(0, made)
    return begin, seconds[some], sizes[some], earlies[some], lows[some], lefts[some], rights[some], chosen[some]


@njit(cache=True, nogil=True)
def _grown(array, room):  # type: ignore[no-untyped-def]
    larger = np.empty(room, array.dtype)
    larger[: array.size] = array
    return larger


@njit(cache=True, nogil=True)
def _grown2(array, room):  # type: ignore[no-untyped-def]
    larger = np.empty((room, array.shape[1]), array.dtype)
    larger[: array.shape[0]] = array
    return larger


@njit(cache=True, nogil=True)
def _stand_for(early: Floats, low: Ints, kept: int, gone: int) -> None:
    """`kept` stands for `gone` from now on."""
    early[kept] = min(early[kept], early[gone])
    for row in range(low.shape[1]):
        low[kept, row] = min(low[kept, row], low[gone, row])


@njit(cache=True, nogil=True)
def _front(t: Floats, m: Ints, early: Floats, low: Ints, width: float, base: float) -> Ints:
    """The frontier of candidates with one row of bytes, by increasing bytes; the kept stand for the others."""
    if width > 0 and t.size > 64:
        buckets = int(np.log((m[:, 0].max() + base) / (m[:, 0].min() + base)) / np.log1p(width)) + 2
        if buckets < 4 * t.size:
            return _bucketed(t, m, early, low, width, base, buckets)
    order = np.argsort(m[:, 0], kind="mergesort")
    kept, count, start, anchor = np.empty(t.size, np.int64), 0, 0, 0
    while start < order.size:
        # of equal bytes the fastest
        stop, best = start + 1, order[start]
        while stop < order.size and m[order[stop], 0] == m[best, 0]:
            if t[order[stop]] < t[best]:
                best = order[stop]
            stop += 1
        for x in range(start, stop):
            _stand_for(early, low, best, order[x])
        start = stop
        if count and t[best] >= t[kept[count - 1]]:
            _stand_for(early, low, kept[count - 1], best)
        elif count and width > 0 and m[best, 0] + base <= (1 + width) * (anchor + base):
            _stand_for(early, low, best, kept[count - 1])
            kept[count - 1] = best
        else:
            anchor = m[best, 0]
            kept[count] = best
            count += 1
    return kept[:count]


@njit(cache=True, nogil=True)
def _bucketed(t: Floats, m: Ints, early: Floats, low: Ints, width: float, base: float, buckets: int) -> Ints:
    """The same without sorting: the fastest candidate of every bucket of bytes, a factor 1 + width wide."""
    first, scale = m[:, 0].min(), 1.0 / np.log1p(width)
    best = np.full(buckets, -1, np.int64)
    for x in range(t.size):
        bucket = int(np.log((m[x, 0] + base) / (first + base)) * scale)
        other = best[bucket]
        if other < 0:
            best[bucket] = x
        elif t[x] < t[other] or (t[x] == t[other] and m[x, 0] < m[other, 0]):
            _stand_for(early, low, x, other)
            best[bucket] = x
        else:
            _stand_for(early, low, other, x)
    kept, count = np.empty(buckets, np.int64), 0
    for bucket in range(buckets):
        x = best[bucket]
        if x < 0:
            continue
        if count and t[x] >= t[kept[count - 1]]:
            _stand_for(early, low, kept[count - 1], x)
            continue
        kept[count] = x
        count += 1
    return kept[:count]


@njit(cache=True, nogil=True)
def _slower(t: Floats, early: Floats, low: Ints, step_s: float, front: Ints) -> Ints:
    """Of a frontier, by increasing bytes, what is faster by `step_s` than what is kept before it."""
    count = 0
    for x in front:
        if count and t[x] > t[front[count - 1]] - step_s:
            _stand_for(early, low, front[count - 1], x)
        else:
            front[count] = x
            count += 1
    return front[:count]


@njit(cache=True, nogil=True)
def _vector_front(t: Floats, m: Ints, early: Floats, low: Ints, width: float, base: float, step_s: float) -> Ints:
    """The frontier of candidates with several rows of bytes, by increasing bytes of the first."""
    order = np.argsort(np.floor(t / step_s) if step_s > 0 else t, kind="mergesort")
    kept, count = np.empty(t.size, np.int64), 0
    for x in order:
        beaten = -1
        for k in range(count):
            covers = True
            for row in range(m.shape[1]):
                if m[kept[k], row] + base > (1 + width) * (m[x, row] + base):
                    covers = False
                    break
            if covers:
                beaten = kept[k]
                break
        if beaten < 0:
            kept[count] = x
            count += 1
        else:
            _stand_for(early, low, beaten, x)
    return kept[:count][np.argsort(m[kept[:count], 0], kind="mergesort")]
