"""The integer program of a problem as arrays: variables, rows and prices, before any solver sees them.

ilp.py states the formulation in prose; each of its constraints is one `add_...` function here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .problem import Floats, Ints, StrategyProblem, Usage


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Constraint rows `lower <= sum of coefficients * variables <= upper`; `row` counts from 0 within this
    block.
    """

    lower: Floats
    upper: Floats
    row: Ints
    column: Ints
    coefficient: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """What one run of the engine said: values of the x columns, a bound in the objective's own unit.

    `proved` says that the values are optimal within the gap asked for; `infeasible` that there are none.
    `prices` are what one unit more in each row would save (relaxations only).
    """

    values: Floats
    prices: Floats
    bound: float
    proved: bool
    infeasible: bool


class OutOfTime(Exception):
    """The time of the search is over, and the engine has nothing to show for it."""


class Program:
    """Columns and rows over some `nodes` of a problem, with all edges between them.

    Columns: first the x of every node, in order, then the e of every edge's allowed pairs, then the peak if it
    is minimised. `peak_unit_bytes` is what one unit of a memory row stands for.
    """

    def __init__(self, problem: StrategyProblem, nodes: Sequence[int], *, for_peak: bool = False) -> None:
        self.problem, self.nodes, self.for_peak = problem, list(nodes), for_peak
        sizes = np.array([problem.nodes[n].costs_s.size for n in self.nodes], dtype=np.int64)
        self.sizes = sizes
        self.offset = np.cumsum(sizes) - sizes
        self.choices = int(sizes.sum())
        self.blocks: list[Rows] = []
        self._where = {node: i for i, node in enumerate(self.nodes)}
        costs = [problem.nodes[n].costs_s for n in self.nodes]
        self._prices: list[Floats] = [np.zeros(self.choices)] if for_peak else costs
        self.columns = self.choices
        self.add_one_choice()
        self.add_links()
        #: How many columns, from the first, are at most one.
        self.ones = self.columns
        if for_peak:
            self._prices.append(np.ones(1))
            self.columns += 1
        self._usages = [u for u in problem.usages if u.node in self._where]
        most = max((int(u.bytes.max()) for u in self._usages), default=1)
        self.peak_unit_bytes = float(max(problem.limit_bytes or most, 1))

    @property
    def prices(self) -> Floats:
        """The objective's coefficient of every column: seconds, or the peak in its unit."""
        return np.concatenate(self._prices) if self._prices else np.zeros(0)

    def add_one_choice(self) -> None:
        """(1) The x of a node add up to one."""
        row = np.repeat(np.arange(len(self.nodes)), self.sizes)
        self._add(1.0, len(self.nodes), row, np.arange(self.choices), np.ones(self.choices))

    def add_links(self) -> None:
        """(2), (3) The e of an edge add up to x of the tail along each row, of the head along each column."""
        pairs_of: dict[tuple[int, int], tuple[Ints, Ints, Floats]] = {}
        rows, columns, coefficients = [], [], []
        first = 0
        for edge in self.problem.edges:
            if edge.tail not in self._where or edge.head not in self._where:
                continue
            key = (id(edge.costs_s), id(edge.allowed))
            if key not in pairs_of:
                allowed = np.ones(edge.costs_s.shape, bool) if edge.allowed is None else edge.allowed
                i, j = np.nonzero(allowed)
                pairs_of[key] = i, j, edge.costs_s[i, j]
            i, j, costs = pairs_of[key]
            tails, heads = edge.costs_s.shape
            e = self.columns + np.arange(i.size)
            x_tail = self.offset[self._where[edge.tail]] + np.arange(tails)
            x_head = self.offset[self._where[edge.head]] + np.arange(heads)
            rows += [first + i, first + tails + j, first + np.arange(tails + heads)]
            columns += [e, e, x_tail, x_head]
            coefficients += [np.ones(2 * i.size), np.full(tails + heads, -1.0)]
            self._prices.append(np.zeros(i.size) if self.for_peak else costs)
            self.columns += i.size
            first += tails + heads
        if rows:
            self._add(0.0, first, np.concatenate(rows), np.concatenate(columns), np.concatenate(coefficients))

    def add_memory(self, peak: int) -> bool:
        """(4) The bytes alive at a peak stay within the limit, in units of the limit; or within the peak
        variable.

        Says whether any of the nodes is alive there at all.
        """
        used = alive_at(self._usages, peak)
        if not used:
            return False
        column = [self.offset[self._where[node]] + np.arange(amounts.size) for node, amounts in used.items()]
        parts = [amounts / self.peak_unit_bytes for amounts in used.values()]
        if self.for_peak:
            column.append(np.array([self.columns - 1]))
            parts.append(np.array([-1.0]))
        columns, coefficients = np.concatenate(column), np.concatenate(parts)
        limit = 0.0 if self.for_peak else (self.problem.limit_bytes or 0) / self.peak_unit_bytes
        self._add(limit, 1, np.zeros(columns.size, np.int64), columns, coefficients, lower=-np.inf)
        return True

    def add_cover(self, peak: int, assignment: Sequence[int] | Ints) -> None:
        """(5) Of the choices that overflow a peak, or ones at least as large there, not all may be taken."""
        used = alive_at(self._usages, peak)
        if not used:
            return
        column = []
        for node, amounts in used.items():
            column.append(
                self.offset[self._where[node]] + np.flatnonzero(amounts >= amounts[assignment[node]])
            )
        columns = np.concatenate(column)
        self._add(
            len(used) - 1.0,
            1,
            np.zeros(columns.size, np.int64),
            columns,
            np.ones(columns.size),
            lower=-np.inf,
        )

    def _add(
        self,
        upper: float,
        count: int,
        row: Ints,
        column: Ints,
        coefficient: Floats,
        lower: float | None = None,
    ) -> None:
        low = upper if lower is None else lower
        self.blocks.append(
            Rows(
                lower=np.full(count, low),
                upper=np.full(count, upper),
                row=row,
                column=column,
                coefficient=coefficient,
            )
        )

    def choice(self, values: Floats) -> Ints:
        """The strategy of largest value of every node, from the values of the columns."""
        return np.array(
            [int(np.argmax(values[o : o + k])) for o, k in zip(self.offset, self.sizes, strict=True)],
            dtype=np.int64,
        )


def alive_at(usages: Sequence[Usage], peak: int) -> dict[int, Ints]:
    """The bytes of each node that is alive at a peak, by its strategy."""
    used: dict[int, Ints] = {}
    for usage in usages:
        if usage.start <= peak < usage.stop:
            used[usage.node] = used[usage.node] + usage.bytes if usage.node in used else usage.bytes
    return used


class Timeline:
    """Bytes alive at every peak of a reduced problem, for fractional choices too."""

    def __init__(self, problem: StrategyProblem) -> None:
        usages = problem.usages
        sizes = np.array([node.costs_s.size for node in problem.nodes], dtype=np.int64)
        offset = np.cumsum(sizes) - sizes
        self.count = max((u.stop for u in usages), default=0)
        self._column = np.concatenate(
            [offset[u.node] + np.arange(u.bytes.size) for u in usages] or [offset[:0]]
        )
        self._amount = np.concatenate([u.bytes for u in usages] or [offset[:0]]).astype(np.float64)
        lengths = np.array([u.bytes.size for u in usages], dtype=np.int64)
        self._begin = np.cumsum(lengths) - lengths
        self._start = np.array([u.start for u in usages], dtype=np.int64)
        self._stop = np.array([u.stop for u in usages], dtype=np.int64)

    def bytes_at_peaks(self, x: Floats) -> Floats:
        """The bytes alive at each peak under the values `x` of all nodes' strategies, in order."""
        delta = np.zeros(self.count + 1)
        if self._begin.size:
            used = np.add.reduceat(self._amount * x[self._column], self._begin)
            np.add.at(delta, self._start, used)
            np.subtract.at(delta, self._stop, used)
        return np.cumsum(delta)[:-1]

    def worst(self, alive: Floats | Ints, limit_bytes: float, most: int) -> list[int]:
        """Up to `most` peaks over the limit: the worst of each run of them, the worst runs first."""
        over = np.flatnonzero(alive > limit_bytes)
        if not over.size:
            return []
        runs = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1)
        worst = [int(run[np.argmax(alive[run])]) for run in runs]
        return sorted(worst, key=lambda peak: (-alive[peak], peak))[:most]


def one_hot(problem: StrategyProblem, chosen: Sequence[int] | Ints) -> Floats:
    """An assignment as the values of all strategies of all nodes, in order."""
    sizes = np.array([node.costs_s.size for node in problem.nodes], dtype=np.int64)
    values = np.zeros(int(sizes.sum()))
    values[np.cumsum(sizes) - sizes + np.asarray(chosen)] = 1.0
    return values
