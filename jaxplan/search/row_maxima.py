"""Compiled comparison of the rows of a matrix pair by pair: the inner loop of what replaces what (dominance.py)."""

from __future__ import annotations

import numpy as np
from numba import njit

from .problem import Bools, Floats, Ints

#: Columns between two looks at whether a pair is decided.
COLUMNS_A_LOOK = 16


@njit(cache=True, nogil=True)
def over_all_columns(
    more: Floats, less: Floats, j: Ints, i: Ints, sum_s: Floats, least_s: Floats, edge: int
) -> Bools:
    """Add to `sum_s[p]` what row `j[p]` of `more` is over row `i[p]` of `less` at most; which pairs are left.

    A pair is left out, its sum unfinished, as soon as the sum over all edges is over zero for certain: with
    `least_s[e, p]`, what each edge adds at least, in the place of what edges after this one will add.
    """
    edges, columns = least_s.shape[0], more.shape[1]
    left = np.ones(j.size, np.bool_)
    for p in range(j.size):
        a, b, most = j[p], i[p], least_s[edge, p]
        for begin in range(0, columns, COLUMNS_A_LOOK):
            for column in range(begin, min(begin + COLUMNS_A_LOOK, columns)):
                most = max(most, more[a, column] - less[b, column])
            total = sum_s[p] + most
            for other in range(edge + 1, edges):
                total += least_s[other, p]
            if total > 0:
                left[p] = False
                break
        sum_s[p] += most
    return left
