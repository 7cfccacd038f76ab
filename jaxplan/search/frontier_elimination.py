"""Exact variable elimination over frontier tables: nodes go one after the other, what is worth having of them stays.

A table holds frontiers for the joint choices of some nodes that have one; the others, forbidden or not worth carrying,
take no room, so that a table over many nodes may be small.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import SolverError
from .problem import Bools, Floats, Ints, StrategyProblem
from .program import OutOfTime

#: Joint choices that a table may be over where all are carried; pairs of two tables' choices that meet in a new one;
#: sums of two points that making it may take: beyond these the kernel takes minutes.
MOST_ENTRIES, MOST_PAIRS, MOST_SUMS = 1_000_000, 2_000_000, 100_000_000

#: A pair costs as much as so many sums: pairs are sorted.
PAIR_SUMS = 5

#: Joint choices are numbered in 64 bits.
MOST_NUMBERS = 2**62


class Points(NamedTuple):
    """The frontiers of a table.

    Attributes:
      begin: `int64[entries + 1]`; seconds, early: `float64[points]`; bytes, low: `int64[points, rows]`.
      left, right: `int64[points]`, the points of two other tables that each is the sum of.
      choice: `int64[points]`, the strategy of the node that was eliminated.
    """

    begin: Ints
    seconds: Floats
    bytes: Ints
    early: Floats
    low: Ints
    left: Ints
    right: Ints
    choice: Ints


class NoAssignment(SolverError):
    """No assignment is possible, or worth carrying."""


class TooWide(SolverError):
    """A table would be too large, or take more sums than it may."""


@dataclass(frozen=True)
class Table:
    """Frontiers over the joint choices of `scope` (ascending nodes), and how its points came about.

    `entries` are the joint choices that have a frontier, ascending, as numbers in mixed radix: the last node of the
    scope turns fastest.  `node` was eliminated to make it (-1: none), out of `left` and `right` (None: a factor of the
    problem).
    """

    scope: tuple[int, ...]
    entries: Ints
    points: Points
    node: int = -1
    left: Table | None = None
    right: Table | None = None


@dataclass(frozen=True, kw_only=True)
class Slack:
    """What a point must keep to be worth carrying: a slack, at a price by row and byte, and what each row can spare.

    All that a point is the sum of must cost nothing or more at these prices, and hold no negative bytes.
    """

    price_s: Floats
    slack_s: float
    spare_bytes: Ints


class Rows:
    """What every strategy keeps alive at the carried time steps."""

    def __init__(self, problem: StrategyProblem, times: Ints) -> None:
        self.count = times.size
        self._bytes = [np.zeros((node.costs_s.size, self.count), np.int64) for node in problem.nodes]
        for usage in problem.usages:
            alive = (usage.start <= times) & (times < usage.stop)
            self._bytes[usage.node] += usage.bytes[:, None] * alive[None, :]

    def of_node(self, node: int) -> Ints:
        """`int64[strategies, count]`."""
        return self._bytes[node]

    def less_least(self) -> Ints:
        """Leave out what every node keeps alive in any case: `int64[nodes, count]`."""
        least = np.array([own.min(axis=0) for own in self._bytes]).reshape(len(self._bytes), self.count)
        self._bytes = [own - taken for own, taken in zip(self._bytes, least, strict=True)]
        return least


class Elimination:
    """One elimination of all nodes of a problem; `slack` leaves out what is worth nothing.

    `width`, `base` and `step_s` merge points: see `frontier_tables.combine`.  `most_sums` may be taken for one table,
    `most_work` for all of them; `most_pairs` of two tables' choices may meet in a new one.
    """

    def __init__(
        self, problem: StrategyProblem, rows: Rows, width: float, *, base: float = 1.0, step_s: float = 0.0,
        deadline: float = math.inf, most_sums: float = MOST_SUMS, most_work: float = math.inf,
        most_pairs: int = MOST_PAIRS, slack: Slack | None = None,
    ) -> None:  # fmt: skip
        endless = np.full(rows.count, np.iinfo(np.int64).max)
        self.slack = slack or Slack(price_s=np.zeros(rows.count), slack_s=math.inf, spare_bytes=endless)
        self.sizes = [node.costs_s.size for node in problem.nodes]
        self.width, self.base, self.step_s, self.rows, self.largest, self.sums = width, base, step_s, rows, 1, 0
        self.most_sums, self.most_work, self.most_pairs = most_sums, most_work, most_pairs
        self.deadline = deadline
        self.tables: list[Table] = [_unit(rows.count)]
        self.beside: list[set[int]] = [set() for _ in self.sizes]
        for node, costs in enumerate(problem.nodes):
            self.tables.append(_factor((node,), costs.costs_s, None, rows.of_node(node)))
        for edge in problem.edges:
            costs_s, allowed = edge.costs_s, edge.allowed
            if edge.tail > edge.head:
                costs_s, allowed = costs_s.T, None if allowed is None else allowed.T
            scope = (min(edge.tail, edge.head), max(edge.tail, edge.head))
            nothing = np.zeros((costs_s.size, rows.count), np.int64)
            self.tables.append(_factor(scope, costs_s, allowed, nothing))
            self.beside[edge.tail].add(edge.head)
            self.beside[edge.head].add(edge.tail)

    def run(self) -> tuple[Table, int]:
        """The table over no node, whose points are the frontier, and the most pairs that met in a table."""
        order = self._order()
        if math.isinf(self.slack.slack_s):
            self._foresee(order)
        at: list[list[Table]] = [[] for _ in self.sizes]
        position = {node: i for i, node in enumerate(order)}
        final = self.tables[0]

        def keep(table: Table) -> None:
            at[min(table.scope, key=lambda v: position[v])].append(table)

        for table in self.tables[1:]:
            keep(table)
        for node in order:
            meeting = sorted(at[node], key=lambda t: t.points.seconds.size)
            at[node] = []
            while len(meeting) > 2:
                meeting = sorted(
                    [*meeting[2:], self._sum(meeting[0], meeting[1], -1)], key=lambda t: t.points.seconds.size
                )
            pair = meeting if len(meeting) == 2 else [*meeting, _unit(self.rows.count)]
            made = self._sum(pair[0], pair[1], node)
            if made.scope:
                keep(made)
            else:
                final = self._sum(final, made, -1)
        if not final.points.seconds.size:
            raise NoAssignment("every assignment of the problem is forbidden by its edges")
        return final, self.largest

    def _order(self) -> list[int]:
        """The nodes as they are eliminated: always the one whose table over its neighbours is the smallest."""
        beside, order = [set(around) for around in self.beside], list[int]()
        weigh = {node: math.prod(self.sizes[u] for u in around) for node, around in enumerate(beside)}
        waiting = [(entries, node) for node, entries in weigh.items()]
        heapq.heapify(waiting)
        while waiting:
            entries, node = heapq.heappop(waiting)
            if weigh.get(node) != entries:
                continue
            del weigh[node]
            order.append(node)
            around = beside[node]
            for other in around:
                beside[other] |= around - {other}
                beside[other].discard(node)
            for other in around:
                weigh[other] = math.prod(self.sizes[u] for u in beside[other])
                heapq.heappush(waiting, (weigh[other], other))
        return order

    def _foresee(self, order: Sequence[int]) -> None:
        """Refuse what would be too wide before any table is made.

        Raises:
          TooWide: a table would be over too many joint choices, all of which are carried where there is no slack.
        """
        position = {node: i for i, node in enumerate(order)}
        at: list[list[frozenset[int]]] = [[] for _ in self.sizes]
        for table in self.tables[1:]:
            at[min(table.scope, key=lambda v: position[v])].append(frozenset(table.scope))
        for node in order:
            meeting = sorted(at[node], key=self._joint)
            while len(meeting) > 1:
                scope = meeting[0] | meeting[1]
                if len(meeting) == 2:
                    scope -= {node}
                if self._joint(scope) > MOST_ENTRIES:
                    raise TooWide(
                        f"frontier tables over {len(scope)} nodes together would have {self._joint(scope)} entries, "
                        f"more than {MOST_ENTRIES}: the problem's graph is too dense for elimination"
                    )
                meeting = sorted([*meeting[2:], scope], key=self._joint)
            rest = meeting[0] - {node}
            if rest:
                at[min(rest, key=lambda v: position[v])].append(rest)

    def _joint(self, scope: frozenset[int]) -> int:
        return math.prod(self.sizes[v] for v in scope)

    def _sum(self, left: Table, right: Table, node: int) -> Table:
        if time.monotonic() > self.deadline:
            raise OutOfTime
        # compiled code, and what compiles it, are loaded by those who need them
        from .frontier_tables import combine, meet

        scope = tuple(sorted({*left.scope, *right.scope} - {node}))
        shared = tuple(sorted({*left.scope} & {*right.scope}))
        if math.prod(self.sizes[v] for v in {*left.scope, *right.scope}) > MOST_NUMBERS:
            raise TooWide(
                f"the joint choices of {len(scope)} nodes can't be numbered: the problem's graph is too dense for "
                "elimination"
            )
        strides, stride = {}, 1
        for member in reversed(scope):
            strides[member] = stride
            stride *= self.sizes[member]
        ours, theirs = self._coordinates(left), self._coordinates(right)
        key, other_key = self._numbers(ours, shared, left), self._numbers(theirs, shared, right)
        out = _weighted(ours, strides, left.entries.size)
        rest = {member: s for member, s in strides.items() if member not in left.scope}
        other_out = _weighted(theirs, rest, right.entries.size)
        order, other_order = np.argsort(key, kind="stable"), np.argsort(other_key, kind="stable")
        a, b, slack = left.points, right.points, self.slack
        mine, others, entries = meet(
            order, key, out, _least(a, slack), other_order, other_key, other_out, _least(b, slack), slack.slack_s,
            self.most_pairs,
        )  # fmt: skip
        self.largest = max(self.largest, mine.size)
        if mine.size > self.most_pairs:
            raise TooWide(
                f"frontier tables over {len(scope)} nodes together would have more than {self.most_pairs} entries: the "
                "problem's graph is too dense for elimination"
            )
        many = np.diff(a.begin)[mine] * np.diff(b.begin)[others]
        self._pay(int(many.sum()) + PAIR_SUMS * mine.size, len(scope))
        choices = ours.get(node)
        chosen = choices[mine] if choices is not None else theirs[node][others] if node >= 0 else np.zeros_like(mine)
        first = np.flatnonzero(np.diff(entries, prepend=-1))
        made = combine(
            np.append(first, entries.size), mine, others, chosen, a.begin, a.seconds, a.bytes, a.early, a.low,
            b.begin, b.seconds, b.bytes, b.early, b.low, self.width, self.base, self.step_s, slack.price_s,
            slack.slack_s,
            slack.spare_bytes,
        )  # fmt: skip
        points = Points(*made)
        filled = np.flatnonzero(np.diff(points.begin))
        begin = np.append(points.begin[filled], points.begin[-1])
        return Table(scope, entries[first][filled], points._replace(begin=begin), node, left, right)

    def _pay(self, sums: int, nodes: int) -> None:
        self.sums += sums
        if sums > self.most_sums or self.sums > self.most_work:
            raise TooWide(
                f"a frontier table over {nodes} nodes together would take {sums} sums, more than may be taken: the "
                "problem has too many trade-offs for elimination"
            )

    def _coordinates(self, table: Table) -> dict[int, Ints]:
        """For each node of the scope its strategy in each entry."""
        left, found = table.entries, dict[int, Ints]()
        for member in reversed(table.scope):
            left, found[member] = np.divmod(left, self.sizes[member])
        return found

    def _numbers(self, coordinates: dict[int, Ints], scope: tuple[int, ...], table: Table) -> Ints:
        """The joint choices of some of a table's nodes, by entry."""
        number = np.zeros(table.entries.size, np.int64)
        for member in scope:
            number = number * self.sizes[member] + coordinates[member]
        return number


def _weighted(coordinates: dict[int, Ints], strides: dict[int, int], entries: int) -> Ints:
    number = np.zeros(entries, np.int64)
    for member, chosen in coordinates.items():
        if member in strides:
            number += chosen * strides[member]
    return number


def _least(points: Points, slack: Slack) -> Floats:
    """What the cheapest point of each entry costs, its bytes priced."""
    if not points.seconds.size:
        return np.zeros(0)
    return np.minimum.reduceat(points.early + points.low @ slack.price_s, points.begin[:-1])


def _factor(scope: tuple[int, ...], costs_s: Floats, allowed: Bools | None, size: Ints) -> Table:
    """A table of one point an entry; what is forbidden has none."""
    mask = np.ones(costs_s.size, bool) if allowed is None else allowed.reshape(-1)
    entries = np.flatnonzero(mask)
    seconds, kept = np.ascontiguousarray(costs_s.reshape(-1)[mask]), np.ascontiguousarray(size[mask])
    nobody = np.full(seconds.size, -1, np.int64)
    return Table(
        scope, entries,
        Points(np.arange(entries.size + 1), seconds, kept, seconds.copy(), kept.copy(), nobody, nobody, entries),
    )  # fmt: skip


def _unit(rows: int) -> Table:
    """The table over no node that adds nothing."""
    return _factor((), np.zeros(1), None, np.zeros((1, rows), np.int64))


def assignments_of(final: Table, points: Ints, count: int) -> Ints:
    """The choices that make points of the last table: `int64[points, count]`, of `count` nodes.

    A table is walked through once for all of them.
    """
    chosen = np.zeros((points.size, count), np.int64)
    todo = [(final, points)]
    while todo:
        table, at = todo.pop()
        if table.left is None or table.right is None:
            continue
        if table.node >= 0:
            chosen[:, table.node] = table.points.choice[at]
        todo.append((table.left, table.points.left[at]))
        todo.append((table.right, table.points.right[at]))
    return chosen
