"""Kernels of a TPU's vector unit: their time goes by tiles as well as by bytes.

XLA for TPU expects an elementwise kernel to take some twenty cycles for a tile of 8 x 128 elements, bf16 or f32, and as
long for a tile of one row: a parameter whose last dimensions are (heads, 128), cut to one head a device, is updated six
times as slowly as one cut elsewhere (`experiments/tpu_calibration`, kernels of whole tiles and of single rows).  What a
step gets and returns lies in row-major order where that pads it no more than another order would; for what comes in
between the compiler chooses an order that fills the tiles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ..disjoint import Disjoint
from ..ir import Op
from ..sharding import Rule
from .residency import Flow
from .tables import RowUpdate
from .tiles import Tiling


class VectorKernel(NamedTuple):
    """The kernel that an operation is part of.

    Attributes:
      arrays: how many it reads from memory and writes to it.
      in_rows: whether one of them is an argument or a result of the step, or a loop's slice of one: the kernel then
        goes along in row-major order.
      item_bytes: of an element of the widest of those: the order is that in which this one lies.
      updates: of a table's update, the tensors that are updated together, see `tables`; else 0.
      places: whether the operation makes one of them; fills: whether it makes the zeros that rows are added to.
      tiling: of the table, see `RowUpdate`.
    """

    arrays: int
    in_rows: bool
    item_bytes: float = 4.0
    updates: int = 0
    places: bool = False
    fills: bool = False
    tiling: Tiling = "table"


def vector_kernels(
    flow: Flow,
    reads: Sequence[Sequence[float]],
    writes: Sequence[Sequence[float]],
    kernels: Disjoint,
    tables: Sequence[RowUpdate],
) -> tuple[VectorKernel | None, ...]:
    """By operation; None for what can't be fused and for products with what joins their kernels, but for what then
    reads arguments: a gradient is summed over devices before the optimizer's kernel takes it.

    Args:
      reads, writes: bytes, see `fusion.Traffic`.
      kernels: see `joined`; tables: see `row_updates`.
    """
    graph = flow.graph
    shapes = [tensor.shape for tensor in graph.values]
    outside = {*graph.inputs, *graph.outputs}
    arrays: Counter[int] = Counter()
    along: dict[int, float] = {}
    closed: set[int] = set()
    for op in graph.ops:
        kernel = kernels.find(op.index)
        if flow.kinds[op.index] == "heavy":
            closed.add(kernel)
            continue
        moved = zip((*op.operands, *op.results), (*reads[op.index], *writes[op.index]), strict=True)
        for value, size in moved:
            if size <= 0:
                continue
            arrays[kernel] += 1
            if len(shapes[value]) > 1 and _outermost(flow, value) in outside:
                along[kernel] = max(along.get(kernel, 0.0), graph.values[value].item_bytes)

    filled = {flow.producers[table.gradient] for table in tables}
    filled = {op for op in filled if flow.source[graph.ops[op].operands[0]]}
    updated = {v: table for table in tables for _, v in table.updated}
    of_kernel = {kernels.find(flow.producers[v]): table for v, table in updated.items()}

    def found(op: Op) -> VectorKernel | None:
        kernel = kernels.find(op.index)
        if op.index in filled:
            return VectorKernel(1, True, graph.values[op.results[0]].item_bytes, fills=True)
        if flow.kinds[op.index] == "heavy" or not arrays[kernel] or (kernel in closed and kernel not in along):
            return None
        places = not updated.keys().isdisjoint(op.results)
        table, widest = of_kernel.get(kernel), along.get(kernel, 4.0)
        updates, tiling = (len(table.updated), table.tiling) if table else (0, "table")
        return VectorKernel(arrays[kernel], kernel in along, widest, updates, places, tiling=tiling)

    return tuple(map(found, graph.ops))


def _outermost(flow: Flow, value: int) -> int:
    """The stack that a loop's slice is cut from, or the value itself."""
    made = flow.producers[value]
    if made >= 0 and flow.graph.ops[made].primitive == "scan_slice":
        return _outermost(flow, flow.graph.ops[made].operands[0])
    return value


def vector_product(rule: Rule) -> bool:
    """Whether a rule is of a product with a vector: one operand has nothing but what is summed and what both have."""
    if not rule.matmul or len(rule.operands) != 2 or not rule.reduction:
        return False
    lhs, rhs = ({f for dim in operand for f in dim} for operand in rule.operands)
    out = {f for dim in rule.results[0] for f in dim if rule.sizes[f] > 1}
    return not (lhs & out) - rhs or not (rhs & out) - lhs
