"""Compiled sweeps of messages over the colours of a folded problem: the inner loop of the lifted bound (lifted.py)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from .problem import Floats, Ints


class Lifted(NamedTuple):
    """What the kernels take as one argument: arrays by colour, visit (two a colour: there, back), and collected link.

    Attributes:
      size, kinds: of each colour its strategies, and how many kinds its nodes are of.
      node_at, weight_at: where its shifted costs, [kinds, strategies], and the shares of its kinds begin.
      node_s, weight, shift_s: of all colours; the shifts of all links, tail and head.
      link_start: of visit v the links that it collects from are `link_start[v]` to `link_start[v + 1]`.
      link_matrix: where in `matrix_s` that of a link begins, [its strategies, mine]; link_theirs, link_wide: where its
        shifts begin, and how many they are.
      own_at: where the own shifts of the first of these begin, one link after the other.
      edges_at: where in `edges` their numbers begin, [kinds, links].
      gives_at, gives: of each visit, where the shifts of those that it passes on to begin, and how many they are.
      ahead_at: where in `ahead` the edges of these begin, one number a kind.
      share: of what can be spared, to each of the latter.
      tail_matrix, tail_at, head_at, tail_wide, head_wide, times: of each link its matrix [tail, head], where its shifts
        begin, how many they are, and its edges.
    """

    size: Ints
    kinds: Ints
    node_at: Ints
    weight_at: Ints
    node_s: Floats
    weight: Floats
    shift_s: Floats
    link_start: Ints
    link_matrix: Ints
    link_theirs: Ints
    link_wide: Ints
    own_at: Ints
    edges_at: Ints
    edges: Floats
    gives_at: Ints
    gives: Ints
    ahead_at: Ints
    ahead: Floats
    share: Floats
    matrix_s: Floats
    tail_matrix: Ints
    tail_at: Ints
    head_at: Ints
    tail_wide: Ints
    head_wide: Ints


@njit(cache=True, nogil=True)
def sweep(lifted: Lifted, daring: float) -> None:
    """There and back: each colour collects from those visited before, and passes on to those visited after."""
    colours = lifted.size.size
    widest, most = lifted.size.max(), lifted.kinds.max()
    least, low, give = np.empty(widest), np.empty(most), np.empty(widest)
    for turn in range(2 * colours):
        back = turn >= colours
        c = 2 * colours - 1 - turn if back else turn
        v = 2 * c + (1 if back else 0)
        size, kinds, at = lifted.size[c], lifted.kinds[c], lifted.node_at[c]
        first, count = lifted.link_start[v], lifted.link_start[v + 1] - lifted.link_start[v]
        for i in range(count):
            for s in range(size):
                least[s] = np.inf
            row, theirs = lifted.link_matrix[first + i], lifted.link_theirs[first + i]
            for t in range(lifted.link_wide[first + i]):
                shift = lifted.shift_s[theirs + t]
                for s in range(size):
                    value = lifted.matrix_s[row + s] + shift
                    if value < least[s]:
                        least[s] = value
                row += size
            own = lifted.own_at[v] + i * size
            for s in range(size):
                least[s] += lifted.shift_s[own + s]
                lifted.shift_s[own + s] -= least[s]
            for k in range(kinds):
                number = lifted.edges[lifted.edges_at[v] + k * count + i]
                for s in range(size):
                    lifted.node_s[at + k * size + s] += number * least[s]
        if not lifted.gives[v]:
            continue
        for k in range(kinds):
            low[k] = np.inf
            for s in range(size):
                low[k] = min(low[k], lifted.node_s[at + k * size + s])
        for s in range(size):
            spared, on_average = np.inf, 0.0
            for k in range(kinds):
                spare = lifted.node_s[at + k * size + s] - low[k]
                spared = min(spared, spare)
                on_average += lifted.weight[lifted.weight_at[c] + k] * spare
            if kinds > 1 and daring:
                spared = daring * on_average + (1 - daring) * spared
            give[s] = spared * lifted.share[v]
        for i in range(lifted.gives[v]):
            for s in range(size):
                lifted.shift_s[lifted.gives_at[v] + i * size + s] += give[s]
        for k in range(kinds):
            number = lifted.ahead[lifted.ahead_at[v] + k]
            for s in range(size):
                lifted.node_s[at + k * size + s] -= number * give[s]


@njit(cache=True, nogil=True)
def minima(lifted: Lifted, node_s: Floats, link_s: Floats) -> None:
    """Write the least shifted cost of each kind of each colour, one after the other, and of each link."""
    number = 0
    for c in range(lifted.size.size):
        for k in range(lifted.kinds[c]):
            at = lifted.node_at[c] + k * lifted.size[c]
            low = lifted.node_s[at]
            for s in range(1, lifted.size[c]):
                low = min(low, lifted.node_s[at + s])
            node_s[number] = low
            number += 1
    for i in range(lifted.tail_matrix.size):
        row, low = lifted.tail_matrix[i], np.inf
        for t in range(lifted.tail_wide[i]):
            shift = lifted.shift_s[lifted.tail_at[i] + t]
            for h in range(lifted.head_wide[i]):
                low = min(low, lifted.matrix_s[row + h] + shift + lifted.shift_s[lifted.head_at[i] + h])
            row += lifted.head_wide[i]
        link_s[i] = low
