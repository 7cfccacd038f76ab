"""Products as XLA's scheduler for GPU has them: what it takes them to last (see `hardware.xla_times`), and which
operands they read through a reshape, an instruction of its own to it; and what other kernels last to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..hardware import CONVOLUTION_S, XlaTimes
from ..ir import Graph, Op
from ..sharding import MeshAxes, pieces
from .crossing import Traffic
from .held_back import PRODUCTS
from .model import CostModel
from .split_k import local_product


def product_times(
    graph: Graph, axes: MeshAxes, reads: Mapping[tuple[int, int], np.ndarray], times: XlaTimes
) -> dict[int, float]:
    """Seconds of one run of every product, by operation; `reads`: the layout row of every operand as it is read."""
    producers = graph.producers()
    ops = (op for op in graph.ops if op.primitive in PRODUCTS)
    return {op.index: product_time(graph, op, producers, axes, reads, times) for op in ops}


def product_time(
    graph: Graph, op: Op, producers: Sequence[int], axes: MeshAxes, reads: Mapping[tuple[int, int], np.ndarray],
    times: XlaTimes,
) -> float:  # fmt: skip
    """Of one."""
    rows = [reads.get((op.index, place)) for place in (0, 1)]
    if op.primitive != "dot_general" or any(row is None for row in rows):
        return CONVOLUTION_S
    lhs, rhs = (row[None] for row in rows if row is not None)
    product = local_product(graph, op, producers, lhs, rhs, axes)
    if product is None:
        return CONVOLUTION_S
    sizes = [float(np.ravel(size)[0]) for size in (product.batch, product.m, product.n, product.k)]
    operands, result = graph.values[op.operands[0]], graph.values[op.results[0]]
    return times.product_s(sizes[0], sizes[1], sizes[2], sizes[3], operands.dtype, result.item_bytes)


def is_folded(graph: Graph, op: Op, place: int) -> bool:
    """Whether a product reads an operand in other dimensions than it has: XLA's have one of a kind."""
    summed, batch = op.params["dimension_numbers"]
    others = len(graph.values[op.operands[place]].shape) - len(summed[place]) - len(batch[place])
    return len(summed[place]) > 1 or len(batch[place]) > 1 or others > 1


def moving_times(
    last: Sequence[Op],
    axes: MeshAxes,
    model: CostModel,
    crossing: Traffic,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> dict[int, float]:
    """Seconds that each operation takes to XLA for what it reads and writes, its kernel's start not among them (the
    `exec_time` of xla/service/gpu/model/gpu_performance_model.cc).

    Args:
      last: the operations, of a step laid out in `axes`.
      model: for the rate of the device's memory; crossing: what each operation moves, whole.
      values, reads: see `latency_hiding.ending_of`.
    """
    found: dict[int, float] = {}
    for op in last:
        read = enumerate(crossing.reads[op.index])
        size = sum(part / _pieces(reads.get((op.index, place)), axes) for place, part in read if part)
        written = zip(op.results, crossing.writes[op.index], strict=False)
        size += sum(part / _pieces(values.get(value), axes) for value, part in written if part)
        found[op.index] = float(model.memory_seconds(np.asarray(size)))
    return found


def _pieces(row: np.ndarray | None, axes: MeshAxes) -> float:
    return 1.0 if row is None else float(pieces(row[None], axes)[0])
