"""What the gradient of a max-pooling needs beside its result, on GPU.

XLA for GPU has no kernel for it: it finds the place of every window's largest element, as one 32-bit integer for each
dimension, and scatters the gradient there (xla/hlo/transforms/expanders/select_and_scatter_expander.h).  Of a ResNet's
bf16[32, 56, 56, 64] those are 103 MB beside 13 (compiled for H100, jax 0.10.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ..hardware import Profile
from ..ir import Graph, Op
from ..sharding import MeshAxes, pieces

_PLACE_BYTES = 4

_POOLING = "select_and_scatter_add"


def place_bytes(
    graph: Graph, op: Op, rows: np.ndarray, axes: MeshAxes, profile: Profile
) -> np.ndarray | None:
    """`float64[n]`: bytes of the places that an operation finds, for each layout of its operand; None: it does not."""
    if op.primitive != _POOLING or profile.kind != "gpu":
        return None
    shape = graph.values[op.operands[0]].shape
    return np.asarray(math.prod(shape) / pieces(rows, axes) * len(shape) * _PLACE_BYTES)


def pooling_scratch(
    graph: Graph, axes: MeshAxes, reads: Mapping[tuple[int, int], np.ndarray], profile: Profile
) -> dict[int, int]:
    """Bytes of the places, by operation.

    Args:
      reads: the layout row of every operand as it is read.
    """
    found: dict[int, int] = {}
    for op in graph.ops:
        row = reads.get((op.index, 0)) if op.primitive == _POOLING else None
        size = None if row is None else place_bytes(graph, op, row[None], axes, profile)
        if size is not None:
            found[op.index] = math.ceil(float(size[0]))
    return found
