"""Gradients of images that were joined along their channels, as XLA for TPU keeps them.

A convolution's kernel writes its result, with what is added to it, as one array. The gradient of joined images is one,
where the joined images are convolved; that of each part is a slice of it. Slices are taken where they are read: by the
next convolutions, whose kernels take them in, and, of the part that came from far away, by the sum of gradients there.
Until then the gradient is in memory whole (a U-Net's blocks of the finest level, bf16[8, 32, 32, 384] for the 128
channels of its skip; compiled for v5e, v5p and v6e, jax 0.10.2, libtpu 0.0.42.1, 2026-11-28).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir import Graph
from ..sharding import ELEMENTWISE
from .residency import made_of


def whole_gradients(graph: Graph, producers: Sequence[int]) -> set[int]:
    """What convolutions make, with what is added to it, that is split for other convolutions."""
    uses, found = graph.uses(), set[int]()
    for op in graph.ops:
        if op.primitive != "split" or len(uses[op.operands[0]]) > 1:
            continue
        added = made_of(graph, producers, op.operands[0], lambda made: made.primitive in ELEMENTWISE)
        makers = {graph.ops[producers[value]].primitive for value in added if producers[value] >= 0}
        if "conv_general_dilated" in makers:
            found.add(op.operands[0])
    return found
