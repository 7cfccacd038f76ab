"""What XLA for TPU needs beside an array while it takes its Fourier transform: products, of three parts.

A TPU has no kernel for it.  XLA multiplies with the transform's matrix, in two stages where a length is long, and a
complex product is three of real numbers: sums of real and imaginary parts, three products, and two results of them are
arrays in f32 of all points, before and after each stage.  What is real, or has half of its frequencies, is given all.
Thirty transforms (32 MB to 270 MB of points a device, 64 to 65536 of them along one to three dimensions) take 3 to 4
such arrays beside operand and result, as far as they don't lie in vector memory, of which one is left (v5e, jax 0.10.2,
libtpu 0.0.42.1); two lengths that are no multiples of a register's lanes take 6, and three stages (262144 points) 18.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..hardware import Profile
from ..ir import Graph
from ..sharding import MeshAxes
from .tiles import local_bytes

_ARRAYS = 4


def transform_scratch(
    graph: Graph, axes: MeshAxes, reads: Mapping[tuple[int, int], np.ndarray], profile: Profile
) -> dict[int, int]:
    """Bytes by operation; reads: the layout row of every operand as it is read."""
    found: dict[int, int] = {}
    for op in graph.ops:
        row = reads.get((op.index, 0))
        if op.primitive != "fft" or profile.kind != "tpu" or row is None:
            continue
        ends = [graph.values[v] for v in (op.operands[0], op.results[0])]
        all_points = max(ends, key=lambda tensor: math.prod(tensor.shape))
        real = replace(all_points, dtype="float32", item_bytes=4.0)
        size = local_bytes(real, row, axes, profile.kind)
        on_chip = int(profile.on_chip_bytes or 0) // max(size, 1)
        found[op.index] = max(_ARRAYS - on_chip, 1) * size
    return found
