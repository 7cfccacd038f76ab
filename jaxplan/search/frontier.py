"""FT: the frontier of step time and peak memory by exact variable elimination over frontier tables.

Every factor of the problem (a node's costs, an edge's matrix) is a table of frontiers, at first of one point each.  A
node is eliminated by adding up the tables that it occurs in and keeping, for every joint choice of its neighbours, the
(seconds, bytes) that no other choice of it beats in both: TensorOpt's node, edge, branch, triangle and star rules
(arXiv 2004.10856) are the cases of it with one to several neighbours.  Memory is always part of dominance.

Memory is a peak over time steps, not one sum: a point carries the bytes at the steps `rows`, and its peak over them is
at most the true one.  Steps are added where the true peak of a found point is higher, until none is or there are
`MOST_ROWS`.  With `width` > 0 points of almost equal bytes are merged; each carries the fewest bytes that it may stand
for.  So two things are known of every budget: a plan that keeps it (its peak evaluated on all steps), and how fast no
plan can be that does (`Tradeoff.bound_at`), from the same tables.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import SolverError
from .evaluate import Evaluator
from .known import Tradeoff, TradeoffPoint, staircase
from .problem import Bools, Floats, Ints, StrategyProblem
from .program import OutOfTime
from .reduce import reduce

#: Time steps that a point carries; dominance in so many rows is rare, so frontiers grow with each.
MOST_ROWS = 3

#: Entries of a table, and sums of two points that making it may take: beyond these the kernel takes minutes.
MOST_ENTRIES, MOST_SUMS = 1_000_000, 100_000_000


class Points(NamedTuple):
    """The frontiers of a table.

    Attributes:
      begin: `int64[entries + 1]`; seconds: `float64[points]`; bytes, low: `int64[points, rows]`.
      left, right: `int64[points]`, the points of two other tables that each is the sum of.
      choice: `int64[points]`, the strategy of the node that was eliminated.
    """

    begin: Ints
    seconds: Floats
    bytes: Ints
    low: Ints
    left: Ints
    right: Ints
    choice: Ints


class NoAssignment(SolverError):
    """No assignment is possible, or worth carrying."""


class TooWide(SolverError):
    """A table would have more than `MOST_ENTRIES` entries, or take more sums than it may."""


@dataclass(frozen=True)
class Table:
    """Frontiers over the joint choices of `scope` (ascending nodes), and how its points came about.

    `node` was eliminated to make it (-1: none), out of `left` and `right` (None: a factor of the problem).
    """

    scope: tuple[int, ...]
    points: Points
    node: int = -1
    left: Table | None = None
    right: Table | None = None


def trace_frontier(
    problem: StrategyProblem, *, width: float = 0.0, most_rows: int = MOST_ROWS, most_sums: int = MOST_SUMS,
    deadline: float = math.inf,
) -> Tradeoff:  # fmt: skip
    """The frontier of a problem; its `limit_bytes` is not looked at.

    Args:
      width: points whose bytes differ by a smaller factor than 1 + width are merged.
      most_rows: time steps that the tables may carry; most_sums: of two points, that making one table may take.
      deadline: no table is begun after it, in `time.monotonic` seconds.

    Raises:
      TooWide: the problem's graph is too dense for tables.  SolverError: no assignment is possible.  OutOfTime: the
        deadline came first.
    """
    reduction = reduce(problem, for_peak=True)
    if reduction.infeasible:
        raise SolverError(reduction.infeasible)
    small, evaluate, evaluate_small = reduction.problem, Evaluator(problem), Evaluator(reduction.problem)
    steps: list[int] = []
    found: dict[tuple[int, ...], TradeoffPoint] = {}
    while True:
        rows = Rows(small, evaluate_small.times[steps] if steps else np.zeros(0, np.int64))
        final, largest = Elimination(small, rows, width, most_sums, deadline).run()
        over: dict[int, int] = {}
        for index in range(final.points.seconds.size):
            assignment = assignment_of(final, index, len(small.nodes))
            alive = evaluate_small.timeline_bytes(assignment)
            excess = int(alive.max(initial=0)) - int(final.points.bytes[index].max(initial=0))
            if excess > 0:
                step = int(np.argmax(alive))
                over[step] = max(over.get(step, 0), excess)
            lifted = reduction.lift(assignment)
            result = evaluate(lifted)
            found[lifted] = TradeoffPoint(
                objective_s=result.objective_s, peak_bytes=result.peak_bytes, assignment=lifted
            )
        if not over or len(steps) == most_rows:
            points = staircase(found.values())
            return Tradeoff(points=points, floor=_floor(final.points), rows=len(steps), largest=largest)
        steps.append(max(sorted(over), key=lambda step: over[step]))


def _floor(points: Points) -> tuple[tuple[int, float], ...]:
    """How fast an assignment can be at most, by the fewest bytes that any may need for it."""
    least = points.low.max(axis=1, initial=0)
    steps: list[tuple[int, float]] = []
    for index in np.lexsort((points.seconds, least)):
        if not steps or points.seconds[index] < steps[-1][1]:
            steps.append((int(least[index]), float(points.seconds[index])))
    return tuple(steps)


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
    """One elimination of all nodes of a problem; `slack` leaves out what is worth nothing."""

    def __init__(
        self, problem: StrategyProblem, rows: Rows, width: float, most_sums: int, deadline: float,
        slack: Slack | None = None,
    ) -> None:  # fmt: skip
        endless = np.full(rows.count, np.iinfo(np.int64).max)
        self.slack = slack or Slack(price_s=np.zeros(rows.count), slack_s=math.inf, spare_bytes=endless)
        self.sizes = [node.costs_s.size for node in problem.nodes]
        self.width, self.rows, self.largest, self.sums = width, rows, 1, 0
        self.most_sums, self.deadline = most_sums, deadline
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
        """The table over no node, whose points are the frontier, and the entries of the largest joint table."""
        for node in self._order():
            meeting = sorted((t for t in self.tables if node in t.scope), key=lambda t: t.points.seconds.size)
            self.tables = [t for t in self.tables if node not in t.scope]
            while len(meeting) > 2:
                meeting = sorted(
                    [*meeting[2:], self._sum(meeting[0], meeting[1], -1)], key=lambda t: t.points.seconds.size
                )
            pair = meeting if len(meeting) == 2 else [*meeting, _unit(self.rows.count)]
            self.tables.append(self._sum(pair[0], pair[1], node))
        final = self.tables[0]
        for table in self.tables[1:]:
            final = self._sum(final, table, -1)
        if not final.points.seconds.size:
            raise NoAssignment("every assignment of the problem is forbidden by its edges")
        return final, self.largest

    def _order(self) -> list[int]:
        """The nodes as they are eliminated: always the one whose table over its neighbours is the smallest.

        Raises:
          TooWide: one would be too large; before any is made.
        """
        beside, left, order = [set(around) for around in self.beside], set(range(len(self.sizes))), list[int]()
        while left:
            node = min(left, key=lambda v: (math.prod(self.sizes[u] for u in beside[v]), v))
            left.remove(node)
            order.append(node)
            around = beside[node]
            _check_entries(math.prod(self.sizes[u] for u in around), len(around))
            for other in around:
                beside[other] |= around - {other}
                beside[other].discard(node)
        return order

    def _sum(self, left: Table, right: Table, node: int) -> Table:
        if time.monotonic() > self.deadline:
            raise OutOfTime
        scope = tuple(sorted({*left.scope, *right.scope} - {node}))
        entries = math.prod(self.sizes[v] for v in scope)
        self.largest = max(self.largest, entries * (self.sizes[node] if node >= 0 else 1))
        _check_entries(entries, len(scope))
        # compiled code, and what compiles it, are loaded by those who need them
        from .frontier_tables import combine

        first, first_stride = self._entries(left, scope, node)
        second, second_stride = self._entries(right, scope, node)
        a, b = left.points, right.points
        choices = self.sizes[node] if node >= 0 else 1
        many, others = np.diff(a.begin), np.diff(b.begin)
        sums = sum(
            int(many[first + i * first_stride] @ others[second + i * second_stride]) for i in range(choices)
        )
        if sums > self.most_sums:
            raise TooWide(
                f"a frontier table over {len(scope)} nodes together would take {sums} sums, more than "
                f"{self.most_sums}: the problem has too many trade-offs for elimination"
            )
        self.sums += sums
        points = combine(
            a.begin, a.seconds, a.bytes, a.low, first, first_stride, b.begin, b.seconds, b.bytes, b.low, second,
            second_stride, choices, self.width, self.slack.price_s, self.slack.slack_s, self.slack.spare_bytes,
        )  # fmt: skip
        return Table(scope, Points(*points), node, left, right)

    def _entries(self, table: Table, scope: tuple[int, ...], node: int) -> tuple[Ints, int]:
        """For every entry over `scope` that of `table` at strategy 0 of `node`, and how far its next strategy is."""
        strides, stride = {}, 1
        for member in reversed(table.scope):
            strides[member] = stride
            stride *= self.sizes[member]
        entry = np.zeros((1,) * len(scope), np.int64)
        for axis, member in enumerate(scope):
            along = np.arange(self.sizes[member]) * strides.get(member, 0)
            entry = entry + along.reshape([-1 if i == axis else 1 for i in range(len(scope))])
        whole = np.broadcast_to(entry, [self.sizes[member] for member in scope])
        return np.ascontiguousarray(whole).reshape(-1), strides.get(node, 0)


def _check_entries(entries: int, nodes: int) -> None:
    if entries > MOST_ENTRIES:
        raise TooWide(
            f"frontier tables over {nodes} nodes together would have {entries} entries, more than "
            f"{MOST_ENTRIES}: the problem's graph is too dense for elimination"
        )


def _factor(scope: tuple[int, ...], costs_s: Floats, allowed: Bools | None, size: Ints) -> Table:
    """A table of one point an entry, of none where the entry is forbidden."""
    mask = np.ones(costs_s.size, bool) if allowed is None else allowed.reshape(-1)
    begin = np.concatenate([[0], np.cumsum(mask)]).astype(np.int64)
    seconds, kept = costs_s.reshape(-1)[mask], np.ascontiguousarray(size[mask])
    nobody = np.full(seconds.size, -1, np.int64)
    entry = np.flatnonzero(mask)
    return Table(
        scope, Points(begin, np.ascontiguousarray(seconds), kept, kept.copy(), nobody, nobody, entry)
    )


def _unit(rows: int) -> Table:
    """The table over no node that adds nothing."""
    return _factor((), np.zeros(1), None, np.zeros((1, rows), np.int64))


def assignment_of(final: Table, index: int, count: int) -> tuple[int, ...]:
    """The choices that make a point of the last table."""
    chosen = [0] * count
    todo = [(final, index)]
    while todo:
        table, point = todo.pop()
        if table.left is None or table.right is None:
            continue
        if table.node >= 0:
            chosen[table.node] = int(table.points.choice[point])
        todo.append((table.left, int(table.points.left[point])))
        todo.append((table.right, int(table.points.right[point])))
    return tuple(chosen)
