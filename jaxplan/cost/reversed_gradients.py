"""What XLA for TPU turns round for the kernels' gradients of convolutions that enlarge an image.

A transposed convolution (flax's `ConvTranspose`, of a decoder, a generator or a U-Net) reads its image with zeros in
between, and so does the gradient of its kernel, for which the gradient of the result, as large as the window then, is
the kernel.  XLA swaps the two and reverses that gradient, in a kernel of its own: it is written, whatever it is made
of, and lies in memory twice until the convolution has run, in bf16 where products round what they multiply.  So it is
for kernels of 2 to 8 pixels a side, two and four apart, results of 3 to 256 channels, in f32 and bf16, with activations
and normalisations or none, and not where nothing lies between (chains of two to four, compiled for v5e, v5p and v6e,
jax 0.10.2: 37 to 47 % of their memory).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..ir import Graph, Op
from ..sharding import MeshAxes
from .kinds import is_kernels_gradient
from .precision import rounded_share, rounds_operands
from .residency import unmoved
from .tiles import Tiling, local_bytes


def of_enlarging_kernels(graph: Graph) -> Iterator[Op]:
    """The gradients of such kernels: convolutions by windows larger than their results, of images with zeros in
    between."""
    for op in graph.ops:
        if is_kernels_gradient(graph, op) and math.prod(op.params["lhs_dilation"]) > 1:
            yield op


def reversed_gradients(
    graph: Graph,
    axes: MeshAxes,
    found: Sequence[Op],
    times: Sequence[int],
    reads: Mapping[tuple[int, int], np.ndarray],
    images: Mapping[int, Tiling],
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of the reversed copies.

    Args:
      found: see `of_enlarging_kernels`; times: when each operation runs; reads: the layout row of every operand as it
        is read; images: see `Traffic`.
    """
    for op in found:
        if (row := reads.get((op.index, 1))) is None:
            continue
        tensor = graph.taken(op.operands[1], [(op.index, 1)])
        share = rounded_share(tensor) if rounds_operands(op, graph) else 1.0
        size = local_bytes(tensor, row, axes, "tpu", images.get(op.operands[1], "any"))
        yield times[op.index], times[op.index] + 1, math.ceil(float(size) * share)


def read_reversed(graph: Graph, producers: Sequence[int]) -> Iterator[int]:
    """What is reversed."""
    for op in of_enlarging_kernels(graph):
        yield unmoved(graph, producers, op.operands[1])
