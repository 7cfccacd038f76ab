"""What XLA for GPU transposes for the gradients of dilated kernels.

cuDNN's call for a kernel's gradient takes no kernel that was dilated (`MatchBackwardFilter`,
xla/service/gpu/transforms/conv_rewriter.cc, wants windows of stride 1).  It is then a convolution like any other, of
the images by the results' gradient, whose features are the batch: both are copied into that order, as soon as the
gradient is there, and lie there until the convolution runs (a WaveNet's bf16[4, 4096, 512], H100, jax 0.10.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..ir import Graph, Op
from ..sharding import MeshAxes
from .tiles import local_bytes


def transposed_for_kernels(
    graph: Graph, axes: MeshAxes, times: Sequence[int], reads: Mapping[tuple[int, int], np.ndarray]
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of the copies of what the gradients of dilated kernels are made of.

    Args:
      times: when each operation runs; reads: the layout row of every operand as it is read.
    """
    producers = graph.producers()
    for op in graph.ops:
        if _of_a_dilated_kernel(graph, op):
            made = [times[producers[value]] for value in op.operands if producers[value] >= 0]
            for place, value in enumerate(op.operands):
                if (row := reads.get((op.index, place))) is not None:
                    size = local_bytes(graph.values[value], row, axes, "gpu")
                    yield max(made, default=0) + 1, times[op.index] + 1, size


def _of_a_dilated_kernel(graph: Graph, op: Op) -> bool:
    """Whether `op` is a convolution by windows larger than its result, some places apart."""
    if op.primitive != "conv_general_dilated" or max(op.params["window_strides"], default=1) == 1:
        return False
    numbers = op.params["dimension_numbers"]
    window = [graph.values[op.operands[1]].shape[d] for d in numbers.rhs_spec[2:]]
    result = [graph.values[op.results[0]].shape[d] for d in numbers.out_spec[2:]]
    return all(w > r for w, r in zip(window, result, strict=True))
