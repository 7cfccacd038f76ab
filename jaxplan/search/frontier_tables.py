"""Compiled kernels of frontier tables: for every joint choice of some nodes, all (seconds, bytes) worth having.

A table holds its frontiers one after the other; entry `e` has the points `begin[e]` to `begin[e + 1]`, ordered by
their first row of bytes (which is strictly increasing, and the seconds strictly decreasing, where there is one row).
`low` is what a point may stand for: no assignment that was given up in its favour has fewer bytes.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@njit(cache=True, nogil=True)
def combine(
    left_begin: Ints, left_seconds: Floats, left_bytes: Ints, left_low: Ints, left_entry: Ints, left_stride: int,
    right_begin: Ints, right_seconds: Floats, right_bytes: Ints, right_low: Ints, right_entry: Ints, right_stride: int,
    choices: int, width: float, price_s: Floats, slack_s: float, spare: Ints,
) -> tuple[Ints, Floats, Ints, Ints, Ints, Ints, Ints]:  # fmt: skip
    """The best sums of a point of the left and a point of the right table, over `choices` strategies of one node.

    Args:
      left_entry, right_entry: for every entry of the new table the entries with strategy 0; a stride further for each
        next strategy.
      width: points whose bytes differ by a factor under 1 + width are taken for one, the fastest of them; 0: never.
      price_s, slack_s, spare: a sum is left out whose seconds and bytes, at a price for each row, are over the slack,
        or whose bytes are over what a row can spare.
    """
    entries, rows = left_entry.size, left_bytes.shape[1]
    room = 1024
    seconds, made = np.empty(room), 0
    sizes, lows = np.empty((room, rows), np.int64), np.empty((room, rows), np.int64)
    lefts, rights, chosen = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
    begin = np.zeros(entries + 1, np.int64)
    for entry in range(entries):
        count = 0
        for choice in range(choices):
            a, b = left_entry[entry] + choice * left_stride, right_entry[entry] + choice * right_stride
            count += (left_begin[a + 1] - left_begin[a]) * (right_begin[b + 1] - right_begin[b])
        # most sums are left out where there is a slack: room for those that stay is made as they come
        space, k = min(count, 256), 0
        t = np.empty(space)
        m, low = np.empty((space, rows), np.int64), np.empty((space, rows), np.int64)
        i1, i2, which = np.empty(space, np.int64), np.empty(space, np.int64), np.empty(space, np.int64)
        for choice in range(choices):
            a, b = left_entry[entry] + choice * left_stride, right_entry[entry] + choice * right_stride
            for i in range(left_begin[a], left_begin[a + 1]):
                for j in range(right_begin[b], right_begin[b + 1]):
                    t[k] = left_seconds[i] + right_seconds[j]
                    priced = t[k]
                    fits = True
                    for row in range(rows):
                        m[k, row] = left_bytes[i, row] + right_bytes[j, row]
                        low[k, row] = left_low[i, row] + right_low[j, row]
                        priced += price_s[row] * low[k, row]
                        fits = fits and low[k, row] <= spare[row]
                    if priced > slack_s or not fits:
                        continue
                    i1[k], i2[k], which[k] = i, j, choice
                    k += 1
                    if k == space and space < count:
                        space = min(2 * space, count)
                        t, m, low = _grown(t, space), _grown2(m, space), _grown2(low, space)
                        i1, i2, which = _grown(i1, space), _grown(i2, space), _grown(which, space)
        t, m, low = t[:k], m[:k], low[:k]
        kept = _front(t, m, low, width) if rows == 1 else _vector_front(t, m, low, width)
        if made + kept.size > room:
            room = max(2 * room, made + kept.size)
            seconds, sizes, lows = _grown(seconds, room), _grown2(sizes, room), _grown2(lows, room)
            lefts, rights, chosen = _grown(lefts, room), _grown(rights, room), _grown(chosen, room)
        for x in kept:
            seconds[made], sizes[made], lows[made] = t[x], m[x], low[x]
            lefts[made], rights[made], chosen[made] = i1[x], i2[x], which[x]
            made += 1
        begin[entry + 1] = made
    return begin, seconds[:made], sizes[:made], lows[:made], lefts[:made], rights[:made], chosen[:made]


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
def _front(t: Floats, m: Ints, low: Ints, width: float) -> Ints:
    """The frontier of candidates with one row of bytes, by increasing bytes; lowers `low` of the kept."""
    if t.size == 0:
        return np.empty(0, np.int64)
    if width > 0 and t.size > 64:
        return _bucketed(t, m, low, width)
    order = np.argsort(m[:, 0], kind="mergesort")
    kept, count, start, anchor = np.empty(t.size, np.int64), 0, 0, 0
    while start < order.size:
        # of equal bytes the fastest
        stop, best = start + 1, order[start]
        while stop < order.size and m[order[stop], 0] == m[best, 0]:
            if t[order[stop]] < t[best]:
                best = order[stop]
            stop += 1
        last = kept[count - 1] if count else -1
        least = low[order[start], 0]
        for x in range(start, stop):
            least = min(least, low[order[x], 0])
        if last >= 0 and t[best] >= t[last]:
            low[last, 0] = min(low[last, 0], least)
        elif last >= 0 and width > 0 and m[best, 0] <= (1 + width) * anchor:
            low[best, 0] = min(least, low[last, 0])
            kept[count - 1] = best
        else:
            low[best, 0], anchor = least, m[best, 0]
            kept[count] = best
            count += 1
        start = stop
    return kept[:count]


@njit(cache=True, nogil=True)
def _bucketed(t: Floats, m: Ints, low: Ints, width: float) -> Ints:
    """The same without sorting: the fastest candidate of every bucket of bytes, a factor 1 + width wide."""
    first, last = m[:, 0].min(), m[:, 0].max()
    scale = 1.0 / np.log1p(width)
    buckets = int(np.log((last + 1.0) / (first + 1.0)) * scale) + 2
    best, least = np.full(buckets, -1, np.int64), np.full(buckets, np.iinfo(np.int64).max, np.int64)
    for x in range(t.size):
        bucket = int(np.log((m[x, 0] + 1.0) / (first + 1.0)) * scale)
        least[bucket] = min(least[bucket], low[x, 0])
        other = best[bucket]
        if other < 0 or t[x] < t[other] or (t[x] == t[other] and m[x, 0] < m[other, 0]):
            best[bucket] = x
    kept, count = np.empty(buckets, np.int64), 0
    for bucket in range(buckets):
        x = best[bucket]
        if x < 0:
            continue
        if count and t[x] >= t[kept[count - 1]]:
            before = kept[count - 1]
            low[before, 0] = min(low[before, 0], least[bucket])
            continue
        low[x, 0] = least[bucket]
        kept[count] = x
        count += 1
    return kept[:count]


@njit(cache=True, nogil=True)
def _vector_front(t: Floats, m: Ints, low: Ints, width: float) -> Ints:
    """The frontier of candidates with several rows of bytes, by increasing bytes of the first."""
    order = np.argsort(t, kind="mergesort")
    kept, count = np.empty(t.size, np.int64), 0
    for x in order:
        beaten = -1
        for k in range(count):
            covers = True
            for row in range(m.shape[1]):
                if m[kept[k], row] > (1 + width) * m[x, row]:
                    covers = False
                    break
            if covers:
                beaten = kept[k]
                break
        if beaten < 0:
            kept[count] = x
            count += 1
            continue
        for row in range(m.shape[1]):
            low[beaten, row] = min(low[beaten, row], low[x, row])
    return kept[:count][np.argsort(m[kept[:count], 0], kind="mergesort")]
