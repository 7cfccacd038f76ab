"""In which order XLA for GPU runs the end of a step, and when what only that wants.

A weight's gradient is ready, as XLA's scheduler goes (see `scheduler`), as soon as the sum over devices that takes it
has started.  It is taken beside collectives that the backward pass waits for, and where that has to wait for anything
else, and keeps what it reads until then.  Behind the barrier of a block that is computed again everything waits for the
gradient that comes in, the gathers of its weights too.  What gradients make lies there until its sum starts.

A kernel is what is written to memory, with all before it that is not.  It is no kernel but a reshape that a product
reads an operand through where that has several dimensions of a kind, and a part of a kernel's results where it writes
others beside it (see `kernel_results`).  How long a kernel lasts to XLA: see `hardware.xla_times`; what moves memory
alone takes the time of that, and no kernel's start (`product_times.moving_times`): behind a small one everything waits
for a microsecond, in which weights' gradients run.  With the start in it they ran where they stand in a VAE whose group
normalisations have ten such kernels a convolution: 1986 MB were planned where 2363 were compiled, 2322 are without it
(H100, jax 0.10.2, from the scheduler's log).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..hardware import XlaTimes
from ..ir import Graph, Op, post_order
from ..sharding import UNREDUCED, MeshAxes, Step, reshard_steps
from .collectives import most_combined_bytes
from .held_back import PRODUCTS, last_products, result_bytes
from .kernel_results import written_beside
from .pooling import POOLING
from .product_times import is_folded, product_time
from .run_order import RunOrder
from .scheduler import Node, scheduled

_ENDS = PRODUCTS | {"scatter-add"}
"""What the backward pass ends with."""


class Ending(NamedTuple):
    """When a GPU runs the end of a step, and what that has in memory meanwhile.

    Attributes:
      times: when each operation runs, as the index of one, see `run_order`.
      late: of sums whose operand another kernel writes for them in its own time: when they run.
      until: of weights' gradients, and of sums for those of biases and scales, before which operation the collective
        starts that takes what is made, if one does.
      found: before which operation a max-pooling's places are found that its gradient goes to, see `pooling`.
    """

    times: dict[int, int]
    late: dict[int, int]
    until: dict[int, int]
    found: dict[int, int]


def ending_of(
    graph: Graph,
    axes: MeshAxes,
    last: Sequence[Op],
    stored: Sequence[bool],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    seconds: Mapping[int, float],
    times: XlaTimes,
    run_at: Sequence[int] = (),
) -> Ending:
    """See the module.

    Args:
      last: the operations after the last loop.
      stored: see `fusion.Traffic`.
      values, reads: the layout row of every value where it is made, and of every operand as it is read.
      seconds: of every operation that is no product, as XLA has it, see `product_times.moving_times`.
      run_at: when each operation runs, see `fusion.Traffic`.
    """
    kernels = Kernels(graph, axes, last, stored, values, reads, seconds, times)
    return kernels.found(scheduled(kernels.nodes()), [op for op, at in enumerate(run_at) if at > op])


class Kernels:
    """The kernels and collectives of a stretch of a program."""

    def __init__(
        self, graph: Graph, axes: MeshAxes, last: Sequence[Op], stored: Sequence[bool],
        values: Mapping[int, np.ndarray], reads: Mapping[tuple[int, int], np.ndarray],
        seconds: Mapping[int, float], times: XlaTimes,
    ) -> None:  # fmt: skip
        self.graph, self.axes, self.stored, self.times = graph, axes, stored, times
        self.values, self.reads, self.seconds = values, reads, seconds
        self.producers, self.behind = graph.producers(), graph.behind()
        scattered = [v for op in last if op.primitive == "scatter-add" for v in op.operands]
        self.held, self.needed = last_products(last, scattered)
        self.late = self.held | _late_sums(graph, last, self.needed)
        self.chained = self._chained(last, scattered)
        self.end = max((op.index for op in last if op.primitive in _ENDS), default=-1)
        self.first = last[0].index if last else 0
        self.walked = last
        self.beside = written_beside(graph, last, stored)
        self.of_op: dict[int, Node] = {}
        self.others: list[Node] = []
        self.places_of: dict[Node, int] = {}
        self.made_of: dict[int, tuple[Node, ...]] = {}
        self.folded: dict[tuple[int, bool, int], Node] = {}
        self.sent: dict[tuple[int, bytes, tuple[int, ...] | None], Node] = {}
        self.gathers: dict[tuple[object, ...], tuple[Node, Node, float]] = {}
        self.taken: dict[tuple[int, bytes], Node] = {}
        self.sums: list[tuple[Node, Sequence[int]]] = []
        self.entries: dict[tuple[int, ...], int] = {}
        self.barriers: dict[tuple[int, ...], Node] = {}
        self.entered = self._entered()
        self._sum()
        for op in last:
            self._read(op)
        for start, makers in self.sums:
            start.reads = _distinct(node for value in makers for node in self.made_of.get(value, ()))

    def _entered(self) -> dict[tuple[int, ...], dict[int, None]]:
        """What each block reads from outside."""
        entered: dict[tuple[int, ...], dict[int, None]] = {}
        for op in self.walked:
            if frame := self.behind[op.index]:
                first = self.entries.setdefault(frame, op.index)
                within = entered.setdefault(frame, {})
                within.update((v, None) for v in op.operands if self.producers[v] < first)
        return entered

    def _barrier(self, op: Op) -> Node | None:
        """The one that an operation stands behind."""
        frame = self.behind[op.index]
        if not frame:
            return None
        if frame not in self.barriers:
            node = Node(op.index - 0.5, is_view=True)
            node.reads = _distinct(n for v in self.entered[frame] for n in self.made_of.get(v, ()))
            self.barriers[frame] = node
            self.others.append(node)
        return self.barriers[frame]

    def _read(self, op: Op) -> None:
        barrier = self._barrier(op)
        stands = any(self.stored[v] for v in op.results) or op.primitive in PRODUCTS
        parts: list[Node] = []
        for place, value in enumerate(op.operands):
            outside = barrier is not None and self.producers[value] < self.entries[self.behind[op.index]]
            sources = [barrier] if barrier is not None and outside else list(self.made_of.get(value, ()))
            steps = self._steps(op, place)
            if steps and (summed := self.taken.get((value, self.reads[op.index, place].tobytes()))) is not None:
                sources = [summed]
            elif steps and sources:
                key = value, self.reads[op.index, place].tobytes(), self.behind[op.index] if outside else None
                if key not in self.sent:
                    self.sent[key] = self._collective(steps, sources, op.index)
                sources = [self.sent[key]]
            if op.primitive == "dot_general" and len(sources) == 1 and is_folded(self.graph, op, place):
                sources = [self._fold(value, _is_turned(op, place), sources[0])]
            parts += sources
        if not stands:
            self.made_of.update(dict.fromkeys(op.results, tuple(_distinct(parts))))
            return
        node = self.of_op[op.index] = Node(float(op.index), op.index, self._lasts(op), _distinct(parts))
        if op.primitive == POOLING:
            self._find_places(op, node)
        for value in op.results:
            self.made_of[value] = (node,)
            if self._is_part(op, value):
                part = Node(op.index + 0.1, reads=[node], is_view=True)
                self.others.append(part)
                self.made_of[value] = (part,)

    def _find_places(self, op: Op, node: Node) -> None:
        """A max-pooling's, before its gradient goes there."""
        places = Node(op.index - 0.15, seconds=node.seconds / 2, reads=_distinct(self.made_of.get(op.operands[1], ())))
        node.seconds, node.reads = node.seconds / 2, _distinct([*node.reads, places])
        self.others.append(places)
        self.places_of[places] = op.index

    def _is_part(self, op: Op, value: int) -> bool:
        """Whether a value is one of several results: a convolution's comes with what cuDNN works in."""
        return value in self.beside or op.primitive == "conv_general_dilated"

    def _steps(self, op: Op, place: int) -> tuple[Step, ...]:
        value = op.operands[place]
        made, row = self.values.get(value), self.reads.get((op.index, place))
        if made is None or row is None:
            return ()
        return tuple(reshard_steps(made, row, self.graph.values[value].bytes, self.axes))

    def _leads(self, op: Op) -> bool:
        """Whether a product wants what `op` makes, or it is one."""
        return op.primitive in PRODUCTS or not self.needed.isdisjoint(op.results)

    def _fold(self, value: int, turned: bool, source: Node) -> Node:
        key = value, turned, id(source)
        if key not in self.folded:
            self.folded[key] = Node(source.place + 0.2, reads=[source], is_view=True)
            self.others.append(self.folded[key])
        return self.folded[key]

    def _lasts(self, op: Op) -> float:
        if op.primitive not in PRODUCTS:
            return self.seconds.get(op.index, 0.0)
        return product_time(self.graph, op, self.producers, self.axes, self.reads, self.times)

    def _collective(self, steps: Sequence[Step], sources: Sequence[Node], place: int) -> Node:
        """The end of one; gathers over the same axes that are ready at the same time are combined."""
        if len(steps) != 1 or steps[0].kind != "all_gather":
            return self._pair(sum(map(self._sent_s, steps)), sources, place)[1]
        key = tuple(map(id, sources)), steps[0].axes
        size = steps[0].bytes
        if key in self.gathers and self.gathers[key][2] + size <= most_combined_bytes("all_gather", "gpu"):
            start, end, so_far = self.gathers[key]
            start.latency_s = self._sent_s(steps[0], so_far)
        else:
            start, end = self._pair(self._sent_s(steps[0]), sources, place)
            so_far = 0.0
        self.gathers[key] = start, end, so_far + size
        return end

    def _pair(self, seconds: float, sources: Sequence[Node], place: float) -> tuple[Node, Node]:
        """The start and the end of a collective."""
        start = Node(place - 0.3, reads=_distinct(sources), latency_s=seconds)
        end = Node(place - 0.2, reads=[start], start=start)
        self.others += start, end
        return start, end

    def _sent_s(self, step: Step, others: float = 0.0) -> float:
        """Seconds of a collective, together with `others` bytes."""
        sizes = dict(self.axes)
        devices = math.prod(sizes[name] for name in step.axes)
        return self.times.collective_s(step.kind, devices, step.bytes + others)

    def _sum(self) -> None:
        """The sums of what the end wants, as they are combined."""
        found: dict[tuple[int, bytes], tuple[Step, ...]] = {}
        for op in self.walked:
            for place, value in enumerate(op.operands):
                made = self.values.get(value)
                if made is None or UNREDUCED not in made.tolist() or self.producers[value] < self.first:
                    continue
                if not self._leads(op) and (steps := self._steps(op, place)):
                    found.setdefault((value, self.reads[op.index, place].tobytes()), steps)
        alike: dict[tuple[object, ...], list[tuple[int, bytes]]] = {}
        places = post_order(self.graph)
        for key, steps in found.items():
            alike.setdefault(tuple((step.kind, step.axes) for step in steps), []).append(key)
        for members in alike.values():
            together: list[tuple[int, bytes]] = []
            so_far = 0.0
            for key in sorted(members, key=lambda key: places[self.producers[key[0]]]):
                first = found[key][0]
                size = result_bytes(first, self.axes) if first.kind == "reduce_scatter" else first.bytes
                if together and so_far + size > most_combined_bytes(first.kind, "gpu"):
                    self._summed(together, found)
                    together, so_far = [], 0.0
                together.append(key)
                so_far += size
            self._summed(together, found)

    def _summed(self, keys: Sequence[tuple[int, bytes]], found: Mapping[tuple[int, bytes], tuple[Step, ...]]) -> None:
        every = zip(*(found[key] for key in keys), strict=True)
        seconds = sum(self._sent_s(alike[0], sum(step.bytes for step in alike[1:])) for alike in every)
        start, end = self._pair(seconds, (), max(self.producers[value] for value, _ in keys) + 0.7)
        self.taken.update(dict.fromkeys(keys, end))
        self.sums.append((start, [value for value, _ in keys]))

    def nodes(self) -> list[Node]:
        """All of them, each behind what it reads."""
        order: list[Node] = []
        met, above = set[Node](), set[Node]()
        for last in sorted([*self.of_op.values(), *self.others], key=lambda node: node.place):
            walk = [] if last in met else [_entered(last, met, above)]
            while walk:
                node, waits = walk[-1]
                before = next(waits, None)
                if before is None:
                    walk.pop()
                    if node in above:
                        above.discard(node)
                        order.append(node)
                elif before in above:  # sums that are combined and that one of them waits for are not
                    node.reads.remove(before)
                elif before not in met:
                    walk.append(_entered(before, met, above))
        return order

    def found(self, order: Sequence[Node], put_off: Collection[int]) -> Ending:
        """When they run, where `order` goes from the first to the last; `put_off`: what runs when it is wanted."""
        products = (op.index for op in self.walked if op.primitive in PRODUCTS and op.index in self.chained)
        leading = {*products} - {*put_off}
        ops = [op for op in self.walked if op.index <= self.end]
        # what only the end wants, and no other kernel makes beside its own
        last = {op.index for op in ops if op.index in self.of_op and not self.late.isdisjoint(op.results)}
        run = RunOrder(self.graph, ops, leading, last.union(put_off))
        ran: dict[Node, int] = {}
        for node in order:
            ran[node] = len(run.order)
            if node.op in leading or node.op in last:
                run.put([node.op])
        run.put(op.index for op in ops)
        slots = sorted(run.order)
        when = dict(zip(run.order, slots, strict=True))
        times: dict[int, int] = {}
        late: dict[int, int] = {}
        for op in self.walked:
            made = max((times.get(self.producers[v], 0) for v in op.operands), default=0)
            at = max(made, when.get(op.index, op.index))
            if op.index in last and _is_written(op, self.stored):
                late.update({op.index: at} if at > made + 1 else {})
                at = made
            times[op.index] = at

        def put_at(node: Node) -> int:
            return slots[ran[node] - 1] + 1 if ran[node] else self.first

        until: dict[int, int] = {}
        for start, values in self.sums:
            makers = (self.producers[value] for value in values if self.producers[value] in self.of_op)
            until |= {maker: max(put_at(start), times[maker]) for maker in makers}
        return Ending(times, late, until, {op: put_at(node) for node, op in self.places_of.items()})

    def _chained(self, last: Sequence[Op], wanted: Iterable[int]) -> set[int]:
        """Operations that the backward pass goes on with."""
        needed, found = set(wanted), set[int]()
        for op in reversed(last):
            goes_on = op.primitive in PRODUCTS and self.held.isdisjoint(op.results)
            if goes_on or not needed.isdisjoint(op.results):
                needed.update(op.operands)
                found.add(op.index)
        return found


def _is_written(op: Op, stored: Sequence[bool]) -> bool:
    """Whether a late sum's operand is no buffer: the kernel that has what it is made of writes it for the sum."""
    return op.primitive == "reduce_sum" and not stored[op.operands[0]]


def _late_sums(graph: Graph, last: Sequence[Op], needed: set[int]) -> set[int]:
    """Sums that only the end wants, a bias' or a scale's gradients, and that no other kernel makes beside its own.

    One kernel makes several sums of an array, but none along rows beside others: a block's normalisations over the last
    dimension leave those of their scales alone, batch and group normalisations do not.  A sum along rows goes beside
    what is made of them, as a loss's over the words, which picks the labels' logits, beside the logits' gradient: of
    GPTs of 12 blocks of 4096 that are computed again, 4, 8 and 12 sequences of 2048 on each of eight H100 (`fsdp`, jax
    0.10.2, 2026-11-30), one kernel makes both; taken to wait, they had 13, 21 and 13 % too much, now 5, 11 and 12.
    """
    behind = graph.behind()
    beside, sums = set[tuple[int, ...]](), list[Op]()
    for op in last:
        if op.primitive.startswith("reduce_") and "axes" in op.params:
            along_rows = tuple(op.params["axes"]) == (len(graph.values[op.operands[0]].shape) - 1,)
            if not needed.isdisjoint(op.results):
                if not along_rows:
                    beside.add(behind[op.index])
            elif op.primitive == "reduce_sum" and graph.values[op.results[0]].shape and not along_rows:
                sums.append(op)
    return {op.results[0] for op in sums if behind[op.index] not in beside}


def _entered(node: Node, met: set[Node], above: set[Node]) -> tuple[Node, Iterator[Node]]:
    met.add(node)
    above.add(node)
    return node, iter(list(node.reads))


def _distinct(nodes: Iterable[Node]) -> list[Node]:
    return list(dict.fromkeys(nodes))


def _is_turned(op: Op, place: int) -> bool:
    """Whether a product reads an operand turned round: XLA sums the first one's last dimension, the other's first."""
    summed = op.params["dimension_numbers"][0][place]
    return (0 in summed) == (place == 0)
