"""Which strategies of a node are worth keeping: those that no other one replaces, whatever its neighbours choose.

Strategy j replaces i if it costs no more than i with every choice of the neighbours that i allows, and takes no more
bytes.  Over one edge what j costs more than i at most is a maximum over columns.  Few of all pairs replace one another,
and a few columns already tell most that don't: only the pairs that are left are compared in all columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .problem import Bools, Floats, Ints

#: Columns of a matrix that every pair of rows is compared in, and those that tell for most of the pairs left.
FIRST_COLUMNS, NEXT_COLUMNS = 8, 32

#: Entries of the two temporary arrays in which pairs are compared.
ENTRIES_A_TURN = 1 << 20

#: Entries of one node's edges, over all pairs that are left, from which on a compiled loop compares them: what it takes
#: to load one compares hundreds of times as many.
COMPILED_FROM = 1 << 17

#: What stands for a forbidden pair where rows are subtracted: more than any sum of costs, and twice it is a float.
FORBIDDEN = 1e200


class Dominance:
    """Compares the strategies of one node after the other, each set of prices, edges and bytes once.

    Edges are known by the identity of their matrices, which their owner keeps.
    """

    def __init__(self) -> None:
        self._left: dict[tuple[object, ...], Ints] = {}
        self._least: dict[int, Floats] = {}

    def left(self, costs_s: Floats, edges: Sequence[Floats], used: Ints) -> Ints:
        """The strategies that are left once each that another one replaces is deleted, ascending; of equals the first.

        Args:
          costs_s: of each strategy.
          edges: [strategies, neighbour's strategies] seconds, infinite where forbidden, no row all infinite.
          used: [time steps, strategies] bytes.
        """
        key = costs_s.tobytes(), tuple(map(id, edges)), used.shape[0], used.tobytes()
        if key not in self._left:
            replaces = self._replaces(costs_s, edges, used)
            left = np.ones(costs_s.size, dtype=np.bool_)
            # From the last on: of two equal strategies the first one stays.
            for strategy in np.flatnonzero(replaces.any(axis=0))[::-1].tolist():
                left[strategy] = not replaces[left, strategy].any()
            self._left[key] = np.flatnonzero(left)
        return self._left[key]

    def forget_sizeable(self) -> None:
        """Let go of what is as large as the matrices: it serves one reduction, what came of it serves others too."""
        self._least.clear()

    def _replaces(self, costs_s: Floats, edges: Sequence[Floats], used: Ints) -> Bools:
        """[j, i]: whether strategy j replaces strategy i, another one."""
        found: Bools = np.all(used[:, :, None] <= used[:, None, :], axis=0)
        extra_s = costs_s[:, None] - costs_s[None, :]
        for matrix in edges:
            # Sums of floats in one order rise with their terms: none of these exceeds the sum over all columns.
            extra_s = extra_s + self._least_extra(matrix)
        found &= extra_s <= 0
        np.fill_diagonal(found, False)
        widest = max((matrix.shape[1] for matrix in edges), default=0)
        if widest <= FIRST_COLUMNS:
            return found  # that was all columns
        j, i = np.nonzero(found)
        if j.size * sum(matrix.shape[1] for matrix in edges) >= COMPILED_FROM:
            return self._compiled(costs_s, edges, j, i)
        for columns in (NEXT_COLUMNS, None) if widest > NEXT_COLUMNS else (None,):
            extra_s = costs_s[j] - costs_s[i]
            for matrix in edges:
                extra_s = extra_s + _extra(matrix[:, :columns], j, i)
            fails = extra_s > 0
            found[j[fails], i[fails]] = False
            j, i = j[~fails], i[~fails]
        return found

    def _compiled(self, costs_s: Floats, edges: Sequence[Floats], j: Ints, i: Ints) -> Bools:
        """`_replaces` of the pairs `j`, `i` alone."""
        from .row_maxima import over_all_columns

        sum_s = costs_s[j] - costs_s[i]
        least_s = np.stack([self._least_extra(matrix)[j, i] for matrix in edges])
        for edge, matrix in enumerate(edges):
            more, less = map(np.ascontiguousarray, _sides(matrix))
            left = over_all_columns(more, less, j, i, sum_s, np.ascontiguousarray(least_s), edge)
            if not left.all():
                j, i, sum_s, least_s = j[left], i[left], sum_s[left], least_s[:, left]
        found: Bools = np.zeros((costs_s.size, costs_s.size), np.bool_)
        found[j, i] = sum_s <= 0
        return found

    def _least_extra(self, matrix: Floats) -> Floats:
        """[j, i]: what row j is over row i in some columns at most, and so no more than in all that i allows."""
        known = id(matrix)
        if known not in self._least:
            if matrix.shape[1] > FIRST_COLUMNS:
                matrix = matrix[:, np.linspace(0, matrix.shape[1] - 1, FIRST_COLUMNS).astype(np.int64)]
            more, less = _sides(matrix)
            extra_s = more[:, None, 0] - less[None, :, 0]
            for column in range(1, matrix.shape[1]):
                np.maximum(extra_s, more[:, None, column] - less[None, :, column], out=extra_s)
            self._least[known] = extra_s
        return self._least[known]


def _sides(matrix: Floats) -> tuple[Floats, Floats]:
    """The matrix as what is subtracted from, and as what is: where the latter's row forbids, nothing is over it."""
    finite = np.isfinite(matrix)
    if finite.all():
        return matrix, matrix
    return np.where(finite, matrix, FORBIDDEN), np.where(finite, matrix, 2 * FORBIDDEN)


def _extra(matrix: Floats, j: Ints, i: Ints) -> Floats:
    """What rows `j` are over rows `i` at most, pair by pair."""
    more, less = _sides(matrix)
    pairs = max(ENTRIES_A_TURN // max(matrix.shape[1], 1), 1)
    extra_s = np.empty(j.size)
    for begin in range(0, j.size, pairs):
        end = begin + pairs
        over_s = more[j[begin:end]]
        over_s -= less[i[begin:end]]
        extra_s[begin:end] = over_s.max(axis=1)
    return extra_s
