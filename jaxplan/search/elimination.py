"""The best joint change of many nodes at once: a compiled kernel of variable elimination in bounded space.

Of a window of nodes the cheapest assignment is wanted, all others staying as they are.  Nodes are minimised out one
after the other, that one first whose table over its neighbours is the smallest.  Where even that table would be too
large there are two ways on:

  conditioned   A node is given up: it keeps its strategy, and all tables lose a dimension.  What is left over is
                assigned exactly, so that the result is never worse than the start: hundreds of nodes move in one step
                that no change of a single node can.
  relaxed       The functions that meet at the node are minimised in groups, each over its own copy of the node, with
                the groups' opinions on the node evened out before (mini-buckets with moment matching).  The sum of the
                minima is a lower bound, tighter than that of the edges alone, and the groups' copies guide an
                assignment that starts from nothing.

Dechter, "Bucket elimination", 1999; Dechter and Rish, "Mini-buckets", 2003; Ihler et al., "Join-graph based cost-
shifting schemes", 2012 (moment matching).
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .flat import Flat
from .problem import Floats, Ints
from .tables import members, minimise, random

#: A table has at most so many dimensions.
MOST_DIMS = 14


@njit(cache=True, nogil=True)
def assign_window(
    flat: Flat,
    unary_s: Floats,
    edge_at: Ints,
    pool_s: Floats,
    pool_first: int,
    window: Ints,
    local: Ints,
    chosen: Ints,
    most_log: float,
    noise: float,
    relaxed: bool,
    state: NDArray[np.uint64],
    stop: NDArray[np.uint8],
) -> float:
    """Assign the nodes of `window` in `chosen`, at the prices `unary_s` of their strategies.

    `pool_s` holds the matrices, that of edge k at `edge_at[k]`, and scratch from `pool_first` on; `local` is -1
    everywhere.  `most_log` bounds the natural logarithm of the sums that one elimination takes; `noise` disturbs the
    order, in the same unit.  `state` is the random state and a count of the sums taken.  Returns what the window costs
    at least, with its edges; nan where the scratch is too small for a relaxation, or `stop` (alarm.py) was raised:
    then `chosen` is as it was.
    """
    size = flat.size
    near_start, near_node = flat.near_start, flat.near_node
    count = window.size
    for i in range(count):
        local[window[i]] = i
    words = (count + 63) // 64
    one = np.uint64(1)
    bits = np.zeros((count, words), np.uint64)
    logs = np.empty(count)
    first = np.empty(count + 1, np.int64)
    first[0] = 0
    edges = 0
    for i in range(count):
        n = window[i]
        logs[i] = np.log(size[n])
        first[i + 1] = first[i] + size[n]
        for k in range(near_start[n], near_start[n + 1]):
            if local[near_node[k]] > i:
                edges += 1
    unary = np.empty(first[count])
    most = 2 * edges + 2 * count + 2
    dims = np.zeros(most, np.int64)
    dim = np.empty((most, MOST_DIMS), np.int64)
    stride = np.empty((most, MOST_DIMS), np.int64)
    offset = np.empty(most, np.int64)
    alive = np.zeros(most, np.bool_)
    links = most * 4
    head = np.full(count, -1, np.int64)
    link_next = np.empty(links, np.int64)
    link_function = np.empty(links, np.int64)
    functions, linked = 0, 0
    for i in range(count):
        n = window[i]
        for s in range(size[n]):
            unary[first[i] + s] = unary_s[flat.at[n] + s]
        for k in range(near_start[n], near_start[n + 1]):
            other = near_node[k]
            j = local[other]
            if j < 0:
                base_at = edge_at[k] + chosen[other]
                for s in range(size[n]):
                    unary[first[i] + s] += pool_s[base_at + s * size[other]]
            elif j > i:
                dims[functions] = 2
                dim[functions, 0], dim[functions, 1] = i, j
                stride[functions, 0], stride[functions, 1] = size[other], 1
                offset[functions] = edge_at[k]
                alive[functions] = True
                for e in (i, j):
                    link_function[linked] = functions
                    link_next[linked] = head[e]
                    head[e] = linked
                    linked += 1
                functions += 1
                bits[i, j // 64] |= one << np.uint64(j % 64)
                bits[j, i // 64] |= one << np.uint64(i % 64)
    near = np.empty(count + 64, np.int64)
    cost = np.empty(count)
    luck = np.zeros(count)
    if noise > 0.0:
        for i in range(count):
            luck[i] = noise * random(state) / 2.0**53
    degree = np.zeros(count, np.int64)
    for i in range(count):
        degree[i] = members(bits[i], near)
        cost[i] = logs[i]
        for c in range(degree[i]):
            cost[i] += logs[near[c]]
    left = np.ones(count, np.bool_)
    # The nodes minimised out, in order, and the functions that met there.
    order = np.empty(count, np.int64)
    told_start = np.zeros(count + 1, np.int64)
    told = np.empty(most, np.int64)
    eliminated, bound = 0, 0.0
    cursor, capacity = 0, pool_s.size - pool_first
    group = np.empty(most, np.int64)
    groups = np.zeros((1, words), np.uint64)
    joint = np.empty(words, np.uint64)
    scope = np.empty(count + 64, np.int64)
    actives = np.arange(count)
    while actives.size:
        if stop[0]:
            for i in range(count):
                local[window[i]] = -1
            return np.nan
        # The active nodes are kept in one piece, so that the scan shrinks with them.
        kept = 0
        v, least_cost = -1, np.inf
        for a in range(actives.size):
            i = actives[a]
            if left[i]:
                actives[kept] = i
                kept += 1
                if cost[i] + luck[i] < least_cost:
                    v, least_cost = i, cost[i] + luck[i]
        actives = actives[:kept]
        if not kept:
            break
        room_log = np.log(max(1.0, capacity - cursor - 1.0))
        fits = cost[v] <= most_log and degree[v] <= MOST_DIMS and cost[v] - logs[v] <= room_log
        if not fits and not relaxed:
            # Give a node up: of three at random the one in the most and largest tables.
            for _ in range(3):
                i = actives[random(state) % np.uint64(kept)]
                if cost[i] > cost[v]:
                    v = i
            s = chosen[window[v]]
            bound += unary[first[v] + s]
            link = head[v]
            while link >= 0:
                f = link_function[link]
                link = link_next[link]
                if not alive[f]:
                    continue
                d = 0
                while dim[f, d] != v:
                    d += 1
                offset[f] += s * stride[f, d]
                dims[f] -= 1
                for e in range(d, dims[f]):
                    dim[f, e], stride[f, e] = dim[f, e + 1], stride[f, e + 1]
                if dims[f] == 1:
                    alive[f] = False
                    j = dim[f, 0]
                    for q in range(size[window[j]]):
                        unary[first[j] + q] += pool_s[offset[f] + q * stride[f, 0]]
            for c in range(members(bits[v], near)):
                j = near[c]
                bits[j, v // 64] &= ~(one << np.uint64(v % 64))
                cost[j] -= logs[v]
                degree[j] -= 1
            left[v] = False
            continue
        # The functions that meet at v, the widest first.
        begin = told_start[eliminated]
        end = begin
        link = head[v]
        while link >= 0:
            f = link_function[link]
            link = link_next[link]
            if alive[f]:
                alive[f] = False
                place = end
                while place > begin and dims[told[place - 1]] < dims[f]:
                    told[place] = told[place - 1]
                    place -= 1
                told[place] = f
                end += 1
        order[eliminated] = v
        eliminated += 1
        told_start[eliminated] = end
        left[v] = False
        # Into groups: one, or each function into the first group that it leaves small enough.
        made = 1
        groups[0, :] = np.uint64(0)
        if fits:
            for w in range(words):
                groups[0, w] = bits[v, w]
            for e in range(begin, end):
                group[e] = 0
        else:
            made = 0
            for e in range(begin, end):
                f = told[e]
                where = -1
                for g in range(made):
                    for w in range(words):
                        joint[w] = groups[g, w]
                    for d in range(dims[f]):
                        joint[dim[f, d] // 64] |= one << np.uint64(dim[f, d] % 64)
                    joint[v // 64] &= ~(one << np.uint64(v % 64))
                    nd = members(joint, near)
                    total = logs[v]
                    for c in range(nd):
                        total += logs[near[c]]
                    if total <= most_log and nd <= MOST_DIMS:
                        where = g
                        break
                if where < 0:
                    where = made
                    made += 1
                    if made > groups.shape[0]:
                        groups = np.concatenate((groups, np.zeros((made, words), np.uint64)))
                    groups[where, :] = np.uint64(0)
                for d in range(dims[f]):
                    groups[where, dim[f, d] // 64] |= one << np.uint64(dim[f, d] % 64)
                groups[where, v // 64] &= ~(one << np.uint64(v % 64))
                group[e] = where
        own = size[window[v]]
        opinion = np.full((made, own), np.inf)
        shift = np.empty(own)
        # First what each group makes of v by itself, where there are several; then the tables.
        for turn in range(0 if made > 1 else 1, 2):
            for g in range(made):
                nd = members(groups[g], scope)
                shape = np.empty(nd, np.int64)
                entries = 1
                for c in range(nd):
                    shape[c] = size[window[scope[c]]]
                    entries *= shape[c]
                width = 0
                for e in range(begin, end):
                    width += group[e] == g
                base = np.empty(width, np.int64)
                step = np.zeros((width, nd + 1), np.int64)
                m = 0
                for e in range(begin, end):
                    if group[e] != g:
                        continue
                    f = told[e]
                    base[m] = offset[f]
                    for d in range(dims[f]):
                        if dim[f, d] == v:
                            step[m, nd] = stride[f, d]
                        else:
                            c = 0
                            while scope[c] != dim[f, d]:
                                c += 1
                            step[m, c] = stride[f, d]
                    m += 1
                if turn == 0:
                    shift[:] = 0.0
                    minimise(pool_s, shift, base, step, shape, 0, opinion[g], True)
                    continue
                for s in range(own):
                    shift[s] = unary[first[v] + s]
                if made > 1:
                    for s in range(own):
                        for h in range(made):
                            shift[s] += opinion[h, s]
                        shift[s] = shift[s] / made - opinion[g, s]
                if entries > capacity - cursor:
                    for i in range(count):
                        local[window[i]] = -1
                    return np.nan
                out = pool_first + cursor
                state[1] += np.uint64(entries * own * (width + 1))
                minimise(pool_s, shift, base, step, shape, out, opinion[g], False)
                if nd == 0:
                    bound += pool_s[out]
                elif nd == 1:
                    for s in range(shape[0]):
                        unary[first[scope[0]] + s] += pool_s[out + s]
                else:
                    cursor += entries
                    if linked + nd > link_next.size:
                        link_next = np.concatenate((link_next, np.empty(links, np.int64)))
                        link_function = np.concatenate((link_function, np.empty(links, np.int64)))
                    dims[functions] = nd
                    offset[functions] = out
                    alive[functions] = True
                    across = 1
                    for c in range(nd - 1, -1, -1):
                        dim[functions, c], stride[functions, c] = scope[c], across
                        across *= shape[c]
                        link_function[linked] = functions
                        link_next[linked] = head[scope[c]]
                        head[scope[c]] = linked
                        linked += 1
                    functions += 1
                for c in range(nd):
                    j = scope[c]
                    for w in range(words):
                        bits[j, w] |= groups[g, w]
                    bits[j, j // 64] &= ~(one << np.uint64(j % 64))
                    bits[j, v // 64] &= ~(one << np.uint64(v % 64))
                    degree[j] = members(bits[j], near)
                    cost[j] = logs[j]
                    for b in range(degree[j]):
                        cost[j] += logs[near[b]]
    for e in range(eliminated - 1, -1, -1):
        v = order[e]
        best, where = np.inf, 0
        for s in range(size[window[v]]):
            value = unary[first[v] + s]
            for t in range(told_start[e], told_start[e + 1]):
                f = told[t]
                place = offset[f]
                for d in range(dims[f]):
                    j = dim[f, d]
                    place += stride[f, d] * (s if j == v else chosen[window[j]])
                value += pool_s[place]
            if value < best:
                best, where = value, s
        chosen[window[v]] = where
    for i in range(count):
        local[window[i]] = -1
    return bound
