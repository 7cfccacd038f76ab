"""When XLA for GPU runs what only the end of a step wants, where blocks are computed again (`jax.checkpoint`).

Its latency-hiding scheduler goes from the last operation to the first.  A weight's gradient is ready as soon as the sum
over devices that takes it has started, and is taken where nothing else can be: beside a collective that the backward
pass waits for, until that is covered, one collective at a time.  Else, of what is ready, the operation with the most
collectives between the arguments and itself goes first, so that the last gradients are used up first and those of the
first blocks of the backward pass run blocks later, and keep what they read.  Behind the barrier of a block that is
computed again everything waits for the gradient that comes in, the gathers of its weights too.  There two more products
were taken in each of the programs looked at.  What gradients make lies there until its sum starts.

Seen in schedules of unrolled Llamas, GPTs and an MLP under `jax.checkpoint`, whole and with products saved, compiled
for eight H100 as planned and as templates (jax 0.10.2).  Without checkpoints no collective but those of the gradients
is in the way: see `held_back`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..ir import VIEWS, Graph, Op
from ..sharding import UNREDUCED, MeshAxes, Step, reshard_steps
from .collectives import most_combined_bytes
from .held_back import PRODUCTS, last_products, result_bytes

_START_S = 9e-5
_WIRE_BYTE_S = 4.5e-12
"""What XLA takes a collective to last, its start and each byte sent, in seconds of the profile's products: by the
products that it put beside nine collectives of 8 to 120 MB, 50 to 80 us and 3.6 us a megabyte, and with more room by
what two Llamas and two GPTs were compiled to."""

_AT_BARRIER = 2
"""Products that are taken where a block that is computed again begins."""

_ENDS = PRODUCTS | {"scatter-add"}
"""What the backward pass ends with."""

_IN_PLACE = VIEWS | {"convert_element_type"}


class Fillers(NamedTuple):
    """Operations whose results only the end wants: weights' gradients, and sums for those of biases and scales.

    Attributes:
      times: when each runs, as the index of an operation.
      until: before which operation the collective starts that takes what it makes, if one does.
    """

    times: dict[int, int]
    until: dict[int, int]


@dataclass
class _Collective:
    """One that runs after operation `after` (-1: whenever it likes) and before all of `readers`.

    Attributes:
      place: its place in line, the operation that it stands next to; where it started, once it has.
      fillers: whose results it takes.
    """

    seconds: float
    after: int
    place: int
    readers: set[int] = field(default_factory=set)
    fillers: list[int] = field(default_factory=list)
    started: bool = False


def is_recomputed(graph: Graph, last: Sequence[Op]) -> bool:
    """Whether any of these operations stands behind a barrier."""
    behind = graph.behind()
    return any(behind[op.index] for op in last)


def fillers(
    graph: Graph,
    axes: MeshAxes,
    last: Sequence[Op],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    seconds: Mapping[int, float],
) -> Fillers:
    """See the module.

    Args:
      last: the operations after the last loop.
      values, reads: the layout row of every value where it is made, and of every operand as it is read.
      seconds: of every operation.
    """
    scattered = [v for op in last if op.primitive == "scatter-add" for v in op.operands]
    held, needed = last_products(last, scattered)
    held |= _late_sums(graph, last, needed)
    found = _Sent(graph, axes, last, needed)
    found.read(values, reads)
    return _Backwards(graph, last, held, needed, found, seconds).run()


def _late_sums(graph: Graph, last: Sequence[Op], needed: set[int]) -> set[int]:
    """Sums that only the end wants, a bias' or a scale's gradients, and that no other kernel makes beside its own.

    One kernel makes several sums of an array, but none along rows beside others: a block's normalisations over the last
    dimension leave those of their scales alone, batch and group normalisations do not.
    """
    behind = graph.behind()
    beside, sums = set[tuple[int, ...]](), list[Op]()
    for op in last:
        if op.primitive.startswith("reduce_") and "axes" in op.params:
            if not needed.isdisjoint(op.results):
                if tuple(op.params["axes"]) != (len(graph.values[op.operands[0]].shape) - 1,):
                    beside.add(behind[op.index])
            elif op.primitive == "reduce_sum" and graph.values[op.results[0]].shape:
                sums.append(op)
    return {op.results[0] for op in sums if behind[op.index] not in beside}


class _Sent:
    """The collectives of a stretch of a program, and how many are on the way to each operation (`depth`)."""

    def __init__(self, graph: Graph, axes: MeshAxes, last: Sequence[Op], needed: set[int]) -> None:
        self.graph, self.axes, self.last, self.needed = graph, axes, last, needed
        self.producers, self.behind = graph.producers(), graph.behind()
        self.depth: dict[int, int] = {}
        self.entries: dict[tuple[int, ...], int] = {}
        for op in last:
            if self.behind[op.index]:
                self.entries.setdefault(self.behind[op.index], op.index)
        self.waited: list[_Collective] = []
        self.sums: list[_Collective] = []

    def read(self, values: Mapping[int, np.ndarray], reads: Mapping[tuple[int, int], np.ndarray]) -> None:
        """Find them."""
        entered = self._entered()
        deep: dict[int, int] = {}
        at_entry: dict[tuple[int, ...], int] = {}
        windows: dict[tuple[object, ...], tuple[tuple[Step, ...], _Collective]] = {}
        pending: dict[tuple[int, bytes], tuple[Step, ...]] = {}
        for op in self.last:
            frame = self.behind[op.index]
            if frame and op.index == self.entries[frame]:
                at_entry[frame] = max((deep.get(v, 0) for v in entered[frame]), default=0)
            depth = at_entry.get(frame, 0)
            for place, value in enumerate(op.operands):
                made, row = values.get(value), reads.get((op.index, place))
                steps: tuple[Step, ...] = ()
                if made is not None and row is not None:
                    steps = reshard_steps(made, row, self.graph.values[value].bytes, self.axes)
                depth = max(depth, deep.get(value, 0) + bool(steps))
                if not steps or made is None or row is None:
                    continue
                if UNREDUCED in made.tolist() and not self.leads(op):
                    pending.setdefault((value, row.tobytes()), steps)
                elif (after := self._ready(value, frame)) >= self.last[0].index:
                    sent = _Collective(self._seconds(steps), after, op.index)
                    windows.setdefault((value, row.tobytes(), frame), (steps, sent))[1].readers.add(op.index)
            self.depth[op.index] = depth
            deep.update(dict.fromkeys(op.results, depth))
        self.waited = [*self._gathered(windows.values())]
        self.sums = [*self._summed(pending)]

    def leads(self, op: Op) -> bool:
        """Whether a product wants what `op` makes, or it is one."""
        return op.primitive in PRODUCTS or not self.needed.isdisjoint(op.results)

    def _entered(self) -> dict[tuple[int, ...], set[int]]:
        """What each block reads from outside."""
        entered: dict[tuple[int, ...], set[int]] = {frame: set() for frame in self.entries}
        for op in self.last:
            if frame := self.behind[op.index]:
                entered[frame].update(v for v in op.operands if self.producers[v] < self.entries[frame])
        return entered

    def _ready(self, value: int, frame: tuple[int, ...]) -> int:
        """The operation after which a value can be sent: behind a barrier that of what came in last."""
        made = self.producers[value]
        while made >= 0 and self.graph.ops[made].primitive in _IN_PLACE:
            made = self.producers[self.graph.ops[made].operands[0]]
        return max(made, self.entries[frame] - 1) if frame else made

    def _seconds(self, steps: Iterable[Step]) -> float:
        return sum(_START_S + self._wire_seconds(step) for step in steps)

    def _wire_seconds(self, step: Step) -> float:
        sizes = dict(self.axes)
        devices = math.prod(sizes[name] for name in step.axes)
        return step.bytes * _WIRE_BYTE_S * (devices - 1) / devices

    def _gathered(self, found: Iterable[tuple[tuple[Step, ...], _Collective]]) -> Iterable[_Collective]:
        """With those gathers in one that XLA combines: over the same axes, ready at the same time."""
        most = most_combined_bytes("all_gather", "gpu")
        into: dict[tuple[object, ...], tuple[_Collective, float]] = {}
        for steps, sent in found:
            key, size = (sent.after, steps[0].axes), sum(step.bytes for step in steps)
            if len(steps) == 1 and steps[0].kind == "all_gather":
                if key in into and into[key][1] + size <= most:
                    one, so_far = into[key]
                    one.seconds += self._wire_seconds(steps[0])
                    one.readers |= sent.readers
                    into[key] = one, so_far + size
                    continue
                into[key] = sent, size
            yield sent

    def _summed(self, pending: Mapping[tuple[int, bytes], tuple[Step, ...]]) -> Iterable[_Collective]:
        """The sums of what the end wants, as they are combined."""
        alike: dict[tuple[object, ...], list[tuple[int, tuple[Step, ...]]]] = {}
        for (value, _), steps in pending.items():
            kinds = tuple((step.kind, step.axes) for step in steps)
            alike.setdefault(kinds, []).append((self.producers[value], steps))
        for members in alike.values():
            one, so_far = None, 0.0
            for maker, steps in sorted(members, key=lambda member: member[0]):
                first = steps[0]
                size = result_bytes(first, self.axes) if first.kind == "reduce_scatter" else first.bytes
                if one is None or so_far + size > most_combined_bytes(first.kind, "gpu"):
                    if one is not None:
                        yield one
                    one, so_far = _Collective(_START_S * len(steps), -1, -1), 0.0
                one.seconds += sum(map(self._wire_seconds, steps))
                one.place = max(one.place, maker)
                one.fillers.append(maker)
                so_far += size
            if one is not None:
                yield one


class _Backwards:
    """The walk from the last operation to the first."""

    def __init__(
        self, graph: Graph, last: Sequence[Op], held: set[int], needed: set[int], sent: _Sent,
        seconds: Mapping[int, float],
    ) -> None:  # fmt: skip
        self.graph, self.seconds, self.depth = graph, seconds, sent.depth
        self.end = max((op.index for op in last if op.primitive in _ENDS), default=-1)
        # sums behind the last product run in their own time, whenever the collective that takes them starts
        self.fillers = {op.index for op in last if op.index <= self.end and not held.isdisjoint(op.results)}
        self.walked = last
        self.barriers = {entry - 1: _AT_BARRIER for entry in sent.entries.values()}
        # the deepest operation before each on the way to the end; a loss' mean, which nothing waits for, is none
        self.front: dict[int, int] = {}
        deepest = 0
        for op in last:
            if op.index not in self.fillers and not needed.isdisjoint(op.results):
                deepest = max(deepest, sent.depth[op.index])
            self.front[op.index] = deepest
        self.read_by: dict[int, list[_Collective]] = {}
        self.made_by: dict[int, list[_Collective]] = {}
        for one in sent.waited:
            self.made_by.setdefault(one.after, []).append(one)
            for reader in one.readers:
                self.read_by.setdefault(reader, []).append(one)
        self.sums = []
        for one in sent.sums:
            one.fillers = [filler for filler in one.fillers if filler in self.fillers]
            if one.fillers:
                self.sums.append(one)
        self.taken_by = {filler: one for one in self.sums for filler in one.fillers}
        self.pool = [-filler for filler in self.fillers.difference(self.taken_by)]
        heapq.heapify(self.pool)
        self.line: list[tuple[int, int, _Collective]] = []
        self.number = itertools.count()
        self.flying: _Collective | None = None
        self.now_s = self.until_s = 0.0
        self.times: dict[int, int] = {}

    def run(self) -> Fillers:
        """When fillers run, and until when what they make lies there."""
        for one in self.sums:
            self._queue(one)
        if self.sums:  # beside the optimizer
            _, _, first = heapq.heappop(self.line)
            self._start(first, self.end + 1)
        for op in reversed(self.walked):
            at = op.index
            if at > self.end:
                for one in self.read_by.get(at, ()):
                    one.readers.discard(at)
                    one.started |= not one.readers
                continue
            self._before(at)
            if at not in self.times:
                if at in self.fillers:
                    self.times[at] = at
                self._ran(at, at)
        until = {filler: one.place for one in self.sums if one.started for filler in one.fillers}
        return Fillers(self.times, until)

    def _before(self, at: int) -> None:
        """Go on until `at` can run, and nothing goes before it."""
        while True:
            self._advance(at)
            waits = any(not one.started for one in self.made_by.get(at, ()))
            if at in self.taken_by and at not in self.times:
                waits |= not self.taken_by[at].started
            while self.pool and -self.pool[0] in self.times:
                heapq.heappop(self.pool)
            filler = -self.pool[0] if self.pool else at
            slips = not waits and self.barriers.get(at, 0) > 0
            if filler < at and (waits or slips or self.depth[filler] >= self.front[at]):
                heapq.heappop(self.pool)
                self.times[filler] = at + 1
                if slips and self.graph.ops[filler].primitive in PRODUCTS:
                    self.barriers[at] -= 1
                self._ran(filler, at)
            elif waits and self.flying is not None:
                self.now_s = max(self.now_s, self.until_s)
            else:
                return

    def _advance(self, at: int) -> None:
        """Start what is covered, and let the next in line end here."""
        while self.flying is None or self.now_s >= self.until_s:
            if self.flying is not None:
                self._start(self.flying, at + 1)
                self.flying = None
            if not self.line:
                return
            _, _, self.flying = heapq.heappop(self.line)
            self.until_s = self.now_s + self.flying.seconds

    def _start(self, one: _Collective, place: int) -> None:
        one.started, one.place = True, place
        for filler in one.fillers:
            heapq.heappush(self.pool, -filler)

    def _ran(self, index: int, place: int) -> None:
        self.now_s += self.seconds.get(index, 0.0)
        for one in self.read_by.get(index, ()):
            one.readers.discard(index)
            if not one.readers:
                one.place = place
                self._queue(one)

    def _queue(self, one: _Collective) -> None:
        heapq.heappush(self.line, (-one.place, next(self.number), one))
