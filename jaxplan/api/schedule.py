"""A decided program -> the tasks that the simulator runs.

Computation between two communications is one task: an operation joins the last one as long as it waits for the same
collectives, and nothing that the task made is already being sent.  Collectives that
finish sums follow their operation; those that bring operands into layout stand before it.  An operand that is there
from the start (an argument, a slice of a stack) is fetched no earlier than needed to hide it: a scheduler that fetched
all weights at once would fill the memory with them.  On GPU, where what is alike is put into one first, see
`started_late`, and what is sent waits for the kernels that cast it.

What only rewrites such an operand (slices residuals off their stacks, casts a weight) is a task of its own where it is
read first, which waits for nothing: it fills what communication leaves idle, as in what XLA compiles, whose schedules
put a layer's slices beside the collectives of its backward pass (experiments/quality).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..cost import CostModel, synchronous
from ..ir import Graph, Loop, Op
from ..lowering import Sending
from ..plans import COMPUTE, PlannedTask
from ..sharding import Collective
from .combined import Alike, combined
from .started_late import started_late

_SUMS = frozenset({"all_reduce", "reduce_scatter"})
"""Collectives that finish what their operation made; the others bring in what it reads."""

_NOTHING = frozenset[int]()

_AHEAD = 2.0
"""An operand that is there from the start is fetched when so many times the fetch's own duration of computation are
left before its reader: once to hide it, once more because other fetches use the same links."""


def planned_tasks(
    graph: Graph,
    compute_s: Mapping[int, float],
    settled_s: Mapping[int, float],
    collectives: Sequence[tuple[Collective, int]],
    sent: Sequence[Sending],
    model: CostModel,
    alive_bytes: np.ndarray,
) -> tuple[PlannedTask, ...]:
    """The tasks of a step.

    Args:
      compute_s: seconds of every operation, all its runs; settled_s: of these what copies its results into place.
      collectives: what the partitioner inserts, each with its operation (-1: unknown, run last); sent: what each
        takes.
      alive_bytes: `int64[n_ops]`, memory at every operation.
    """
    return _Writer(graph, compute_s, settled_s, collectives, sent, model, alive_bytes).write()


@dataclass
class _Draft:
    """A task that may still grow; `dearest_s` is the price of the operation that names it; `kernels`: about how many
    it is, as each costs its start at least."""

    name: str
    kind: str
    streams: tuple[str, ...]
    trips: float
    after: frozenset[int]
    where: str
    seconds_s: float = 0.0
    dearest_s: float = -1.0
    bytes: int = 0
    alike: Alike | None = None
    kernels: float = 0.0


@dataclass
class _Sent:
    """The collectives around one operation: those that fetch its operands, those that finish its sums."""

    fetch: list[Collective] = field(default_factory=list)
    finish: list[Collective] = field(default_factory=list)


class _Writer:
    def __init__(
        self, graph: Graph, compute_s: Mapping[int, float], settled_s: Mapping[int, float],
        collectives: Sequence[tuple[Collective, int]], sent: Sequence[Sending], model: CostModel,
        alive_bytes: np.ndarray,
    ) -> None:  # fmt: skip
        self.graph, self.model, self.alive_bytes, self.settled_s = graph, model, alive_bytes, settled_s
        self.compute_s = {op: seconds_s - settled_s.get(op, 0.0) for op, seconds_s in compute_s.items()}
        self.sending = {item: one for (item, _), one in zip(collectives, sent, strict=True)}
        self.drafts: list[_Draft] = []
        self.behind: list[int] = []
        self.item_of: dict[int, Collective] = {}
        self.made_by: dict[int, frozenset[int]] = {}
        self.computations: list[int] = []
        self.early = {*graph.inputs, *graph.constants}
        self.held_back: dict[int, Op] = {}
        self.open = -1
        self.fence = 0
        self.alive = self.unseen = 0  # bytes, at the operation that is written; the most since one was last computed
        self.at: dict[int, _Sent] = defaultdict(_Sent)
        self.entering: dict[Loop, list[Collective]] = defaultdict(list)
        self.leaving: dict[Loop, list[Collective]] = defaultdict(list)
        self.unknown: list[Collective] = []
        for item, op in collectives:
            if item.kind != "all_slice":
                self._place(item, op)
        producers = graph.producers()
        self.sent = {op for op, around in self.at.items() if around.finish}
        for op, around in self.at.items():
            for item in around.fetch:
                self.sent |= {producers[v] for v in _moved(graph, graph.ops[op], item)}

    def _place(self, item: Collective, op: int) -> None:
        if op < 0:
            self.unknown.append(item)
            return
        runs = 1.0
        for loop in self.graph.loops:  # outer before inner
            if loop.start <= op < loop.stop:
                runs *= loop.trips
                if item.trips < runs:
                    # the partitioner's program has it outside of this loop
                    (self.leaving if item.kind in _SUMS else self.entering)[loop].append(item)
                    return
        sent = self.at[op]
        (sent.finish if item.kind in _SUMS else sent.fetch).append(item)

    @property
    def _gpu(self) -> bool:
        return self.model is not None and self.model.profile.kind == "gpu"

    def write(self) -> tuple[PlannedTask, ...]:
        enters: dict[int, list[Loop]] = defaultdict(list)
        leaves: dict[int, list[Loop]] = defaultdict(list)
        for loop in self.graph.loops:
            enters[loop.start].append(loop)
            leaves[loop.stop].insert(0, loop)
        self.alive = int(self.alive_bytes[0]) if len(self.alive_bytes) else 0
        for op_index, seconds_s in self.settled_s.items():
            if out_s := self._copied_out(seconds_s):
                self.settled_s = {**self.settled_s, op_index: seconds_s - out_s}
                self._copy(out_s, frozenset(), self.graph.ops[op_index].source)
        for op in (*self.graph.ops, None):
            position = len(self.graph.ops) if op is None else op.index
            self.alive = self.alive if op is None else int(self.alive_bytes[position])
            self.unseen = max(self.unseen, self.alive)
            for loop in leaves[position]:
                self._bring_all(v for v, op in self.held_back.items() if op.index >= loop.start)
                self._barrier(f"end of {loop.kind}", loop)
                for item in self.leaving[loop]:
                    self._send(item, loop.source, frozenset())
            if op is None:
                self._bring_all(self.held_back)
                for last in self.computations[-1:]:
                    self.drafts[last].bytes = max(self.drafts[last].bytes, self.unseen)
                break
            for loop in enters[position]:
                for item in self.entering[loop]:
                    self._send(item, loop.source, frozenset())
                self._bring_all(v for op in self.graph.ops[loop.start : loop.stop] for v in op.operands)
                self._barrier(loop.kind, loop)
            self._op(op)
        self._results()
        tasks = [
            PlannedTask(
                name=draft.name, kind=draft.kind, streams=draft.streams, seconds_s=draft.seconds_s, trips=draft.trips,
                after=tuple(sorted(draft.after)), where=draft.where, bytes=draft.bytes,
            )
            for draft in self.drafts
        ]  # fmt: skip
        tasks, order = combined(tasks, [draft.alike for draft in self.drafts], self._price)
        if self._gpu:
            tasks = started_late(tasks, [self.drafts[task].kernels for task in order])
        return tuple(tasks)

    def _results(self) -> None:
        """What no operation needs: results that are brought to where they lie, those of a shape one after the other,
        and then copied there."""
        made: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for value in dict.fromkeys(self.graph.outputs):
            made[self.graph.values[value].shape].append(value)
        last: dict[tuple[int, ...], frozenset[int]] = {}
        for item in self.unknown:
            waits = last.get(item.shape) or self._made(made.get(item.shape, ()))
            waits = waits or frozenset(range(self.fence, len(self.drafts)))
            last[item.shape] = frozenset({self._send(item, item.scope, waits)})
        producers = self.graph.producers()
        for op, seconds_s in self.settled_s.items():
            value = next(v for v in self.graph.outputs if producers[v] == op)
            waits, where = last.get(self.graph.values[value].shape, self._made((value,))), self.graph.ops[op].source
            self._copy(seconds_s, waits, where)

    def _copied_out(self, seconds_s: float) -> float:
        """Of what a result's copying takes, the part for its argument, before the step: see `cost.copied_back`."""
        held_s = float(self.model.copy_seconds(np.asarray(2.0 * (self.model.profile.on_chip_bytes or 0))))
        return seconds_s / 2 if self.model.profile.kind == "tpu" and seconds_s > 2 * held_s else 0.0

    def _copy(self, seconds_s: float, waits: frozenset[int], where: str) -> None:
        copy = _Draft("copy", COMPUTE, (COMPUTE,), 1.0, waits, where, seconds_s, kernels=1.0)
        copy.bytes = self.alive
        self._add(copy)

    def _price(self, task: int, sent_bytes: int) -> float:
        """Of one collective in the place of those that are combined with a task: it starts once."""
        item = self.item_of[task]
        return self.model.collective_over(item.kind, sent_bytes, item.axes) * item.trips

    def _op(self, op: Op) -> None:
        early = self._early(op) and not self._made(op.operands)
        if early and op.index not in self.at and op.index not in self.sent:
            self.early |= set(op.results)
            if self.compute_s.get(op.index, 0.0) > 0 or any(v in self.held_back for v in op.operands):
                self.held_back |= dict.fromkeys(op.results, op)
            return
        for value in op.operands:
            if value in self.held_back:
                self._bring(value, apart=self._gpu or not early)
        fetched: dict[int, frozenset[int]] = {}
        for item in self.at[op.index].fetch if op.index in self.at else ():
            moved = _moved(self.graph, op, item)
            made = self._made(moved)
            task = self._send(item, op.source, made or self._ahead(self.sending[item].seconds_s))
            for value in moved:
                # what reads it later reads what was brought, unless it is brought there as well
                fetched[value] = self.made_by[value] = frozenset({task})
        waits = self._made([v for v in op.operands if v not in fetched]).union(*fetched.values())
        seconds_s = self.compute_s.get(op.index, 0.0)
        early = early and not waits
        if seconds_s > 0:
            self.open = -1 if early and self._gpu else self.open
            task = self._compute(op, seconds_s, waits)
            waits = frozenset() if early and not self._gpu else frozenset({task})
        self.early |= set(op.results) if early else set()
        for item in self.at[op.index].finish if op.index in self.at else ():
            waits = frozenset({self._send(item, op.source, waits)})
        for value in op.results:
            self.made_by[value] = waits
        if op.index in self.sent:
            self.open = -1

    def _bring(self, value: int, *, apart: bool) -> None:
        """Run what makes a value that was held back: as a task of its own, or in front of what is sent early."""
        op = self.held_back.get(value)
        if op is None:
            return
        for result in op.results:
            self.held_back.pop(result, None)
        for operand in op.operands:
            self._bring(operand, apart=apart)
        seconds_s = self.compute_s.get(op.index, 0.0)
        waits = self._made(op.operands)
        if seconds_s > 0:
            before, self.open = self.open, -1 if apart else self.open
            task = self._compute(op, seconds_s, waits)
            self.open = before if apart else self.open
            waits = frozenset({task}) if apart else frozenset()
        for result in op.results:
            self.made_by[result] = waits

    def _early(self, op: Op) -> bool:
        """Whether `op` only rewrites one tensor that is there from the start: a weight's cast, reshape, transpose.

        A scheduler moves it as early as who fetches the result wants it.
        """
        if op.primitive == "scan_slice":
            return True
        only, values = -1, self.graph.values
        for value in op.operands:
            if value != only and values[value].shape:
                if only >= 0 or value not in self.early:
                    return False
                only = value
        return True

    def _made(self, values: Collection[int]) -> frozenset[int]:
        made = [self.made_by[v] for v in values if v in self.made_by]
        return made[0] if len(made) == 1 else _NOTHING.union(*made)

    def _ahead(self, fetch_s: float) -> frozenset[int]:
        """The computation at whose end just enough is left to do to hide a fetch; none: the start, or a barrier."""
        if self._gpu:  # what is gathered in one with others waits for no reader of theirs; see `started_late`
            return _NOTHING
        left_s = 0.0
        for task in reversed(self.computations):
            if task < self.fence or left_s >= _AHEAD * fetch_s:
                return frozenset({task}) if task >= self.fence else frozenset()
            left_s += self.drafts[task].seconds_s
        return frozenset()

    def _compute(self, op: Op, seconds_s: float, waits: frozenset[int]) -> int:
        if not self._joins(waits):
            self.open = self._add(_Draft(op.primitive, COMPUTE, (COMPUTE,), op.trips, frozenset(), op.source))
            self.computations.append(self.open)
        draft = self.drafts[self.open]
        fresh = waits.difference(draft.after, (self.open,))
        if fresh:
            draft.after |= fresh
            self.behind[self.open] |= self._communicated(fresh)
        draft.seconds_s += seconds_s
        if self.model is not None:
            draft.kernels += min(seconds_s / op.trips / self.model.profile.op_overhead_s, 1.0)
        draft.bytes, self.unseen = max(draft.bytes, self.unseen, int(self.alive_bytes[op.index])), 0
        if seconds_s > draft.dearest_s:
            draft.name, draft.where, draft.trips, draft.dearest_s = (
                op.primitive,
                op.source,
                op.trips,
                seconds_s,
            )
        return self.open

    def _joins(self, waits: frozenset[int]) -> bool:
        """Whether what waits for these may be computed in one go with the last operation: neither waits for a
        communication that the other doesn't wait for.
        """
        if self.open < 0 or max(waits, default=-1) > self.open:
            return False
        fence = (self.fence,) if self.drafts[self.fence].kind == "barrier" else ()
        ours, theirs = self._communicated((*fence, *waits)), self._communicated((self.open,))
        return ours | theirs == theirs and (self.open in waits or ours == theirs)

    def _communicated(self, tasks: Iterable[int]) -> int:
        """The communications, as bits, that have ended when these tasks have."""
        found = 0
        for task in tasks:
            found |= self.behind[task] | (0 if self.drafts[task].kind == COMPUTE else 1 << task)
        return found

    def _send(self, item: Collective, where: str, waits: frozenset[int]) -> int:
        """Send, and pack before or unpack behind it; the task that readers wait for."""
        kind, streams = self.model.compiled_kind(item.kind, item.axes), self.model.streams_of(item.axes)
        if synchronous(kind, self.model.profile.kind) and streams:
            streams = (COMPUTE, *streams)
        packing_s = self.sending[item].packing_s
        sums = item.kind in _SUMS
        if packing_s and sums:
            waits = frozenset({self._pack(item, where, waits, packing_s)})
        task = _Draft(f"{item.kind} {'+'.join(item.axes)}", item.kind, streams, item.trips, waits, where)
        task.seconds_s = self.sending[item].sent_s
        most = self.model.combined_bytes(kind)
        if most:
            # one element type a sum, and what is gathered or, on GPU, summed counts by its result
            dtype = item.dtype if sums else ""
            by_result = kind == "reduce_scatter" and self.model.profile.kind == "gpu"
            size = item.bytes // (self.model.size_of(item.axes) if by_result else 1)
            task.alike = Alike((kind, item.axes, dtype, item.trips), size, item.bytes, most)
        sent = self._add(task)
        self.item_of[sent] = item
        return self._pack(item, where, frozenset({sent}), packing_s) if packing_s and not sums else sent

    def _pack(self, item: Collective, where: str, waits: frozenset[int], packing_s: float) -> int:
        """The kernel on the compute unit that brings pieces into the order that they are sent in, or wanted in."""
        draft = _Draft(f"order for {item.kind}", COMPUTE, (COMPUTE,), item.trips, waits, where, packing_s)
        draft.bytes, draft.kernels = self.alive, 1.0
        self.open = -1
        return self._add(draft)

    def _bring_all(self, values: Iterable[int]) -> None:
        for value in list(values):
            self._bring(value, apart=True)

    def _barrier(self, name: str, loop: Loop) -> None:
        waits = frozenset(range(self.fence, len(self.drafts)))
        self.fence = self._add(_Draft(name, "barrier", (), loop.trips, waits, loop.source))
        self.open = -1

    def _add(self, draft: _Draft) -> int:
        if self.fence < len(self.drafts) and self.drafts[self.fence].kind == "barrier":
            draft.after = draft.after | {self.fence}
        self.drafts.append(draft)
        self.behind.append(self._communicated(draft.after))
        return len(self.drafts) - 1


def _moved(graph: Graph, op: Op, item: Collective) -> list[int]:
    """The operands that a collective brings into layout: those of its shape, or all where none has it."""
    alike = [v for v in op.operands if graph.values[v].shape == item.shape]
    return alike or list(op.operands)
