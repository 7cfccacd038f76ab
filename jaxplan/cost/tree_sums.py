"""Reductions that XLA for GPU makes in two kernels, as one would have to add with atomics.

A kernel sums rows of up to 16384 elements and columns of up to 4096; what is longer is summed in parts, which another
kernel adds (`TreeReductionRewriter`, xla/service/gpu/transforms; the bounds are `ReductionDimensionRaceFreeBound`,
xla/service/gpu/reduction_utils.cc).  That one adds little, and takes as long as a kernel's start.  A batch of more than
8, summed beside the rows, is another kernel's, too; but the rows' sums are then made in a kernel that makes others of
what it reads, which are counted as kernels of their own (the loops of an RWKV have one kernel for each, H100, jax
0.10.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..ir import Graph, Op
from ..sharding import MeshAxes
from .kinds import REDUCTIONS
from .tiles import local_sizes

_ROW, _COLUMN = 16384, 4096


def further_kernels(op: Op, graph: Graph, operands: Sequence[np.ndarray], axes: MeshAxes) -> np.ndarray:
    """`float64[n]`: kernels that a reduction takes beside its first, in every layout of its operands.

    Args:
      op: of any kind; what is written as a product of matrices and is none sums the larger of its operands.
    """
    none = np.zeros(len(operands[0]) if operands else 1)
    if op.primitive == "dot_general":
        place = max((0, 1), key=lambda one: math.prod(graph.values[op.operands[one]].shape))
        summed = frozenset(op.params["dimension_numbers"][0][place])
    elif op.primitive in REDUCTIONS and "axes" in op.params:
        place, summed = 0, frozenset(op.params["axes"])
    else:
        return none
    shape = graph.values[op.operands[place]].shape
    if math.prod(shape) <= _COLUMN:
        return none
    rows, which = np.unique(local_sizes(shape, operands[place], axes), axis=0, return_inverse=True)
    return np.array([_further(row.tolist(), summed) for row in rows], np.float64)[which.reshape(-1)]


def _further(sizes: Sequence[float], summed: frozenset[int]) -> int:
    runs: list[tuple[bool, float]] = []  # neighbours that are summed, or are not, as one dimension
    for dim, size in enumerate(sizes):
        if size > 1:
            if runs and runs[-1][0] == (dim in summed):
                runs[-1] = runs[-1][0], runs[-1][1] * size
            else:
                runs.append((dim in summed, size))
    added = [size for sums, size in runs if sums]
    if len(added) == 2 and len(runs) == 3:  # rows, and a batch of them
        return int(added[1] > _ROW)
    if len(added) != 1:
        return 0  # nothing is summed, or it is brought into another order first
    return int(added[0] > (_ROW if runs[-1][0] else _COLUMN))
