"""Images that convolutions with groups of several channels read, which XLA for TPU copies.

Such a convolution wants its images in bf16 with the batch in lanes, whatever their channels fill.  A batch that fills
lanes lies so anyway; bf16[32, 112, 112, 48] is in memory as 154 MB beside what it is computed of, 32 images in 128
lanes, till the gradient of the kernels has read it, too (a RegNet of groups of eight channels, 32 and 128 images a
device, v5e, v5p and v6e, jax 0.10.2, libtpu 0.0.42.1: 0.4 of 2.1 GB).  What it makes lies so, too, and is turned.
Convolutions of one channel a group read images as they lie.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..ir import Graph, Op
from ..sharding import MeshAxes
from .precision import rounded_share
from .tiles import LANES, local_bytes, local_sizes


def grouped_convolutions(graph: Graph) -> Iterator[Op]:
    """Those of several channels a group."""
    for op in graph.ops:
        if op.primitive == "conv_general_dilated" and (groups := op.params["feature_group_count"]) > 1:
            made, read = op.params["dimension_numbers"].rhs_spec[:2]
            kernel = graph.values[op.operands[1]].shape
            if kernel[read] > 1 and kernel[made] > groups:
                yield op


def copied_for_groups(
    graph: Graph, axes: MeshAxes, found: Sequence[Op], times: Sequence[int], values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> Iterator[tuple[int, int, int]]:  # fmt: skip
    """(start, stop, bytes) of the copies, and of what such a convolution makes before that is turned.

    Args:
      found: see `grouped_convolutions`; times: see `Traffic`; values, reads: see `simulate_memory`.
    """
    for op in found:
        rows = reads.get((op.index, 0)), values.get(op.results[0])
        if rows[0] is None or rows[1] is None:
            continue
        numbers, (read, made) = op.params["dimension_numbers"], (op.operands[0], op.results[0])
        if local_sizes(graph.values[read].shape, rows[0][None], axes)[0][numbers.lhs_spec[0]] >= LANES:
            continue
        images, result = (
            float(local_bytes(graph.values[v], row, axes, "tpu", frozenset({spec[0]})))
            for v, row, spec in ((read, rows[0], numbers.lhs_spec), (made, rows[1], numbers.out_spec))
        )
        readers = [r for r, place in graph.uses()[read] if place == 0 and graph.ops[r].primitive == op.primitive]
        yield times[op.index], max(times[r] for r in readers) + 1, math.ceil(images * rounded_share(graph.values[read]))
        yield times[op.index], times[op.index] + 1, math.ceil(result)
