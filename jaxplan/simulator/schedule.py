"""Compiled list scheduling of a program on the devices of a mesh: full runs, and runs from a change to where it ends.

The rule is that of engine.py: of all tasks whose predecessors are dispatched the one that can start first, of several
the first in program order.  A task is an item of the program (an operation, or what moves between two) on a class of
devices: devices that are alike at every step are one class and are run once.  Task `item * classes + c`; what moves
over mesh axes is one task for each group of devices, numbered by its first class; the other members' numbers are left
empty, or, while a run is logged, end where the group's task begins, so that all runs of a program have the same tasks.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .items import CHECKPOINT, Ints, Items, Log


@njit(cache=True, nogil=True)
def _push(keys: Ints, tasks: Ints, size: int, key: int, task: int) -> int:
    i = size
    while i > 0:
        up = (i - 1) // 2
        if keys[up] < key or (keys[up] == key and tasks[up] < task):
            break
        keys[i], tasks[i] = keys[up], tasks[up]
        i = up
    keys[i], tasks[i] = key, task
    return size + 1


@njit(cache=True, nogil=True)
def _sink(keys: Ints, tasks: Ints, size: int, key: int, task: int) -> None:
    """Put (key, task) in place of the first."""
    i = 0
    while True:
        down = 2 * i + 1
        if down >= size:
            break
        if down + 1 < size and (
            keys[down + 1] < keys[down] or (keys[down + 1] == keys[down] and tasks[down + 1] < tasks[down])
        ):
            down += 1
        if key < keys[down] or (key == keys[down] and task < tasks[down]):
            break
        keys[i], tasks[i] = keys[down], tasks[down]
        i = down
    keys[i], tasks[i] = key, task


@njit(cache=True, nogil=True)
def run(
    items: Items, duration: Ints, axes: Ints, log: Log, logged: bool, since: int, changed: Ints, start: Ints, end: Ints
) -> tuple[int, int, int, int]:
    """Dispatch tasks until all are, or until a logged run goes on in the same way.

    Args:
      duration: ticks of every item and class; axes: the set of axes that each item moves over (0: none).
      log: of the run before `changed` items changed, where `since` >= 0; it is written where `logged`.
      since: the dispatches of that run that stand; -1: none, all tasks are new.
      start, end: written for every task that is dispatched, where not `logged`.

    Returns:
      When all has ended; how many dispatches were simulated; from which dispatch on the logged run goes on, and so many
      ticks later (its number of dispatches and 0 where it never does).
    """
    count, classes = duration.shape
    tasks = count * classes
    streams = items.streams
    left, ready_at = np.zeros(tasks, np.int64), np.zeros(tasks, np.int64)
    free, last = np.zeros(classes * streams, np.int64), np.full(classes * streams, -1, np.int64)
    # every task is pushed once, and a token for a class's blocked tasks after each of its blocks and dispatches, and of
    # what it stands still for
    keys, heap = np.empty(4 * tasks, np.int64), np.empty(4 * tasks, np.int64)
    size, done, makespan = 0, 0, 0
    # operations that are ready and wait for their compute unit, by number: the first of them has a token, its start
    blocked, waiting = np.empty((classes, count), np.int64), np.zeros(classes, np.int64)
    is_blocked = np.zeros(tasks, np.bool_)
    token_key, token = np.full(classes, -1, np.int64), np.full(classes, -1, np.int64)
    if since < 0:
        for k in range(count):
            for c in range(classes):
                left[k * classes + c] = _waits(items, axes, k, c)
    else:
        checkpoint = since // CHECKPOINT
        done = checkpoint * CHECKPOINT
        left[:], ready_at[:] = log.left[checkpoint], log.ready_at[checkpoint]
        free[:], last[:] = log.free[done], log.last[done]
        for s in range(free.size):
            makespan = max(makespan, free[s])
        for k in changed:
            if items.tail[k] >= 0:
                for c in range(classes):
                    left[k * classes + c] = _waits(items, axes, k, c)
                    ready_at[k * classes + c] = 0
                    if logged:
                        log.left[: checkpoint + 1, k * classes + c] = left[k * classes + c]
    for t in range(tasks):
        if left[t] == 0 and (since < 0 or log.position[t] >= done):
            size = _push(keys, heap, size, ready_at[t], t)
            if logged and since < 0:
                log.ready[t] = 0
    # what still separates this run from the logged one
    pending = 0
    odd = np.zeros(tasks if since >= 0 and not logged else 0, np.bool_)
    apart = 0
    waited = np.zeros(count if odd.size else 0, np.bool_)
    if odd.size:
        for k in changed:
            waited[k] = True
            pending += classes
    first = done
    while size:
        key, t = keys[0], heap[0]
        k, c = t // classes, t % classes
        moved = axes[k]
        begin = key
        length = duration[k, c]
        real = items.tail[k] < 0 or items.group[moved, c] == c
        if items.tail[k] < 0 and length > 0 and (is_blocked[t] or free[c * streams] > key):
            size -= 1
            if size:
                _sink(keys, heap, size, keys[size], heap[size])
            if is_blocked[t] and (key != token_key[c] or t != token[c]):
                continue
            if is_blocked[t]:
                waiting[c] -= 1
                if waiting[c]:
                    last_one = blocked[c, waiting[c]]
                    _sink(blocked[c], blocked[c], waiting[c], last_one, last_one)
            else:
                is_blocked[t] = True
                waiting[c] = _push(blocked[c], blocked[c], waiting[c], t, t)
                size = _renew(keys, heap, size, c, free[c * streams], blocked, waiting, token_key, token)
                continue
        elif real and length > 0:
            if items.tail[k] >= 0:
                at = items.member_start[moved, c]
                for m in range(at, at + items.member_count[moved, c]):
                    for x in range(items.link_count[moved]):
                        begin = max(begin, free[items.member[m] * streams + items.link[moved, x]])
            if begin > key:
                _sink(keys, heap, size, begin, t)
                continue
        if not is_blocked[t]:
            size -= 1
            if size:
                _sink(keys, heap, size, keys[size], heap[size])
        finish = begin + length if real else begin
        if logged:
            if done % CHECKPOINT == 0:
                log.left[done // CHECKPOINT] = left
                log.ready_at[done // CHECKPOINT] = ready_at
            log.start[t], log.end[t] = begin, finish
            log.order[done], log.position[t] = t, done
        else:
            start[t], end[t] = begin, finish
        makespan = max(makespan, finish)
        if real and length > 0:
            if items.tail[k] < 0:
                free[c * streams], last[c * streams] = finish, t
                size = _renew(keys, heap, size, c, finish, blocked, waiting, token_key, token)
            else:
                at = items.member_start[moved, c]
                for m in range(at, at + items.member_count[moved, c]):
                    for x in range(items.link_count[moved]):
                        s = items.member[m] * streams + items.link[moved, x]
                        free[s], last[s] = finish, t
                    if items.link[moved, 0] == 0:  # its compute unit stood still
                        size = _renew(keys, heap, size, items.member[m], finish, blocked, waiting, token_key, token)
        done += 1
        if logged:
            log.free[done] = free
            log.last[done] = last
        if items.tail[k] < 0:
            for o in range(items.out_start[k], items.out_start[k + 1]):
                e = items.out[o]
                g = e * classes + items.group[axes[e], c]
                ready_at[g] = max(ready_at[g], finish)
                left[g] -= 1
                if left[g] == 0:
                    size = _push(keys, heap, size, ready_at[g], g)
                    if logged:
                        log.ready[g] = done
        elif real:
            at = items.member_start[moved, c]
            for m in range(at, at + items.member_count[moved, c]):
                member = items.member[m]
                if member != c and (logged or odd.size):
                    g = k * classes + member
                    ready_at[g], left[g] = begin, 0
                    size = _push(keys, heap, size, begin, g)
                    if logged:
                        log.ready[g] = done
                if items.head[k] >= 0:
                    g = items.head[k] * classes + member
                    ready_at[g] = max(ready_at[g], finish)
                    left[g] -= 1
                    if left[g] == 0:
                        size = _push(keys, heap, size, ready_at[g], g)
                        if logged:
                            log.ready[g] = done
        if odd.size:
            pending -= waited[k]
            for x in (t, log.order[done - 1]):
                apart += -1 if odd[x] else 1
                odd[x] = not odd[x]
            if apart == 0 and pending == 0 and done < tasks:
                base = log.start[log.order[done - 1]]
                shift = begin - base
                same = True
                for s in range(free.size):
                    if free[s] <= begin and log.free[done, s] <= base:
                        continue
                    if free[s] != log.free[done, s] + shift or last[s] != log.last[done, s]:
                        same = False
                        break
                if same:
                    return log.end.max() + shift, done - first, done, shift
    return makespan, done - first, done, 0


@njit(cache=True, nogil=True)
def _renew(
    keys: Ints, heap: Ints, size: int, c: int, free: int, blocked: Ints, waiting: Ints, token_key: Ints, token: Ints
) -> int:
    """Give the first blocked task of a class a token for when the compute unit is free; older ones are void."""
    if waiting[c] and (token_key[c] != free or token[c] != blocked[c, 0]):
        token_key[c], token[c] = free, blocked[c, 0]
        return _push(keys, heap, size, free, blocked[c, 0])
    return size


@njit(cache=True, nogil=True)
def _waits(items: Items, axes: Ints, k: int, c: int) -> int:
    """How many tasks item `k` waits for on class `c`: -1 where a group's task stands for it."""
    if items.tail[k] < 0:
        return items.waits[k]
    return items.member_count[axes[k], c] if items.group[axes[k], c] == c else -1
