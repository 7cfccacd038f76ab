"""Rows that XLA for TPU leaves in rows, and those that it copies out of them, or into them.

A gather makes its rows, and a scatter reads what it adds, with the elements of a row side by side, where their table
lies so (see `tiles`): rows of 64 columns take twice their bytes.  Layouts are otherwise the ones that pad least, and
products alone want their operands as they come.  So rows stay in rows where products or scatters read them, or products
what is elementwise made of such rows alone, or scatters that of which nothing else is made; and what a product makes
for a scatter is made in rows.  All others are copied: rows that are gathered, at once and for all but products, and
what is added just before the scatter (graph networks' messages: products, sums, differences and functions of the rows
of one or two nodes of an edge, and of what else is known of it, all added up by node; bf16[1048576, 64] of bf16[32768,
64], and 15 more of f32[65536, 64] and narrower; compiled for v5e, jax 0.10.2, libtpu 0.0.42.1, 2026-11-27).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ..ir import Graph, Op
from ..sharding import ELEMENTWISE, MeshAxes
from .tiles import Tiling, lies_in_rows, local_bytes, local_shape


def stays_in_rows(graph: Graph) -> frozenset[int]:
    """What lies in rows as long as it is there, if the table does that it is taken from or added to."""
    if not graph.lookups():
        return frozenset()
    producers, uses, shapes = graph.producers(), graph.uses(), [value.shape for value in graph.values]
    rows = {v for op in graph.lookups() if op.primitive == "gather" for v in op.results}
    for op in graph.ops:
        if op.primitive in ELEMENTWISE:
            alike = [v for v in op.operands if shapes[v] == shapes[op.results[0]]]
            rows.update(op.results if alike and rows.issuperset(alike) else ())

    def is_read_so(value: int) -> bool:
        made = graph.ops[producers[value]]
        if made.primitive in ELEMENTWISE:
            if not rows.issuperset(v for v in made.operands if shapes[v] == shapes[value]):
                return False
        alone = made.primitive == "gather" or len(uses[value]) == 1
        for reader, position in uses[value]:
            op = graph.ops[reader]
            if op.primitive in ELEMENTWISE:
                if shapes[op.results[0]] != shapes[value] or not rows.issuperset(op.results):
                    return False
            elif op.primitive != "dot_general" and not (alone and _adds(op, position)):
                return False
        return True

    while others := {value for value in rows if not is_read_so(value)}:
        rows -= others
    for op in graph.ops:
        if op.primitive == "dot_general" and len(read := uses[op.results[0]]) == 1:
            rows.update(op.results if _adds(graph.ops[read[0][0]], read[0][1]) else ())
    return frozenset(rows)


def _adds(op: Op, position: int) -> bool:
    return op.primitive.startswith("scatter") and position == 2


def cut_to_columns(
    graph: Graph,
    axes: MeshAxes,
    gradient: int,
    updated: Iterable[tuple[int, int]],
    values: Mapping[int, np.ndarray],
    tiling: Tiling = "table",
) -> dict[int, int]:
    """By argument the bytes in rows of what is updated a column a device with a gradient of wider rows: it takes its
    column out of them, and a row of one stays in tiles of 128 (a table of 16 columns over 16 v6e: 51 MB for 0.4).

    Args:
      tiling: of the gradient, see `lies_in_rows`.
    """
    made = values.get(gradient)
    if made is None or not lies_in_rows(graph.values[gradient], made, axes, tiling):
        return {}
    found, wide = {}, local_shape(graph.values[gradient].shape, made, axes)[-1] > 1
    for argument, value in updated if wide else ():
        if (row := values.get(value)) is not None:
            tensor = graph.values[argument]
            if local_shape(tensor.shape, row, axes)[-1] == 1:
                in_lanes = frozenset({len(tensor.shape) - 1})
                found[argument] = local_bytes(tensor, row, axes, "tpu", in_lanes)
    return found
