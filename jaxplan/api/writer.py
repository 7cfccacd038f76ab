"""A decided program, operation by operation -> tasks: see `schedule`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from ..cost import CostModel, synchronous
from ..ir import Graph, Loop, Op, post_order
from ..lowering import Sending
from ..plans import COMPUTE, PlannedTask
from ..sharding import Collective
from .combined import Alike, combined
from .drafts import SUMS, Draft, Sent, moved

NOTHING = frozenset[int]()

_AHEAD = 2.0
"""An operand that is there from the start is fetched when so many times the fetch's own duration of computation are
left before its reader: once to hide it, once more because other fetches use the same links."""


class Writer:
    """Of a step's tasks, see `schedule`."""

    def __init__(
        self, graph: Graph, compute_s: Mapping[int, float], settled_s: Mapping[int, float],
        collectives: Sequence[tuple[Collective, int]], sent: Sequence[Sending], model: CostModel,
        alive_bytes: np.ndarray,
    ) -> None:  # fmt: skip
        self.graph, self.model, self.alive_bytes, self.settled_s = graph, model, alive_bytes, settled_s
        self.compute_s = {op: seconds_s - settled_s.get(op, 0.0) for op, seconds_s in compute_s.items()}
        self.sending = {item: one for (item, _), one in zip(collectives, sent, strict=True)}
        self.drafts: list[Draft] = []
        self.behind: list[int] = []
        # where a compiler meets each operation, and the one that is written; TPU's combiners are not known to
        self.places = post_order(graph) if self._gpu else range(len(graph.ops))
        self.place: float = 0.0
        self.item_of: dict[int, Collective] = {}
        self.made_by: dict[int, frozenset[int]] = {}
        self.computations: list[int] = []
        self.early = {*graph.inputs, *graph.constants}
        self.held_back: dict[int, Op] = {}
        self.open = -1
        self.fence = 0
        self.alive = self.unseen = 0  # bytes, at the operation that is written; the most since one was last computed
        self.at: dict[int, Sent] = defaultdict(Sent)
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
                self.sent |= {producers[v] for v in moved(graph, graph.ops[op], item)}

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
                    (self.leaving if item.kind in SUMS else self.entering)[loop].append(item)
                    return
        sent = self.at[op]
        (sent.finish if self._of_result(self.graph.ops[op], item) else sent.fetch).append(item)

    def _of_result(self, op: Op, item: Collective) -> bool:
        """Whether a collective finishes a result of `op`, else it brings in an operand."""
        return item.kind in SUMS

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
                self._end(loop)
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
                self._begin(loop)
            self._op(op)
        self.place = len(self.graph.ops)
        self._results()
        tasks = [
            PlannedTask(
                name=draft.name, kind=draft.kind, streams=draft.streams, seconds_s=draft.seconds_s, trips=draft.trips,
                after=tuple(sorted(draft.after)), where=draft.where, bytes=draft.bytes,
            )
            for draft in self.drafts
        ]  # fmt: skip
        return self._ordered(*combined(tasks, [draft.alike for draft in self.drafts], self._price))

    def _ordered(self, tasks: Sequence[PlannedTask], order: Sequence[int]) -> tuple[PlannedTask, ...]:
        """The tasks as they run; `order`: the draft of each."""
        return tuple(tasks)

    def _begin(self, loop: Loop) -> None:
        self._barrier(loop.kind, loop)

    def _end(self, loop: Loop) -> None:
        self._barrier(f"end of {loop.kind}", loop)

    def _results(self) -> None:
        """What no operation needs: results that are brought to where they lie, those of a shape one after the other,
        and then copied there."""
        made: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for value in dict.fromkeys(self.graph.outputs):
            made[self.graph.values[value].shape].append(value)
        last: dict[tuple[int, ...], frozenset[int]] = {}
        for item in self.unknown:
            last[item.shape] = self._leave(item, last.get(item.shape) or self._made(made.get(item.shape, ())))
        self._settle(lambda value: last.get(self.graph.values[value].shape, self._made((value,))))

    def _leave(self, item: Collective, waits: frozenset[int]) -> frozenset[int]:
        """Bring a result to where it lies; where it isn't known which one it is, that waits for all."""
        waits = waits or frozenset(range(self.fence, len(self.drafts)))
        return frozenset({self._send(item, item.scope, waits)})

    def _settle(self, there: Callable[[int], frozenset[int]]) -> None:
        """Copy the results that are; `there`: what each waits for."""
        producers = self.graph.producers()
        for op, seconds_s in self.settled_s.items():
            value = next(v for v in self.graph.outputs if producers[v] == op)
            self._copy(seconds_s, there(value), self.graph.ops[op].source)

    def _copied_out(self, seconds_s: float) -> float:
        """Of what a result's copying takes, the part for its argument, before the step: see `cost.copied_back`."""
        held_s = float(self.model.copy_seconds(np.asarray(2.0 * (self.model.profile.on_chip_bytes or 0))))
        return seconds_s / 2 if self.model.profile.kind == "tpu" and seconds_s > 2 * held_s else 0.0

    def _copy(self, seconds_s: float, waits: frozenset[int], where: str) -> None:
        self._kernel("copy", where, 1.0, waits, seconds_s)

    def _kernel(self, name: str, where: str, trips: float, waits: frozenset[int], seconds_s: float) -> int:
        return self._add(
            Draft(name, COMPUTE, (COMPUTE,), trips, waits, where, seconds_s, bytes=self.alive, xla_s=seconds_s)
        )

    def _price(self, task: int, sent_bytes: int) -> float:
        """Of one collective in the place of those that are combined with a task: it starts once."""
        item = self.item_of[task]
        return self.model.collective_over(item.kind, sent_bytes, item.axes) * item.trips

    def _op(self, op: Op) -> None:
        self.place = self.places[op.index]
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
            brought = moved(self.graph, op, item)
            made = self._made(brought)
            task = self._send(item, op.source, made or self._ahead(self.sending[item].seconds_s))
            for value in brought:
                # what reads it later reads what was brought, unless it is brought there as well
                fetched[value] = self.made_by[value] = frozenset({task})
        waits = self._waits(op, fetched)
        seconds_s = self._seconds(op)
        early = early and not waits
        if seconds_s > 0:
            self.open = -1 if early and self._gpu else self.open
            task = self._compute(op, seconds_s, waits)
            waits = frozenset() if early and not self._gpu else frozenset({task})
        self.early |= set(op.results) if early else set()
        self._have(op.results, waits)
        for item in self.at[op.index].finish if op.index in self.at else ():
            waits = frozenset({self._send(item, op.source, waits)})
            self._have(op.results, waits, as_made=item.kind in SUMS)
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
        seconds_s = self._seconds(op)
        waits = self._made(op.operands)
        if seconds_s > 0:
            before, self.open = self.open, -1 if apart else self.open
            task = self._compute(op, seconds_s, waits)
            self.open = before if apart else self.open
            waits = frozenset({task}) if apart else frozenset()
        self._have(op.results, waits)

    def _waits(self, op: Op, fetched: Mapping[int, frozenset[int]]) -> frozenset[int]:
        """What has to end before an operation; `fetched`: its operands that are brought in for it."""
        return self._made([v for v in op.operands if v not in fetched]).union(*fetched.values())

    def _have(self, values: Iterable[int], since: frozenset[int], *, as_made: bool = True) -> None:
        """Values are there when these tasks have ended, `as_made` or where they were brought."""
        self.made_by.update(dict.fromkeys(values, since))

    def _seconds(self, op: Op) -> float:
        """Of the kernel that an operation writes with."""
        return self.compute_s.get(op.index, 0.0)

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
        return made[0] if len(made) == 1 else NOTHING.union(*made)

    def _ahead(self, fetch_s: float) -> frozenset[int]:
        """The computation at whose end just enough is left to do to hide a fetch; none: the start, or a barrier."""
        if self._gpu:  # what is gathered in one with others waits for no reader of theirs
            return NOTHING
        left_s = 0.0
        for task in reversed(self.computations):
            if task < self.fence or left_s >= _AHEAD * fetch_s:
                return frozenset({task}) if task >= self.fence else frozenset()
            left_s += self.drafts[task].seconds_s
        return frozenset()

    def _compute(self, op: Op, seconds_s: float, waits: frozenset[int]) -> int:
        if not self._joins(waits):
            self.open = self._add(Draft(op.primitive, COMPUTE, (COMPUTE,), op.trips, frozenset(), op.source))
            self.computations.append(self.open)
        draft = self.drafts[self.open]
        fresh = waits.difference(draft.after, (self.open,))
        if fresh:
            draft.after |= fresh
            self.behind[self.open] |= self._communicated(fresh)
        draft.seconds_s += seconds_s
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
        sums = item.kind in SUMS
        if packing_s and sums:
            waits = frozenset({self._pack(item, where, waits, packing_s)})
        task = Draft(f"{item.kind} {'+'.join(item.axes)}", item.kind, streams, item.trips, waits, where)
        task.seconds_s = self.sending[item].sent_s
        most = self.model.combined_bytes(kind)
        if most:
            # one element type a sum, and what is gathered or, on GPU, summed counts by its result
            dtype = item.dtype if sums else ""
            by_result = kind == "reduce_scatter" and self.model.profile.kind == "gpu"
            size = item.bytes // (self.model.size_of(item.axes) if by_result else 1)
            task.alike = Alike((kind, item.axes, dtype, item.trips), self.place, size, item.bytes, most)
        sent = self._add(task)
        self.item_of[sent] = item
        return self._pack(item, where, frozenset({sent}), packing_s) if packing_s and not sums else sent

    def _pack(self, item: Collective, where: str, waits: frozenset[int], packing_s: float) -> int:
        """The kernel on the compute unit that brings pieces into the order that they are sent in, or wanted in."""
        self.open = -1
        return self._kernel(f"order for {item.kind}", where, item.trips, waits, packing_s)

    def _bring_all(self, values: Iterable[int]) -> None:
        for value in list(values):
            self._bring(value, apart=True)

    def _barrier(self, name: str, loop: Loop) -> None:
        waits = frozenset(range(self.fence, len(self.drafts)))
        self.fence = self._add(Draft(name, "barrier", (), loop.trips, waits, loop.source))
        self.open = -1

    def _add(self, draft: Draft) -> int:
        fence = self._fence(draft)
        if 0 <= fence < len(self.drafts) and self.drafts[fence].kind == "barrier":
            draft.after = draft.after | {fence}
        self.drafts.append(draft)
        self.behind.append(self._communicated(draft.after))
        return len(self.drafts) - 1

    def _fence(self, draft: Draft) -> int:
        """The barrier that a new task waits for."""
        return self.fence
