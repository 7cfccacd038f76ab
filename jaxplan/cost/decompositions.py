"""What XLA for TPU needs beside a matrix while it finds its eigenvalues or singular values: copies in loops."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ..ir import Graph
from ..sharding import MeshAxes
from .tiles import local_bytes

_COPIES = {"eigh": 14, "svd": 18}
"""Of f32[512, 512] and f32[1024, 1024] 14.1 and 11.4 times the matrix for `eigh`, of f32[512, 512] 18.1 for `svd`,
with results (compiled for v5e, jax 0.10.2, libtpu 0.0.42.1); `qr`, `cholesky` and `lu` take next to nothing else."""


def decomposition_scratch(
    graph: Graph, axes: MeshAxes, reads: Mapping[tuple[int, int], np.ndarray], platform: str
) -> dict[int, int]:
    """Bytes by operation; reads: the layout row of every operand as it is read."""
    if platform != "tpu":
        return {}
    return {
        op.index: math.ceil(
            (_COPIES[op.primitive] - len(op.results))
            * local_bytes(graph.values[op.operands[0]], row, axes, platform)
        )
        for op in graph.ops
        if op.primitive in _COPIES and (row := reads.get((op.index, 0))) is not None
    }
