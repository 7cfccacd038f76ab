"""Products that XLA for GPU splits along what they sum, to keep all cores of the device busy.

A product of a small result and a long sum is made in `ways` parts, each a result of its own in the type that sums are
made in, which a second kernel adds up: more memory, and more traffic.  How many parts, the compiler decides by a price
of its own for every power of two (xla/backends/gpu/transforms/splitk_rewriter.cc; its weights are fits to
measurements).  Checked on the 20 products of an LSTM and of DLRM compiled for H100 (jax 0.10.2): equal in all.

Products of complex numbers are left to cuBLAS, which splits them by itself, in a workspace that XLA gives it (a state
space network; xla/service/gpu/matmul_utils.h, `GemmConfig`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..hardware import Profile
from ..ir import Graph, Op
from ..sharding import MeshAxes
from .scores import is_converted

_WAYS = 2.0 ** np.arange(12)
_TILE = 128
_ALIGNED_BYTES = 16
_WEIGHTS = {
    10: (100.0, 0.0848863, 189.711, 1.21563e8),
    9: (100.0, 0.194136, 193.1384, 4.36e7),
    0: (100.0, 0.0666955, 467.815, 5.65307e7),
}
"""From which compute capability on: prices of arithmetic, of the product's bytes, of the reduction's, and of its launch
(the compiler's `GetCostWeights`; no unit)."""


_WORKSPACE_BYTES = {9: 2**25, 0: 2**22}
"""From which compute capability on: what a product by cuBLAS is given."""

Array = npt.NDArray[np.float64]


class Product(NamedTuple):
    """A local product of [batch, m, k] and [batch, k, n], each size an array, one entry a strategy.

    Attributes:
      lhs_bytes, rhs_bytes, out_bytes: of an element, operands before they are converted; sum_bytes: of the parts'.
    """

    batch: Array
    m: Array
    n: Array
    k: Array
    lhs_bytes: float
    rhs_bytes: float
    out_bytes: float
    sum_bytes: float


def split_ways(product: Product, profile: Profile) -> Array:
    """In how many parts each product is made, of the sizes' broadcast shape; 1 on what is no GPU."""
    sizes = np.broadcast_arrays(product.batch, product.m, product.n, product.k)
    if profile.core_count is None or profile.compute_capability is None:
        return np.ones(sizes[0].shape)
    batch, m, n, k = (size[..., None] for size in sizes)
    arithmetic, memory, reduction, launch = next(
        weights for since, weights in _WEIGHTS.items() if profile.compute_capability >= since
    )
    tile = np.minimum(m, _TILE) * np.minimum(n, _TILE)
    tiles = batch * _WAYS * np.ceil(m / _TILE) * np.ceil(n / _TILE)
    waves = np.maximum(tiles / (profile.core_count * _TILE**2 / tile), 1.0)
    computed = 2 * tile * np.ceil(k / _WAYS) * waves * arithmetic
    out = batch * m * n
    parts = out * _WAYS * product.sum_bytes
    read = batch * k * (m * product.lhs_bytes + n * product.rhs_bytes)
    whole = _WAYS == 1
    moved = (read + np.where(whole, out * product.out_bytes, parts)) * memory
    added = np.where(whole, 0.0, launch + (parts + out * product.out_bytes) * reduction)
    return np.asarray(_WAYS[np.argmin(np.maximum(computed, moved) + added, axis=-1)])


def part_bytes(product: Product, profile: Profile) -> Array:
    """Bytes of the parts that each product is made in; 0 where it is made at once."""
    ways = split_ways(product, profile)
    out = product.batch * product.m * product.n
    return np.asarray(np.where(ways > 1, ways * out * product.sum_bytes, 0.0))


def padded_bytes(product: Product, profile: Profile) -> tuple[Array, Array]:
    """Bytes of each operand as it is padded for the parts; 0 where it is not."""
    lhs, rhs = _padded_elements(product, profile)
    return lhs * product.lhs_bytes, rhs * product.rhs_bytes


def _padded_elements(product: Product, profile: Profile) -> tuple[Array, Array]:
    """Elements of each operand as it is padded for the parts; 0 where it is not.

    What does not divide into parts of whole 16 bytes is padded until it does (the compiler's `GetPaddedK`; an LSTM's
    vocabulary of 16,639 local columns, and of 33,278 in two parts).
    """
    ways = split_ways(product, profile)
    unit = ways * _ALIGNED_BYTES / min(_ALIGNED_BYTES, product.lhs_bytes, product.rhs_bytes)
    whole = np.ceil(product.k / unit) * unit
    padded = product.batch * whole * ((ways > 1) & (product.k % unit > 0))
    return np.asarray(padded * product.m), np.asarray(padded * product.n)


def local_product(
    graph: Graph, op: Op, producers: Sequence[int], lhs_places: np.ndarray, rhs_places: np.ndarray, axes: MeshAxes
) -> Product | None:
    """The product of one device that a dot_general is, an entry for each layout of its operands (place arrays).

    Args:
      producers: `Graph.producers`.

    Returns:
      None for what is never split: other operations, products of integers or complex numbers, and what is multiplied
      element by element.
    """
    if op.primitive != "dot_general":
        return None
    values = [graph.values[v] for v in (*op.operands[:2], op.results[0])]
    if any(v.dtype.startswith(("int", "uint", "bool", "complex")) for v in values):
        return None
    lhs, rhs = (
        _local(v.shape, places, axes) for v, places in zip(values, (lhs_places, rhs_places), strict=False)
    )
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = op.params["dimension_numbers"]
    if not lhs_sum or len(values[2].shape) == len(lhs_batch):
        return None

    def size(sizes: np.ndarray, dims: Sequence[int]) -> np.ndarray:
        return np.asarray(sizes[list(dims)].prod(axis=0)) if dims else np.ones(sizes.shape[1:])

    lhs_value, rhs_value = (graph.values[_unconverted(graph, producers, v)] for v in op.operands[:2])
    return Product(
        size(lhs, lhs_batch),
        size(lhs, [d for d in range(len(lhs)) if d not in (*lhs_sum, *lhs_batch)]),
        size(rhs, [d for d in range(len(rhs)) if d not in (*rhs_sum, *rhs_batch)]),
        size(lhs, lhs_sum),
        lhs_value.item_bytes,
        rhs_value.item_bytes,
        values[2].item_bytes,
        max(values[2].item_bytes, 4.0),
    )


def is_complex(graph: Graph, value: int) -> bool:
    """Whether a tensor is of complex numbers."""
    return graph.values[value].dtype.startswith("complex")


def _unconverted(graph: Graph, producers: Sequence[int], value: int) -> int:
    while is_converted(graph, producers, value):
        value = graph.ops[producers[value]].operands[0]
    return value


def workspace_bytes(profile: Profile) -> int:
    """What a product by cuBLAS has beside it while it runs."""
    return next(size for since, size in _WORKSPACE_BYTES.items() if (profile.compute_capability or 0) >= since)


def split_scratch(
    graph: Graph, axes: MeshAxes, reads: Mapping[tuple[int, int], np.ndarray], profile: Profile
) -> dict[int, int]:
    """Bytes of parts of every product that is split, by operation, and of its operands where they are padded for it;
    of workspaces.

    Args:
      reads: the layout row of every operand as it is read.
    """
    if profile.core_count is None:
        return {}
    producers, found = graph.producers(), {}
    workspace = workspace_bytes(profile)
    for op in graph.ops:
        if op.primitive == "dot_general" and is_complex(graph, op.operands[0]):
            found[op.index] = workspace
        rows = [reads.get((op.index, i)) for i in range(2)]
        if op.primitive == "dot_general" and rows[0] is not None and rows[1] is not None:
            product = local_product(graph, op, producers, rows[0][None], rows[1][None], axes)
            size = float(part_bytes(product, profile)[0]) if product else 0.0
            if product and size:
                padded = zip(op.operands, _padded_elements(product, profile), strict=False)
                size += sum(float(count[0]) * graph.values[v].item_bytes for v, count in padded)
                found[op.index] = math.ceil(size)
    return found


def _local(shape: Sequence[int], places: np.ndarray, axes: MeshAxes) -> np.ndarray:
    """`float64[rank, n]`: sizes of a device's part under each layout of a place array."""
    local = np.repeat(np.array(shape, np.float64)[:, None], len(places), axis=1)
    for axis, (_, size) in enumerate(axes):
        cut = np.flatnonzero(places[:, axis] >= 0)
        local[places[cut, axis], cut] /= size
    return np.ceil(local)
