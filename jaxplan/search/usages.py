"""Memory rows of the problem: how long what is decided lies in memory, and how much of it under each strategy.

What `cost.step_memory` counts of a whole assignment at once is here what each node adds by itself.  Where something
depends on several nodes (buffers that are filled together if they lie alike), they are taken to agree: they mostly do.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np

from ..cost import (
    MERGED_BYTES,
    CostModel,
    Traffic,
    copies_apart,
    device_bytes,
    filled_since,
    kept_products,
    kept_until,
    place_bytes,
    shared_until,
    sorting_bytes,
    turned_copies,
    written_bytes,
)
from ..ir import Graph, Interval, Value, written_over
from ..sharding import UNREDUCED, Strategies
from .problem import Usage
from .space import Port


def _given_up(crossing: Traffic) -> dict[int, int]:
    """When values give their buffers to what is made of them, see `Traffic.over`."""
    _, intervals = crossing.lives
    found: dict[int, int] = {}
    for value, candidates in crossing.over.items():
        start = intervals[value].start
        last = [v for v in candidates if v not in found and intervals[v].start < start == intervals[v].stop - 1]
        found.update(dict.fromkeys(last[:1], start))
    return found


class Usages:
    """Collects the usages of one problem; equal arrays are made once and handed to `shared`.

    Attributes:
      usages: what was added; given_up: when values give their buffers to what is made of them, see `Traffic.over`.
    """

    def __init__(
        self, graph: Graph, model: CostModel, crossing: Traffic, shared: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        self.graph, self.model, self.crossing, self._shared = graph, model, crossing, shared
        self.usages: list[Usage] = []
        self.given_up = _given_up(crossing)
        self._turned = [*turned_copies(graph, crossing.turned_results, crossing.stored, crossing.times)]
        self.given_up |= {one.result: one.start + 1 for one in self._turned}
        self._sizes: dict[tuple[Any, ...], np.ndarray | None] = {}

    def add(
        self, port: Port, value: int, start: int, stop: int,
        *, pending: bool = False, held: bool = False, times: float = 1.0, tensor: Value | None = None,
        like: int | None = None,
    ) -> None:  # fmt: skip
        """A value at a port's layouts, in memory from operation `start` until before `stop`.

        Args:
          pending: only the strategies that leave a pending sum take memory; held: the second half of them does;
            times: so many of it; tensor: in another type than the value's own; like: a value in whose place it is where
            both lie in the same tiles.
        """
        if stop <= start:
            return
        tensor, tiling = tensor or self.graph.values[value], self.crossing.tiling(value)
        there = None if like is None else self.crossing.tiling(like)
        kind = tensor.shape, tensor.item_bytes, tensor.narrowed, tensor.host
        key = (id(port.places), kind, pending, held, times, tiling, there)
        if key not in self._sizes:
            size = device_bytes(tensor, port.places, self.model.axes, self.model.profile.kind, tiling)
            size = np.ceil(size * times).astype(np.int64)
            if there is not None:
                own = device_bytes(tensor, port.places, self.model.axes, self.model.profile.kind, there)
                size = np.where(size == own, 0, size)
            if pending:
                size = size * (port.places == UNREDUCED).any(axis=1)
            if held:
                size[: len(size) // 2] = 0
            self._sizes[key] = self._shared(size) if size.any() else None
        self._append(port.node, start, stop, self._sizes[key])

    def add_settled(
        self, port: Port, value: int, argument: int, start: int, stop: int, intervals: Sequence[Interval]
    ) -> int:
        """A donated argument's next value: until when it needs a buffer of its own, while the argument is read; later
        on it takes memory only if it lies in other tiles."""
        early = written_over(intervals, argument, start)
        self.add(port, value, max(early, start), stop, like=argument)
        return early

    def add_stacks(self, values: Mapping[int, Port], held: Container[int]) -> set[int]:
        """Loops' stacks that are there twice; returns those that are resharded, if at all, in place of that."""
        given = {stack: self.graph.ops[stack.sliced].operands[0] for stack in self.crossing.second_stacks}
        found = {value for stack, value in given.items() if stack.sliced >= 0 and value in held}
        for stack, value in given.items():
            if stack.value in values and value not in found:
                self.add(values[stack.value], stack.value, stack.start, stack.stop, times=stack.trips)
        return found

    def add_fills(self, values: Mapping[int, Port]) -> dict[int, int]:
        """The buffers that are read beside those filled with them; since when the latter are there, by value."""
        since, beside = filled_since(self.crossing.fills, lambda value: True if value in values else None)
        for value, start, stop in beside:
            self.add(values[value], value, start, stop)
        return since

    def add_scratch(
        self, reads: Mapping[tuple[int, int], Port], values: Mapping[int, Port], options: Mapping[int, Strategies]
    ) -> None:
        """What operations need beside their operands and results while they run, or keep of them."""
        self._add_merged(values, options)
        for value, start, stop in kept_products(self.crossing.scores, self.crossing.lives.intervals):
            if value in values:
                self.add(values[value], value, start, stop)
        self._add_shared(values, options)
        for index, read, value in copies_apart(self.graph, self.crossing, self.crossing.times, self._turned):
            if read in reads:
                self.add(reads[read], value, index, index + 1)
        for one in self._turned:
            if (port := values.get(one.result)) is not None:
                self.add(port, one.result, one.start, one.stop, tensor=self.graph.values[one.turned])
                self.add(port, one.result, one.until, one.until + 1)
        for op in self.graph.ops:
            port = reads.get((op.index, 0))
            if port is None or port.node not in options:
                continue
            size = place_bytes(self.graph, op, port.places, self.model.axes, self.model.profile)
            if op.primitive in ("sort", "top_k"):
                size = sorting_bytes(self.graph, op, port.places, self.model.axes, self.model.profile.kind)
            if size is None and op.primitive == "dot_general":
                size = self.model.part_bytes(op, options[port.node], self.graph, self.crossing)
            if size is not None and size.any():
                self._append(port.node, op.index, op.index + 1, np.ceil(size).astype(np.int64))

    def _add_merged(self, values: Mapping[int, Port], options: Mapping[int, Strategies]) -> None:
        """What is kept of products that are made as one, see `cost.merged_products`: of those, each by itself, that
        are small enough."""
        for group in self.crossing.merged:
            results = [self.graph.ops[index].results[0] for index in group.products]
            ports = {value: values[value] for value in results if value in values and values[value].node in options}
            if len(ports) < len(results):
                continue
            for value, start, stop in kept_until(self.crossing.lives, zip(results, group.copied, strict=True)):
                port = ports[value]
                op = self.graph.ops[self.crossing.producers[value]]
                sizes = [
                    device_bytes(self.graph.values[v], places, self.model.axes, self.model.profile.kind)
                    for v, places in zip(op.operands, options[port.node].operands, strict=True)
                ]
                own = device_bytes(self.graph.values[value], port.places, self.model.axes, self.model.profile.kind)
                small = sum(sizes) + own <= MERGED_BYTES
                pending = (port.places == UNREDUCED).any(axis=1)
                self._append(port.node, start, stop, np.ceil(own * (small & ~pending)).astype(np.int64))

    def _add_shared(self, values: Mapping[int, Port], options: Mapping[int, Strategies]) -> None:
        """What several products read, see `cost.shared_operands`: where the first of them would have it in memory."""
        for shared in self.crossing.shared:
            first = self.graph.ops[shared.reads[0][0]]
            port = values.get(first.results[0])
            if port is not None and port.node in options:
                sides = [*options[port.node].operands, port.places]
                size = written_bytes(self.graph, self.model.axes, self.model.profile, shared, [sides])
                start, stop = shared_until(shared, self.crossing.times, self.crossing.lives.needed)
                self._append(port.node, start, stop, size if size.any() else None)

    def _append(self, node: int, start: int, stop: int, size: np.ndarray | None) -> None:
        if size is not None:
            self.usages.append(Usage(node=node, start=start, stop=stop, bytes=size))
