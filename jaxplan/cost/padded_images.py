"""Images that XLA for GPU writes with their padding: cuDNN pads alike on both sides, and puts nothing in between.

A convolution whose padding differs from side to side, as one of stride 2 that keeps its size rounded up, reads a copy
with what one side has more; one that spreads its input (a transposed convolution, not the gradient of one with a
stride, which cuDNN has) reads it spread and padded.  The copy stays for the gradient of the weights
(`ConvPaddingLegalization`, xla/service/gpu/transforms/conv_padding_legalization.cc; bf16[128, 33, 33, 160] beside 32 x
32 of a wide ResNet, bf16[2, 97, 97, 97, 64] for 48 x 48 x 48 of a U-Net in three dimensions; H100, jax 0.10.2).  What
nobody else reads is written so alone.  In two dimensions, where what is spread is padded alike on both sides (kernels
of an even size), the gradient of the weights reads the image itself, and the copy ends with the convolution.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..ir import Graph, Op
from ..sharding import MeshAxes
from .tiles import local_bytes


def padded_images(
    graph: Graph,
    axes: MeshAxes,
    times: Sequence[int],
    needed: Sequence[int],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of what padded copies take beside the images, or more than they.

    Args:
      times, needed: when each operation runs, and until when it needs its operands.
      reads: the layout row of every operand as it is read.
    """
    producers, uses, seen = graph.producers(), graph.uses(), set[int]()
    for op in graph.ops:
        value = op.operands[0] if op.primitive == "conv_general_dilated" else -1
        row = reads.get((op.index, 0))
        if value < 0 or value in seen or row is None or (times_larger := _times_larger(graph, op, producers)) <= 1:
            continue
        seen.add(value)
        readers = [graph.ops[reader] for reader, _ in uses[value]]
        convolutions = [reader for reader in readers if reader.primitive == op.primitive]
        alone = len(readers) == len(convolutions) <= 2  # itself, and the gradient of its weights
        last = convolutions
        if _is_spread_alike(op):
            alone, last = len(readers) == 1, [op]
        more = local_bytes(graph.values[value], row, axes, "gpu") * (times_larger - alone)
        yield times[op.index], max(needed[reader.index] for reader in last), math.ceil(more)


def _is_spread_alike(op: Op) -> bool:
    """Whether it spreads images of two dimensions, and pads them alike on both sides."""
    padding = op.params["padding"]
    return len(padding) == 2 and max(op.params["lhs_dilation"]) > 1 and all(low == high for low, high in padding)


def _times_larger(graph: Graph, op: Op, producers: Sequence[int]) -> float:
    """How many times its elements what a convolution reads has once it is padded; 1 for what cuDNN pads by itself."""
    spread, maker = op.params["lhs_dilation"], producers[op.operands[1]]
    if max(spread, default=1) > 1 and maker >= 0 and graph.ops[maker].primitive == "rev":
        return 1.0  # the gradient of what a convolution with a stride reads
    sizes = [graph.values[op.operands[0]].shape[d] for d in op.params["dimension_numbers"].lhs_spec[2:]]
    found = 1.0
    for size, apart, (low, high) in zip(sizes, spread, op.params["padding"], strict=True):
        padded = (size - 1) * apart + 1 + low + high if max(spread) > 1 else size + abs(high - low)
        found *= max(padded, 1) / max(size, 1)
    return found
