"""The layouts that the partitioner gives a step: of every value of the Graph where it is made, and as it is read.

Any shardings will do, a plan's or some written by hand: this is what is really done with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..ir import Graph, Op
from ..sharding import (
    NONE,
    UNREDUCED,
    Flow,
    Layout,
    MeshAxes,
    Partitioned,
    Rule,
    Strategies,
    Tensor,
    places_of_layout,
)
from .check import operation_of

Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Realised:
    """Layouts as rows of place arrays over `axes`.

    Attributes:
      axes: the mesh; an axis of which parts cut different dimensions is given as its parts.
      values: of every value where it is made; reads: of every (operation, operand position); outputs: of every
        result leaf, by position.
      strategies: of every operation the one strategy that it runs with.
    """

    axes: MeshAxes
    values: Mapping[int, np.ndarray]
    reads: Mapping[tuple[int, int], np.ndarray]
    outputs: Mapping[int, np.ndarray]
    strategies: Mapping[int, Strategies]


def realised(
    graph: Graph,
    rules: Sequence[Rule],
    axes: MeshAxes,
    inputs: Sequence[Layout],
    found: Partitioned,
) -> Realised:
    """Read the layouts of `graph` from `found`, the partitioned program of `lower_flat` (with its flows).

    Args:
      inputs: the layout of every argument leaf.
    """
    return _Reader(graph, rules, axes, inputs, found).read()


class _Reader:
    def __init__(
        self, graph: Graph, rules: Sequence[Rule], axes: MeshAxes, inputs: Sequence[Layout], found: Partitioned
    ) -> None:  # fmt: skip
        self.graph, self.rules = graph, rules
        written = [dims for flow in found.flows for t in (*flow.operands, *flow.results) for dims in (t.layout, t.made)]
        self.axes = _refined(axes, written)
        self.found, self.inputs = found, inputs
        self.groups: dict[int, list[Flow]] = {}
        for flow in found.flows:
            op = operation_of(flow.scope)
            if op >= 0:
                self.groups.setdefault(op, []).append(flow)
        self.number: dict[int, int] = {}
        self.values: dict[int, np.ndarray] = {}
        self.reads: dict[tuple[int, int], np.ndarray] = {}

    def read(self) -> Realised:
        for value, layout in zip(self.graph.inputs, self.inputs, strict=True):
            self.values[value] = self._row(layout.dims)
        for op in self.graph.ops:
            self._operation(op)
        self._edges()
        outputs = {
            position: self._row(dims)
            for position, dims in enumerate(self.found.output_layouts)
            if position < len(self.graph.outputs)
        }
        for op in self.graph.ops:
            for position, value in enumerate(op.operands):
                if value in self.values:
                    self.reads.setdefault((op.index, position), _whole(self.values[value]))
        strategies = {op.index: self._strategy(op) for op in self.graph.ops}
        return Realised(
            axes=self.axes, values=self.values, reads=self.reads, outputs=outputs, strategies=strategies
        )

    def _row(self, dims: Dims, pending: Sequence[str] = ()) -> np.ndarray:
        """The row of a layout over the refined axes."""
        known = {name for name, _ in self.axes}

        def parts(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(
                part for name in names for part in ([name] if name in known else self._parts_of(name))
            )

        return places_of_layout(
            Layout(dims=tuple(map(parts, dims)), unreduced=parts(pending)), self.axes
        )

    def _parts_of(self, name: str) -> list[str]:
        """The refined axes that make up a mesh axis, or a part of one that is itself cut."""
        whole, _, part = name.partition(":")
        first, size = _span(part) if part else (1, None)
        return [
            axis
            for axis, _ in self.axes
            if axis.partition(":")[0] == whole
            and (size is None or first <= _span(axis.partition(":")[2])[0] < first * size)
        ]

    def _operation(self, op: Op) -> None:
        flows = self.groups.get(op.index, ())
        inside = {t.number for flow in flows for t in flow.results}
        read = [t for flow in flows for t in flow.operands if t.number not in inside]
        made = [t for flow in flows for t in flow.results]
        taken: set[int] = set()
        for position, value in enumerate(op.operands):
            tensor = self._matching(read, value, taken)
            if tensor is None:
                continue
            taken.add(id(tensor))
            self.number.setdefault(value, tensor.number)
            self.reads[op.index, position] = self._row(tensor.layout)
            if value not in self.values:
                self.values[value] = self._row(tensor.made, tensor.pending)
        taken = set()
        for value in op.results:
            shape = self.graph.values[value].shape
            for tensor in reversed(made):
                if tensor.shape == shape and id(tensor) not in taken:
                    taken.add(id(tensor))
                    self.number[value] = tensor.number
                    self.values[value] = self._row(tensor.made, tensor.pending)
                    break
            else:
                self._in_parts(op, value, read, made)

    def _in_parts(self, op: Op, value: int, read: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """The sum `value` of an operation, where it is held in parts, and what is added up in it that way."""
        shape = self.graph.values[value].shape
        rows = [row for t in made if (row := self._row_in_parts(t, t.made, shape)) is not None]
        if rows:
            self.values[value] = rows[-1]
            taken = iter([row for t in read if (row := self._row_in_parts(t, t.layout, shape)) is not None])
            for position, operand in enumerate(op.operands):
                if (op.index, position) not in self.reads and self.graph.values[operand].shape == shape:
                    self.reads[op.index, position] = next(taken, rows[-1])

    def _row_in_parts(self, tensor: Tensor, dims: Dims, shape: tuple[int, ...]) -> np.ndarray | None:
        """The row of a sum of `shape` whose parts `tensor` holds, cut over an axis each; None where it holds none."""
        more = len(tensor.shape) - len(shape)
        parts = [((name,), size) for name, size in self.axes]
        held = list(zip(dims[: max(more, 0)], tensor.shape, strict=False))
        if more < 1 or tensor.shape[more:] != shape or any(part not in parts for part in held):
            return None
        return self._row(dims[more:], (*tensor.pending, *(name for (name,), _ in held)))

    def _matching(self, read: Sequence[Tensor], value: int, taken: set[int]) -> Tensor | None:
        """What a group of flows reads for `value`: the value itself where it is known, else the first of its shape."""
        shape = self.graph.values[value].shape
        free = [t for t in read if t.shape == shape and id(t) not in taken]
        known = [t for t in free if t.number == self.number.get(value)]
        return next(iter(known or free), None)

    def _edges(self) -> None:
        """What loops and branches pass on: our own operations, which the program doesn't name."""
        for op in self.graph.ops:
            # what an iteration makes may be gathered for the stack, whose slices come as it lies
            if op.primitive == "scan_slice":
                self._tie(op.operands[0], op.results[0], 1)
        for _ in range(2):  # a carry's layout may be known only from its next value
            for op in self.graph.ops:
                if op.primitive == "scan_slice":
                    self._tie(op.operands[0], op.results[0], 1)
                elif op.primitive == "scan_stack":
                    self._tie(op.results[0], op.operands[0], 1)
                elif op.primitive == "carry_init":
                    self._tie(op.operands[0], op.results[0], 0)
                elif op.primitive == "carry_next":
                    self._tie(op.operands[0], op.operands[1], 0)
                elif op.primitive == "cond_join":
                    for branch in op.operands[1:]:
                        self._tie(branch, op.results[0], 0)
        for op in self.graph.ops:
            if op.primitive == "scan_slice" and op.results[0] in self.values:
                # of a stack that is gathered before its loop, the slices come gathered
                row = _whole(self.values[op.results[0]])
                self.reads[op.index, 0] = np.where(row >= 0, row + 1, NONE).astype(np.int8)
            elif op.primitive in ("carry_init", "cond_join") and op.results[0] in self.values:
                row = _whole(self.values[op.results[0]])
                for position, value in enumerate(op.operands):
                    if self.graph.values[value].shape == self.graph.values[op.results[0]].shape:
                        self.reads[op.index, position] = row
            elif op.primitive == "carry_next" and op.operands[1] in self.values:
                self.reads[op.index, 0] = self.reads[op.index, 1] = _whole(self.values[op.operands[1]])
        for op in self.graph.ops:
            # the rest, such as constraints that the user wrote: made as their operands are read
            for value in op.results:
                shape = self.graph.values[value].shape
                source = next((v for v in op.operands if self.graph.values[v].shape == shape), -1)
                if value not in self.values and source in self.values:
                    self.values[value] = _whole(self.values[source])

    def _tie(self, outer: int, inner: int, shift: int) -> None:
        """A layout known on one side is the other's too; `outer` has `shift` more leading dimensions."""
        if outer in self.values and inner not in self.values:
            row = _whole(self.values[outer])
            self.values[inner] = np.where(row >= shift, row - shift, NONE).astype(np.int8)
        elif inner in self.values and outer not in self.values:
            row = _whole(self.values[inner])
            self.values[outer] = np.where(row >= 0, row + shift, NONE).astype(np.int8)

    def _strategy(self, op: Op) -> Strategies:
        rule = self.rules[op.index]
        replicated = np.full(len(self.axes), NONE, np.int8)
        operands = [self.reads.get((op.index, p), replicated) for p in range(len(op.operands))]
        results = [self.values.get(v, replicated) for v in op.results]
        factors = np.full(len(self.axes), NONE, np.int16)
        share = 1.0
        cut: dict[int, int] = {}
        sides = [*zip(results, rule.results, strict=True), *zip(operands, rule.operands, strict=True)]
        for axis, (_, size) in enumerate(self.axes):
            for row, dims in sides:
                place = int(row[axis])
                named = dims[place] if 0 <= place < len(dims) else ()
                factor = next((f for f in named if rule.sizes[f] % (cut.get(f, 1) * size) == 0), None)
                if factor is not None:
                    factors[axis] = factor
                    cut[factor] = cut.get(factor, 1) * size
                    share /= size
                    break
        return Strategies(
            factors=factors[None, :],
            operands=tuple(row[None, :] for row in operands),
            results=tuple(row[None, :] for row in results),
            shares=np.array([share]),
        )


def _whole(row: np.ndarray) -> np.ndarray:
    return np.where(row == UNREDUCED, NONE, row).astype(np.int8)


def _span(part: str) -> tuple[int, int]:
    """`_span("(2)4") == (2, 4)`: the size of what is more major in the axis, and its own."""
    before, _, size = part[1:].partition(")")
    return int(before), int(size)


def _refined(axes: MeshAxes, layouts: Iterable[Dims]) -> MeshAxes:
    """`axes`, those of which parts occur in `layouts` split where any part begins or ends."""
    cuts: dict[str, set[int]] = {}
    for name in {name for dims in layouts for dim in dims for name in dim if ":" in name}:
        whole, _, part = name.partition(":")
        first, size = _span(part)
        cuts.setdefault(whole, set()).update((first, first * size))
    refined: list[tuple[str, int]] = []
    for name, extent in axes:
        inner = sorted(c for c in cuts.get(name, ()) if 1 < c < extent)
        if not inner:
            refined.append((name, extent))
            continue
        for start, stop in zip((1, *inner), (*inner, extent), strict=True):
            refined.append((f"{name}:({start}){stop // start}", stop // start))
    return tuple(refined)
