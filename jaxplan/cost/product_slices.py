"""What products on GPU read of loops' stacks: slices in buffers of their own, while the product runs.

XLA for GPU fuses no dynamic slice into a product's kernel.  Weights and activations that a loop slices are copied out
first, bf16[1024, 3, 8, 128] of a stack of two, and are in memory beside what the product makes and splits: all of a
scanned GPT's and a scanned Llama's (H100, jax 0.10.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..ir import Graph
from ..sharding import MeshAxes
from .residency import unmoved
from .tiles import local_bytes


def slice_scratch(
    graph: Graph,
    axes: MeshAxes,
    stored: Sequence[bool],
    producers: Sequence[int],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> dict[int, int]:
    """Bytes of slices that are there for one product each, by operation; not of those that are resharded first.

    Args:
      stored, producers: see `Traffic`; values, reads: see `simulate_memory`.
    """
    slices = {op.results[0] for op in graph.ops if op.primitive == "scan_slice" and not stored[op.results[0]]}
    found: dict[int, int] = {}
    for op in graph.ops if slices else ():
        if op.primitive != "dot_general":
            continue
        read = {unmoved(graph, producers, v): (v, reads.get((op.index, i))) for i, v in enumerate(op.operands)}
        for value, (operand, row) in read.items():
            if value in slices and row is not None and np.array_equal(values.get(operand, row), row):
                size = local_bytes(graph.values[operand], row, axes, "gpu")
                found[op.index] = found.get(op.index, 0) + size
    return found
