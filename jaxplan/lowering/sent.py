"""Seconds of the collectives that the partitioner inserts, those that XLA will start together priced as such."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..cost import CostModel, Traffic, excess_bytes, excess_seconds, kernels_beside, sums_whole
from ..ir import Graph, Starts, total_groups
from ..sharding import UNREDUCED, Collective, MeshAxes
from .shared_starts import shared_starts


class Sending(NamedTuple):
    """Seconds of all runs of a collective, hidden or not: of sending, and of the kernels that pack and unpack.

    Attributes:
      lone_s: of both, what the search doesn't know, which takes each to have its share of a start that all values that
        nothing orders have together: how many there are is known once all is decided.
    """

    sent_s: float = 0.0
    packing_s: float = 0.0
    lone_s: float = 0.0

    @property
    def seconds_s(self) -> float:
        """Of both."""
        return self.sent_s + self.packing_s


def collective_prices(
    graph: Graph,
    shares: Starts,
    model: CostModel,
    crossing: Traffic,
    collectives: Sequence[tuple[Collective, int]],
    waited: Mapping[int, tuple[int, float]],
) -> tuple[Sending, ...]:
    """What each collective takes; nothing for those that move nothing.

    Args:
      shares: of every value, see `ir.start_shares`; waited: of the graph's, see `waited_values`.
      collectives: with the operation that needs each, -1 where it is not known.
    """

    # Parts of a total: XLA combines their sums on every platform (on CPU, five of them: one all_reduce of a tuple).
    groups, bodies = total_groups(graph), graph.loops_around()
    free = _of_constants(graph)  # the zeros that something is scattered into are not sent
    finished = _finished(graph, waited)

    def group(item: Collective, op: int) -> Hashable:
        """Numbers that may be summed in one: of one loop's body, none waiting for another."""
        around = (*graph.ops[op].results, *graph.ops[op].operands) if op >= 0 else ()
        one = next((groups[v] for v in around if v in groups), tuple(bodies[op]) if op >= 0 else ())
        return "number", one

    # what no operation is known to need is on its way to where the step's results lie: nothing orders it
    ends = Counter((item.kind, item.axes) for item, op in collectives if op < 0)

    def moved(item: Collective, op: int) -> list[int]:
        around = (*graph.ops[op].operands, *graph.ops[op].results) if op >= 0 else ()
        return [v for v in around if graph.values[v].shape == item.shape]

    def value(item: Collective, op: int) -> int:
        """What is sent, of several what shares most; -1: not known."""
        return min((v for v in moved(item, op) if not free[v]), key=shares.of(item.kind).__getitem__, default=-1)

    def together(item: Collective, op: int) -> Hashable:
        if not item.shape:
            return group(item, op)
        sent = value(item, op)
        if sent < 0:
            return "end" if op < 0 else None
        alike = shares.group(item.kind, sent)
        return alike and (alike, finished.get(sent))

    def believed(item: Collective, op: int) -> float:
        """The share of its start that the search takes it to have."""
        sent = value(item, op)
        return shares.of(item.kind)[sent] if sent >= 0 else 1.0 if op >= 0 else 1 / ends[item.kind, item.axes]

    def of_one_kernel(item: Collective, op: int) -> bool:
        sent = moved(item, op)
        return bool(sent) and crossing.parted.issuperset(sent)

    def sending(item: Collective, op: int, own: float, number: float) -> Sending:
        beside = kernels_beside(item, of_one_kernel(item, op))

        def packing(share: float) -> float:
            return float(model.packing_seconds(item.kind, item.bytes, item.axes, start_share=share, beside=beside))

        alone_s = model.collective_over(item.kind, item.bytes, item.axes)
        start_s = model.collective_over(item.kind, 0.0, item.axes)
        sent_s = alone_s - (1 - own) * start_s
        if item.shape:
            share = believed(item, op)
            searched_s = model.collective_over(item.kind, item.bytes, item.axes, start_share=share)
            lone_s = sent_s - searched_s + packing(own) - packing(share)
        else:
            lone_s = (own - number) * start_s
        if item.excess:
            sent_s += float(excess_seconds(model, item.excess, item.axes))
        return Sending(sent_s * item.trips, packing(own) * item.trips, lone_s * item.trips)

    items = [(item, together(item, op)) for item, op in collectives]
    starts = shared_starts(model, items)
    numbers = shared_starts(model, [(replace(item, order=()), group) for item, group in items])  # to the search
    return tuple(
        Sending() if item.kind == "all_slice" else sending(item, op, own, number)
        for (item, op), own, number in zip(collectives, starts, numbers, strict=True)
    )


def _finished(graph: Graph, waited: Mapping[int, tuple[int, float]]) -> dict[int, int]:
    """Of what is finished before a loop, and of all that it is made of, until which operation it waits there: a barrier
    lets nothing behind it start with what is in front of it."""
    found = {value: stop for value, (stop, _) in waited.items()}
    for op in reversed(graph.ops):
        stops = [found[v] for v in op.results if v in found]
        for value in op.operands if stops else ():
            found[value] = min(*stops, found.get(value, stops[0]))
    return found


def _of_constants(graph: Graph) -> list[bool]:
    """For every value whether it depends on no argument; a loop's carry does, whatever it starts from."""
    found = [value.constant for value in graph.values]
    for op in graph.ops:
        for value in op.results:
            found[value] = op.primitive != "carry_init" and all(found[v] for v in op.operands)
    return found


def written_seconds(graph: Graph, collectives: Sequence[tuple[Collective, int]], sent: Sequence[Sending]) -> float:
    """Of what is sent, what the step's own `shard_map`s send: the same in every plan."""
    own = (op >= 0 and item.written and graph.ops[op].primitive == "shard_map" for item, op in collectives)
    return sum(one.seconds_s for one, of_step in zip(sent, own, strict=True) if of_step)


def as_sent(
    graph: Graph,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    collectives: Sequence[tuple[Collective, int]],
    axes: MeshAxes,
    model: CostModel,
) -> tuple[tuple[Collective, int], ...]:
    """The partitioner's collectives, which knows a program's own types alone, as XLA sends them: in which types, and
    which of the sums that it scatters are made whole or in rounded pieces (see `cost.scattered_sums`).

    Args:
      graph: as `cost.narrowed` has it; values, reads: see `check`, over `axes`.

    What no operand or result of its operation has the shape of is on its way into a loop: a stack.
    """
    uses, producers = graph.uses(), graph.producers()
    f32 = [tensor.narrowed or tensor.dtype == "float32" for tensor in graph.values]  # to the program

    def scattered(item: Collective, op: int) -> Collective:
        made = [v for v in graph.ops[op].results if graph.values[v].shape == item.shape]
        wanted = [reads[use] for v in made for use in uses[v] if use in reads and not (reads[use] == UNREDUCED).any()]
        if not wanted:
            return item
        tensor, row = graph.values[made[0]], wanted[0]
        if sums_whole(model, tensor, row, axes, item.axes):
            return replace(item, kind="all_reduce")
        return replace(item, excess=excess_bytes(model, tensor, row, axes, item.axes))

    @functools.cache
    def stacks() -> dict[tuple[int, ...], set[bool]]:
        """Whether what goes into loops in f32, to the program, is narrow, by shape."""
        found: dict[tuple[int, ...], set[bool]] = {}
        for op in graph.ops:
            if op.primitive in ("scan_slice", "carry_init"):
                for position, value in enumerate(op.operands):
                    if f32[value]:
                        narrow = graph.taken(value, [(op.index, position)]).narrowed
                        found.setdefault(graph.values[value].shape, set()).add(narrow)
        return found

    def sliced(op: int, item: Collective) -> list[bool]:
        """Whether the stacks that an operation's operands are slices of go into their loop narrow."""
        makers = [graph.ops[producers[v]] for v in graph.ops[op].operands if producers[v] >= 0]
        slices = [one for one in makers if one.primitive == "scan_slice" and f32[one.operands[0]]]
        return [
            graph.taken(one.operands[0], [(one.index, 0)]).narrowed
            for one in slices if graph.values[one.operands[0]].shape == item.shape
        ]  # fmt: skip

    def narrow(value: int, row: np.ndarray) -> bool:
        """Whether all that read a value in one layout take it so."""
        alike = [use for use in uses[value] if use in reads and np.array_equal(reads[use], row)]
        return graph.taken(value, alike).narrowed

    def narrowed_like(made_or_read: Sequence[int], item: Collective) -> list[bool]:
        """Of those of its shape, in f32 to the program, whether each is narrow."""
        tensors = (graph.values[v] for v in made_or_read if f32[v])
        return [tensor.narrowed for tensor in tensors if tensor.shape == item.shape]

    def halved(item: Collective, op: int) -> bool:
        if item.written or item.dtype != "float32" or item.kind in ("all_reduce", "reduce_scatter") or op < 0:
            return False
        moved = [
            narrow(value, reads[op, position])
            for position, value in enumerate(graph.ops[op].operands)
            if f32[value] and graph.values[value].shape == item.shape and (op, position) in reads and value in values
            # read as it is made, or as its sum is, it isn't sent
            and ((reads[op, position] != values[value]) & (values[value] != UNREDUCED)).any()
        ]  # fmt: skip
        made = narrowed_like(graph.ops[op].results, item)
        # read as it lies: it was sent where it was made, as by a barrier
        lying = narrowed_like(graph.ops[op].operands, item)
        return all(moved or made or lying or sliced(op, item) or stacks().get(item.shape) or [False])

    def sent(item: Collective, op: int) -> Collective:
        if item.kind == "reduce_scatter" and op >= 0 and not item.written:
            return scattered(item, op)
        return replace(item, bytes=item.bytes // 2, dtype="bfloat16") if halved(item, op) else item

    return tuple((sent(item, op), op) for item, op in collectives)
