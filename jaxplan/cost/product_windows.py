"""Products of a TPU whose operands are read from main memory more than once.

A kernel makes a product one window of its result after the other, each the sum of products of windows of its operands.
What vector memory doesn't hold is read once for every row, or column, of result windows.  Where the kernel also updates
arrays of the result's shape, windows of all of those are in vector memory too, so that there are more of them: beside
Adam's moments a product of bf16[8192, 8192] in f32 is made in 22 x 16 windows of 384 x 512 elements, without in 8 x 8,
and takes 15.6 ms for 6.4 (v5e, jax 0.10.2, libtpu 0.0.42.1; experiments/tpu_calibration).  Windows are read at two
thirds of the rate at which a copy reads and writes (`Profile.window_efficiency`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..hardware import Profile
from .residency import Flow, origin
from .turned import Update

Array = npt.NDArray[np.float64]
_COLUMNS, _ROWS = 128, 8
"""What a window's sides are multiples of."""
_WIDEST = 64
_SUM_BYTES = 4


class Windowed(NamedTuple):
    """Attributes:
    read_bytes: of an element of each operand, as it lies in memory.
    held: whether vector memory holds an operand that fits: arguments and what another product reads too.
    written_bytes: of an element of the result.
    updated_bytes: for an element of the result, read and written by the updates that its kernel makes; 0 without.
    """

    read_bytes: tuple[float, float]
    held: tuple[bool, bool]
    written_bytes: float
    updated_bytes: float


def windowed(
    flow: Flow,
    reads: Sequence[Sequence[float]],
    updates: Sequence[Update],
    op_level: Sequence[int],
) -> dict[int, Windowed]:
    """The products of two matrices, by operation.

    Args:
      reads: bytes of every operation's operands, see `Traffic`.
      updates: see `updates_of`; op_level: the kernels of operations, see `fusion`.
    """
    graph, found = flow.graph, {}
    products = [
        op for op in graph.ops
        if op.primitive == "dot_general" and flow.rules[op.index].matmul and not op.params["dimension_numbers"][1][0]
    ]  # fmt: skip
    readers: dict[int, set[int]] = {}
    for op in products:
        for value in op.operands:
            readers.setdefault(origin(flow.graph, flow.producers, value), set()).add(op.index)
    updated: dict[int, float] = {}
    for update in updates:
        makers = {flow.producers[graph.ops[reader].operands[place]] for reader, place, _ in update.reads}
        both = graph.values[update.value].bytes + graph.values[update.argument].bytes
        for maker in makers:
            if maker >= 0 and op_level[maker] == op_level[flow.producers[update.value]]:
                updated[maker] = updated.get(maker, 0.0) + both
    for op in products:
        sizes = [np.prod(graph.values[v].shape, dtype=np.float64) for v in (*op.operands, *op.results)]
        if min(sizes) > 0:
            left, right = (size / count for size, count in zip(reads[op.index], sizes, strict=False))
            origins = (origin(flow.graph, flow.producers, v) for v in op.operands)
            first, second = (flow.producers[v] < 0 or len(readers[v]) > 1 for v in origins)
            written = graph.values[op.results[0]].item_bytes
            found[op.index] = Windowed((left, right), (first, second), written, updated.get(op.index, 0.0) / sizes[2])
    return found


def window_seconds(
    product: Windowed, dims: tuple[Array, Array, Array], updates: npt.NDArray[np.bool_], profile: Profile
) -> Array:
    """`float64[s]`: what it takes to read the windows of a device's product.

    Nothing where vector memory holds both operands; not what is written, nor what updates read and write.

    Args:
      dims: float64[s] each, local (m, n, k) of a product [m, k] x [k, n].
      updates: bool[s], whether its kernel makes the updates too: not of a result that is summed up over devices first.
    """
    if profile.window_bytes is None or profile.window_efficiency is None:
        return np.zeros(len(updates))
    rows, columns, summed = dims
    lhs, rhs = (side * summed * size for side, size in zip((rows, columns), product.read_bytes, strict=True))
    room = (profile.on_chip_bytes or 0) * np.array(product.held)
    fused = updates & (product.updated_bytes > 0)
    lhs, rhs = np.where(lhs > room[0], lhs, 0.0), np.where(rhs > room[1], rhs, 0.0)
    each = np.where(fused, product.updated_bytes, product.written_bytes)
    elements = profile.window_bytes / (2 * each + _SUM_BYTES)
    width = _COLUMNS * np.arange(1, _WIDEST + 1.0)[:, None]
    height = np.maximum(elements // width // _ROWS * _ROWS, _ROWS)
    read = (lhs * np.ceil(columns / width) + rhs * np.ceil(rows / height)).min(axis=0)
    return np.asarray(read / (profile.hbm_bytes_per_s * profile.window_efficiency))
