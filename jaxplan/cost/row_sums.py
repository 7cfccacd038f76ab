"""Sums whose operands XLA for GPU writes the other way round, so that they go along rows.

A collective wants the dimension that it gathers outermost.  That order is handed back from what it gathers to the sum
that made it, and there XLA adds the dimensions that are summed as the innermost ones, where a kernel of rows is faster
than one of elements (`ChooseOperandLayoutFromOutputLayout`, xla/service/layout_assignment.cc;
`PropagateReductionLayoutToOperand`, xla/service/gpu/transforms/layout_assignment.cc).  A pooled f32[256, 2048, 1024] ->
f32[256, 1024] whose result is gathered is read as [256, 1024, 2048].  What is scaled along a dimension, as by a batch
normalisation, is written so in a buffer of its own, beside the product that it is made of; a function of each number,
or a bias, is read through.  A relu's mask is then made of that buffer where the backward pass wants it, and with it the
gradient in that order, for the sums of the scale's (PointNet, and products with normalisations, biases, relus and
means or maxima behind them, compiled for H100, jax 0.10.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..ir import Graph
from ..sharding import NONE, UNREDUCED, MeshAxes
from .masks import COMPARISONS
from .residency import Flow, unmoved
from .tiles import local_bytes, local_sizes

_WARP = 32
"""Threads that sum a row, and the least elements of one for a kernel of rows (`IsUnnestedReductionFasterThanElemental`;
16 elements, which it allows, were not seen to be summed so)."""


class RowSum(NamedTuple):
    """A reduction that leaves dimensions inside of some that it sums.

    Attributes:
      op: the reduction; made: what it is elementwise made of and is written for it.
      kept, summed: the dimensions of its operand.
      results: what it makes, and what is elementwise made of that, which a collective may gather.
      masks: what is compared that is elementwise made of `made`, if one needs nothing of the sum.
    """

    op: int
    made: int
    kept: tuple[int, ...]
    summed: tuple[int, ...]
    results: frozenset[int]
    masks: tuple[int, ...]


def row_sums(flow: Flow, stored: Sequence[bool]) -> tuple[RowSum, ...]:
    """The reductions of a program that may be made along rows of a buffer that is written for them."""
    graph, found = flow.graph, []
    for op in graph.ops:
        if flow.kinds[op.index] != "reduction" or "axes" not in op.params or flow.loop_of[op.index] >= 0:
            continue
        shape = graph.values[op.operands[0]].shape
        summed = tuple(sorted(op.params["axes"]))
        kept = tuple(d for d in range(len(shape)) if d not in summed)
        made = _scaled(flow, op.operands[0], stored)
        if len(kept) > 1 and summed and made is not None and max(kept) > min(summed):
            masks = [v for v in _elementwise(flow, made) if graph.ops[flow.producers[v]].primitive in COMPARISONS]
            results = frozenset({op.results[0], *_elementwise(flow, op.results[0])})
            alone = [v for v in masks if results.isdisjoint(_unmoved_operands(flow, v))]
            found.append(RowSum(op.index, made, kept, summed, results, tuple(masks if alone else ())))
    return tuple(found)


def _scaled(flow: Flow, value: int, stored: Sequence[bool]) -> int | None:
    """What a kernel writes for a sum over `value`, if that is scaled along a dimension: the least that is made, by
    functions of one number each, of what it is scaled and shifted to."""
    tensors, least, written = flow.graph.values, value, None
    while not stored[value] and (maker := flow.producers[value]) >= 0 and flow.kinds[maker] == "fused":
        count = math.prod(tensors[value].shape)
        read = {v: math.prod(tensors[v].shape) for v in flow.graph.ops[maker].operands if not flow.source[v]}
        if any(1 < size < count for size in read.values()):
            written = least if written is None else written
            if flow.graph.ops[maker].primitive in ("mul", "div"):
                return written
        if list(read.values()).count(count) != 1:
            return None
        value = max(read, key=lambda v: read[v])
        if tensors[value].bytes <= tensors[least].bytes:
            least = value
    return None


def _unmoved_operands(flow: Flow, value: int) -> set[int]:
    operands = flow.graph.ops[flow.producers[value]].operands
    return {unmoved(flow.graph, flow.producers, v) for v in operands}


def _elementwise(flow: Flow, value: int) -> set[int]:
    """What is elementwise made of `value`, and of that."""
    graph, found, left = flow.graph, set[int](), [value]
    while left:
        read = left.pop()
        for reader, _ in graph.uses()[read]:
            op = graph.ops[reader]
            same = bool(op.results) and graph.values[op.results[0]].shape == graph.values[value].shape
            if same and flow.kinds[reader] == "fused" and op.results[0] not in found:
                found.add(op.results[0])
                left.append(op.results[0])
    return found


def written_in_rows(
    graph: Graph,
    axes: MeshAxes,
    sums: Sequence[RowSum],
    times: Sequence[int],
    needed: Sequence[int],
    reads: Mapping[tuple[int, int], np.ndarray],
    values: Mapping[int, np.ndarray],
) -> tuple[list[tuple[int, int, int]], dict[int, int]]:
    """(start, stop, bytes) of what is written for sums along rows; and since when the masks of it are there.

    Args:
      times, needed: when each operation runs, and until when it needs its operands.
      values, reads: the layout row of every value where it is made, and of every operand as it is read.
    """
    buffers: dict[int, tuple[int, int, int]] = {}
    masks: dict[int, int] = {}
    gradients: list[tuple[int, int, int]] = []
    for one in sums:
        row = reads.get((one.op, 0))
        if row is None or not any(_gathered(graph, axes, v, values, reads) for v in one.results):
            continue
        sizes = local_sizes(graph.values[graph.ops[one.op].operands[0]].shape, row[None], axes)[0]
        length = math.prod(sizes[d] for d in one.summed)
        order = [d for d in (*one.kept, *one.summed) if sizes[d] > 1]
        if order == sorted(order) or length < _WARP:
            continue
        wanted = [times[reader] for v in one.masks for reader, _ in graph.uses()[v]]
        masks.update(dict.fromkeys(one.masks, max(wanted, default=0)))
        size = local_bytes(graph.values[one.made], row, axes, "gpu")
        before = buffers.get(one.made, (times[one.op], 0, size))
        stop = max([before[1], needed[one.op], *(time + 1 for time in wanted)])
        buffers[one.made] = min(before[0], times[one.op]), stop, size
        if wanted:
            gradients.append((max(wanted), max(wanted) + 1, size))
    return [*buffers.values(), *gradients], masks


def _gathered(
    graph: Graph,
    axes: MeshAxes,
    value: int,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> bool:
    """Whether a collective gathers `value` for one of its readers, as it is."""
    made = values.get(value)
    if made is None or UNREDUCED in made:
        return False
    wanted = [reads[use] for use in graph.uses()[value] if use in reads]
    return any(n > 1 and a >= 0 and b == NONE for row in wanted for a, b, (_, n) in zip(made, row, axes, strict=True))
