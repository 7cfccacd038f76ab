"""Compiled sweeps of messages: the inner loop of the dual bound (dual.py)."""

from __future__ import annotations

import numpy as np
from numba import njit

from .flat import Flat
from .problem import Floats, Ints


@njit(cache=True, nogil=True)
def sweep(flat: Flat, costs_s: Floats, sent_s: Floats, sent_at: Ints, forward: bool, chosen: Ints) -> float:
    """One pass over all nodes, ascending or descending: collect from the edges behind, pass on to those ahead.

    `costs_s` are the shifted costs of the strategies; `sent_s[sent_at[k] + s]` what node n's strategy s has passed on
    to edge k (numbered as `near_node`).  Going forward,
    `chosen` becomes the assignment read off, each node the best after the earlier ones.  Returns the sum of the least
    costs that stay at the nodes.
    """
    count = flat.size.size
    widest = flat.size.max()
    field = np.empty(widest)
    least = np.empty(widest)
    bound = 0.0
    for turn in range(count):
        n = turn if forward else count - 1 - turn
        a, k = flat.at[n], flat.size[n]
        behind, ahead = 0, 0
        for e in range(flat.near_start[n], flat.near_start[n + 1]):
            if (flat.near_node[e] < n) == forward:
                behind += 1
            else:
                ahead += 1
        if forward:
            for s in range(k):
                field[s] = costs_s[a + s]
        for e in range(flat.near_start[n], flat.near_start[n + 1]):
            other = flat.near_node[e]
            if (other < n) != forward:
                continue
            mine, theirs = sent_at[e], sent_at[flat.near_back[e]]
            if forward:
                row = flat.near_other[e] + chosen[other] * k
                taken, own = flat.matrix_s[row : row + k], sent_s[mine : mine + k]
                for s in range(k):
                    field[s] += taken[s] + own[s]
            for s in range(k):
                least[s] = np.inf
            for t in range(flat.size[other]):
                begin = flat.near_other[e] + t * k
                # a slice and no branch: this is the innermost loop, and is compiled to vector instructions so
                row, shift = flat.matrix_s[begin : begin + k], sent_s[theirs + t]
                for s in range(k):
                    value = row[s] + shift
                    least[s] = value if value < least[s] else least[s]
            for s in range(k):
                costs_s[a + s] += least[s] + sent_s[mine + s]
                sent_s[mine + s] = -least[s]
        if forward:
            best = 0
            for s in range(1, k):
                if field[s] < field[best]:
                    best = s
            chosen[n] = best
        if ahead:
            share = 1.0 / max(ahead, behind)
            for e in range(flat.near_start[n], flat.near_start[n + 1]):
                if (flat.near_node[e] < n) == forward:
                    continue
                mine = sent_at[e]
                for s in range(k):
                    sent_s[mine + s] += share * costs_s[a + s]
            for s in range(k):
                costs_s[a + s] *= 1.0 - share * ahead
        low = costs_s[a]
        for s in range(1, k):
            low = min(low, costs_s[a + s])
        bound += low
    return bound


@njit(cache=True, nogil=True)
def shifted_matrices(flat: Flat, sent_s: Floats, sent_at: Ints, edge_at: Ints, pool_s: Floats, begin: int) -> None:
    """Write each edge's matrix with what both ends passed on to it, [lower node, higher node], to `pool_s[begin:]`.

    The k-th is found at `edge_at[k]` then, where k numbers the edge from its lower node.
    """
    cursor = begin
    for n in range(flat.size.size):
        for k in range(flat.near_start[n], flat.near_start[n + 1]):
            other = flat.near_node[k]
            if other < n:
                continue
            edge_at[k] = cursor
            wide, mine, theirs = flat.size[other], sent_at[k], sent_at[flat.near_back[k]]
            for s in range(flat.size[n]):
                shift, row = sent_s[mine + s], flat.near_own[k] + s * wide
                for t in range(wide):
                    pool_s[cursor] = flat.matrix_s[row + t] + shift + sent_s[theirs + t]
                    cursor += 1
