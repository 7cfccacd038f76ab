"""The f32 sums of a TPU's products: they take a memory's time beside what their kernel writes.

XLA for TPU adds a product up in f32, and a tile of these sums takes it as long as writing it would, whatever becomes of
it: bf16[8192, 128] by [128, 8192] takes 605 us, what moving six bytes an element takes (the sum's four and the result's
two), with a bf16 residual added 809 (eight: 817), with a second result 1010, and 428 (four: 408) where only its rows'
sums are written.  One array of f32 that the kernel writes is what the sums are: an f32 result takes 423 us, with an f32
array added 842.  Long sums take what the matrix unit takes: 740 us over 1024 elements, of which the sums' bytes would
be 663 (v5e; v5p and v6e within 6 %, jax 0.10.2, libtpu 0.0.42.1, 2026-11-28).  Convolutions take nothing
beside.  Where XLA decides what may stay in vector memory it goes by arithmetic and traffic alone (`without_sums`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..disjoint import Disjoint
from ..hardware import Profile
from ..ir import Graph, Op
from ..sharding import NONE, MeshAxes
from .residency import Flow
from .tiles import local_sizes
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


def without_sums(
    graph: Graph,
    axes: MeshAxes,
    products: frozenset[int],
    profile: Profile,
    reads: Mapping[tuple[int, int], np.ndarray],
    seconds: Mapping[int, float],
) -> dict[int, float]:
    """`seconds` of operations, all their runs, less what the sums of `products` take beside arithmetic and traffic.

    Args:
      reads: layout rows of operands, by operation and position.
    """
    found, whole = dict(seconds), np.full(len(axes), NONE)
    for index in products & found.keys():
        op = graph.ops[index]
        (summed, _), (shared, _) = op.params["dimension_numbers"]
        rows = (reads.get((index, place), whole)[None] for place in range(2))
        shapes = (graph.values[v].shape for v in op.operands)
        left, right = (local_sizes(*sides, axes)[0] for sides in zip(shapes, rows, strict=True))
        length = math.prod(left[dim] for dim in summed)
        elements = math.prod(left) * math.prod(right) / length**2 / math.prod(left[dim] for dim in shared)
        dtype = graph.values[op.operands[0]].dtype
        flops_s = 2 * elements * length / (profile.peak_for(dtype) * profile.matmul_efficiency)
        sums_s = SUM_BYTES * elements / (profile.hbm_bytes_per_s * profile.hbm_efficiency)
        found[index] = min(found[index], max(op.trips * flops_s, found[index] - op.trips * sums_s))
    return found
