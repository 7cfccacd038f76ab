"""The f32 sums of a TPU's products: they take a memory's time beside what their kernel writes.

XLA for TPU adds a product up in f32, and a tile of these sums takes it as long as writing it would, whatever becomes of
it: bf16[8192, 128] by [128, 8192] takes 605 us, what moving six bytes an element takes (the sum's four and the result's
two), with a bf16 residual added 809 (eight: 817), with a second result 1010, and 428 (four: 408) where only its rows'
sums are written.  One array of f32 that the kernel writes is what the sums are: an f32 result takes 423 us, with an f32
array added 842.  Long sums take what the matrix unit takes: 740 us over 1024 elements, of which the sums' bytes would
be 663 (v5e; v5p and v6e within 6 %, jax 0.10.2, libtpu 0.0.42.1, 2026-11-28).  Convolutions take nothing
beside.  Where XLA decides what may stay in vector memory it goes by arithmetic and traffic alone (`estimates`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..disjoint import Disjoint
from ..ir import Op
from .residency import Flow
from .vector_kernels import VectorKernel

SUM_BYTES = 4


def products_with_sums(
    flow: Flow,
    writes: Sequence[Sequence[float]],
    kernels: Disjoint,
    vector: Sequence[VectorKernel | None],
) -> frozenset[int]:
    """The products whose kernel writes nothing of their sums' size in four bytes an element.

    Where the kernel reads arguments besides, its elementwise work goes by tiles and is what takes the time.

    Args:
      writes: bytes, see `fusion.Traffic`; kernels: see `joined`; vector: see `vector_kernels`.
    """
    graph = flow.graph
    elements = [math.prod(tensor.shape) for tensor in graph.values]
    largest: dict[int, int] = {}
    by_tiles = {kernels.find(index) for index, kernel in enumerate(vector) if kernel is not None}
    for op in graph.ops:
        for value, written in zip(op.results, writes[op.index], strict=True):
            if written and graph.values[value].item_bytes == SUM_BYTES:
                kernel = kernels.find(op.index)
                largest[kernel] = max(largest.get(kernel, 0), elements[value])

    def beside(op: Op) -> bool:
        kernel = kernels.find(op.index)
        return kernel not in by_tiles and largest.get(kernel, 0) < elements[op.results[0]]

    return frozenset(op.index for op in graph.ops if op.primitive == "dot_general" and beside(op))
