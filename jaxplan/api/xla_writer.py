"""A decided program -> the tasks of an XLA that hides latency: a task for each kernel, laid out in its schedule.

What is written to memory is a kernel, with all before it that is not (see `cost.latency_hiding`).  What waits for no
more than arguments may run before loops that stand before it, and is gathered in one with what is gathered there.  A
loop's stacks are filled before the loop, beside its weights' gathers or whatever is sent then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from ..cost import PRODUCTS, CostModel, is_folded
from ..hardware import XlaTimes
from ..ir import Graph, Loop, Op
from ..lowering import Sending
from ..plans import PlannedTask
from ..sharding import Collective
from .drafts import SUMS, Draft
from .in_schedule import in_schedule
from .writer import NOTHING, Writer


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What is known of a program's kernels.

    Attributes:
      stored: for every value whether a kernel writes it to memory; what isn't is made by who reads it.
      moved: the operands, as (operation, place), that are sent to be read; partial: values that are still to be summed
        over devices where they are made.
      results: values that are sent to where they lie as results of the step.
      products_s: what XLA takes one run of a product to last, see `cost.product_times`; other kernels last as the cost
        model has it; times: what it takes collectives to last.
      filled: of an operation that writes a loop's stack, the share of its seconds that go into filling it before.
    """

    stored: Sequence[bool]
    moved: Set[tuple[int, int]]
    partial: Set[int]
    results: Set[int]
    products_s: Mapping[int, float]
    times: XlaTimes
    filled: Mapping[int, float]


class XlaWriter(Writer):
    """Of a step's tasks, see the module."""

    def __init__(
        self, graph: Graph, compute_s: Mapping[int, float], settled_s: Mapping[int, float],
        collectives: Sequence[tuple[Collective, int]], sent: Sequence[Sending], model: CostModel,
        alive_bytes: np.ndarray, kernels: Kernels,
    ) -> None:  # fmt: skip
        self.kernels = kernels
        self.unwritten: dict[int, float] = defaultdict(float)
        self.opened: list[tuple[int, float]] = []  # of each loop around: its barrier, how often it runs
        self.as_made: dict[int, frozenset[int]] = {}  # as `made_by`, before it was brought anywhere
        self.free: dict[int, int] = {}  # tasks that wait for the beginning of a loop alone, -1: of the step
        self.producers = graph.producers()
        super().__init__(graph, compute_s, settled_s, collectives, sent, model, alive_bytes)

    def _of_result(self, op: Op, item: Collective) -> bool:
        kernels, values = self.kernels, self.graph.values
        if all(values[v].shape != item.shape for v in op.results):
            return item.kind in SUMS
        alike = (place for place, v in enumerate(op.operands) if values[v].shape == item.shape)
        brought = [op.operands[place] for place in alike if (op.index, place) in kernels.moved]
        if item.kind not in SUMS:
            return not brought
        makes_sums = op.primitive in PRODUCTS or "reduce" in op.primitive
        return kernels.partial.isdisjoint(brought) and (makes_sums or not kernels.partial.isdisjoint(op.results))

    def _ordered(self, tasks: Sequence[PlannedTask], order: Sequence[int]) -> tuple[PlannedTask, ...]:
        position = {task: i for i, task in enumerate(order)}
        drafts = [self.drafts[task] for task in order]
        through = [{position[task] for task in draft.through if task in position} for draft in drafts]
        for task in (task for task in order if task in self.item_of and self.drafts[task].alike is None):
            self.drafts[task].xla_s = self._sent_xla_s(self.item_of[task], self.item_of[task].bytes)
        return tuple(in_schedule(tasks, [draft.xla_s / draft.trips for draft in drafts], through))

    def _price(self, task: int, sent_bytes: int) -> float:
        self.drafts[task].xla_s = self._sent_xla_s(self.item_of[task], sent_bytes)
        return super()._price(task, sent_bytes)

    def _sent_xla_s(self, item: Collective, sent_bytes: int) -> float:
        kind = self.model.compiled_kind(item.kind, item.axes)
        return self.kernels.times.collective_s(kind, self.model.size_of(item.axes), sent_bytes) * item.trips

    def _begin(self, loop: Loop) -> None:
        around = self.opened[-1][1] if self.opened else 1.0
        for op in self.graph.ops[loop.start : loop.stop]:
            filled_s = self.kernels.filled.get(op.index, 0.0) * self.compute_s.get(op.index, 0.0)
            if filled_s and op.trips == loop.trips * around:
                self.compute_s[op.index] -= filled_s
                self._kernel("fill", op.source, around, NOTHING, filled_s)
        super()._begin(loop)
        self.opened.append((self.fence, loop.trips * around))

    def _end(self, loop: Loop) -> None:
        """What a loop carries and stacks is there when it ends."""
        super()._end(loop)
        self.opened.pop()
        for op in self.graph.ops[loop.start : loop.stop]:
            made = op.results if op.primitive == "scan_stack" else op.operands[1:] * (op.primitive == "carry_next")
            self._have(made, frozenset({self.fence}))

    def _results(self) -> None:
        """As for others, but which result is sent is known: those of a shape in their order."""
        brought: dict[int, frozenset[int]] = {}
        left: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for value in dict.fromkeys(self.graph.outputs):
            if value in self.kernels.results:
                left[self.graph.values[value].shape].append(value)
        for item in self.unknown:
            there = left[item.shape][:1]
            waits = brought.get(there[0], self._made(there)) if there else NOTHING
            made = max((self.producers[value] for value in there), default=-1)
            self.place = self.places[made] if made >= 0 else len(self.graph.ops)
            sent = self._leave(item, waits)
            brought.update(dict.fromkeys(there, sent))
            if len(left[item.shape]) > 1:
                left[item.shape].pop(0)
        self._settle(lambda value: brought.get(value, self._made((value,))))

    def _waits(self, op: Op, fetched: Mapping[int, frozenset[int]]) -> frozenset[int]:
        found = NOTHING
        for place, value in enumerate(op.operands):
            here = value not in fetched and (op.index, place) not in self.kernels.moved
            found |= (self.as_made if here else self.made_by).get(value, NOTHING)
        return found

    def _have(self, values: Iterable[int], since: frozenset[int], *, as_made: bool = True) -> None:
        super()._have(values, since, as_made=as_made)
        if as_made:
            self.as_made.update(dict.fromkeys(values, since))

    def _seconds(self, op: Op) -> float:
        """Of its kernel; what none writes is made by who reads it first."""
        seconds_s = super()._seconds(op) + sum(self.unwritten.pop(value, 0.0) for value in op.operands)
        sent = op.index in self.sent or op.index in self.at
        if not op.results or sent or op.primitive in PRODUCTS or any(self.kernels.stored[v] for v in op.results):
            return seconds_s
        self.unwritten[op.results[0]] = seconds_s
        return 0.0

    def _compute(self, op: Op, seconds_s: float, waits: frozenset[int]) -> int:
        task = super()._compute(op, seconds_s, waits)
        draft, kernels = self.drafts[task], self.kernels
        draft.xla_s = kernels.products_s.get(op.index, seconds_s / op.trips) * op.trips
        if op.primitive == "dot_general":
            folded = [v for place, v in enumerate(op.operands) if is_folded(self.graph, op, place)]
            draft.through = self._made(folded)
        return task

    def _joins(self, waits: frozenset[int]) -> bool:
        return False

    def _fence(self, draft: Draft) -> int:
        around = [-1, *(begun for begun, _ in self.opened)]
        if draft.kind == "barrier" or any(self.free.get(other) not in around for other in draft.after):
            return super()._fence(draft)
        self.free[len(self.drafts)] = around[-1]
        return around[-1]
