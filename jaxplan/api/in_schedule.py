"""A step's tasks in the order in which XLA for GPU runs them.

Its scheduler goes from the end of a program, or of a loop's body, to its beginning (see `cost.scheduled`): who waits
for a collective has it end before him, what lasts as long as it to XLA runs beside it, and one is under way at a time.
The compute unit then keeps to that order, whatever is ready: it waits where a collective ends.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ..cost import Node, scheduled
from ..plans import COMPUTE, PlannedTask


def in_schedule(
    tasks: Sequence[PlannedTask], xla_s: Sequence[float], through: Sequence[Collection[int]]
) -> list[PlannedTask]:
    """The tasks, with what is computed one after the other in XLA's order, in which collectives start and end.

    Args:
      tasks: each behind what it waits for, nothing across a barrier.
      xla_s: what XLA takes one run of each to last; through: the tasks whose result each reads through a reshape.
    """
    laid = _Laid(tasks)
    start = 0
    for stop in (*(i for i, one in enumerate(tasks) if one.kind == "barrier"), len(tasks)):
        laid.stretch(start, stop, xla_s, through)
        if stop < len(tasks):
            laid.barrier(stop)
        start = stop + 1
    return laid.made


class _Laid:
    """What has been laid out, in order."""

    def __init__(self, tasks: Sequence[PlannedTask]) -> None:
        self.tasks = tasks
        self.made: list[PlannedTask] = []
        self.place: dict[int, int] = {}
        self.waits: set[int] = set()  # for what comes next
        self.joins, self.dearest_s = False, 0.0
        self.since = 0

    def stretch(
        self, start: int, stop: int, xla_s: Sequence[float], through: Sequence[Collection[int]]
    ) -> None:
        """Tasks `start` to `stop`, between two barriers."""
        last: dict[int, Node] = {}
        views: dict[int, Node] = {}
        of_node: dict[Node, int] = {}
        nodes: list[Node] = []
        for task in range(start, stop):
            one = self.tasks[task]
            for other in through[task]:
                if other in last and other not in views:
                    views[other] = Node(other + 0.2, reads=[last[other]], is_view=True)
                    nodes.append(views[other])
            reads = [views[other] if other in through[task] else last[other] for other in one.after if other in last]
            if COMPUTE in one.streams:
                node = Node(float(task), task, xla_s[task], reads)
            else:
                begun = Node(task - 0.3, reads=reads, latency_s=xla_s[task])
                nodes.append(begun)
                of_node[begun] = task
                node = Node(task - 0.2, reads=[begun], start=begun)
            nodes.append(node)
            of_node[node] = task
            last[task] = node
        for node in scheduled(nodes):
            if node.is_view:
                continue
            task = of_node[node]
            if node.start is not None:
                self.waits.add(self.place[task])
                self.joins = False
            elif node.latency_s is not None:
                self._put(task)
            else:
                self._computed(task)

    def _put(self, task: int) -> None:
        """All that it waits for has ended when what was laid out last has."""
        self.place[task] = len(self.made)
        self.made.append(replace(self.tasks[task], after=tuple(sorted(self.waits))))
        self.joins = False

    def _computed(self, task: int) -> None:
        one = self.tasks[task]
        if self.joins and one.kind == COMPUTE:
            before = self.made[-1]
            named = one if one.seconds_s > self.dearest_s else before
            self.made[-1] = replace(
                before, name=named.name, where=named.where, trips=named.trips,
                seconds_s=before.seconds_s + one.seconds_s, bytes=max(before.bytes, one.bytes),
            )  # fmt: skip
            self.dearest_s = max(self.dearest_s, one.seconds_s)
            self.place[task] = len(self.made) - 1
            return
        self._put(task)
        self.waits = {self.place[task]}
        self.joins, self.dearest_s = one.kind == COMPUTE, one.seconds_s

    def barrier(self, task: int) -> None:
        """Everything before it ends before it."""
        self.place[task] = len(self.made)
        self.made.append(replace(self.tasks[task], after=tuple(range(self.since, len(self.made)))))
        self.waits, self.joins, self.since = {self.place[task]}, False, self.place[task]
