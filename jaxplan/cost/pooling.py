"""What the gradient of a max-pooling needs beside its result, on GPU.

XLA for GPU has no kernel for it: it finds the place of every window's largest element, as one 32-bit integer for each
dimension, and scatters the gradient there (xla/hlo/transforms/expanders/select_and_scatter_expander.h).  Of a ResNet's
bf16[32, 56, 56, 64] those are 103 MB beside 13 (compiled for H100, jax 0.10.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..hardware import Profile
from ..ir import Graph, Op
from ..sharding import MeshAxes, pieces

_PLACE_BYTES = 4

POOLING = "select_and_scatter_add"


def place_bytes(
    graph: Graph, op: Op, rows: np.ndarray, axes: MeshAxes, profile: Profile
) -> np.ndarray | None:
    """`float64[n]`: bytes of the places that an operation finds, for each layout of its operand; None: it does not."""
    if op.primitive != POOLING or profile.kind != "gpu":
        return None
    shape = graph.values[op.operands[0]].shape
    return np.asarray(math.prod(shape) / pieces(rows, axes) * len(shape) * _PLACE_BYTES)


def places_of_poolings(
    graph: Graph,
    axes: MeshAxes,
    times: Sequence[int],
    reads: Mapping[tuple[int, int], np.ndarray],
    profile: Profile,
    found: Mapping[int, int],
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of the places: they need nothing but images of the forward pass, and XLA finds them beside a
    collective (a U-Net's right before they are used, a ResNet's when half of the backward pass is left), or all of a
    body before the first of them is used (VGG-16; compiled for H100, jax 0.10.2).

    Args:
      times: when each operation runs; reads: the layout row of every operand as it is read.
      found: when they are, of operations of which that is known, see `latency_hiding`.
    """
    around = graph.loops_around()
    first: dict[tuple[tuple[int, int], ...], int] = {}
    for op in graph.ops:
        row = reads.get((op.index, 0)) if op.primitive == POOLING else None
        size = None if row is None else place_bytes(graph, op, row[None], axes, profile)
        if size is not None:
            start = first.setdefault(tuple(around[op.index]), times[op.index])
            yield min(found.get(op.index, start), times[op.index]), times[op.index] + 1, math.ceil(float(size[0]))
