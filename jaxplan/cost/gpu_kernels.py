"""Kernels that a GPU runs far below its rates: odd rows, convolutions of few channels, what is added into memory.

- Tensor cores are fed by 16 bytes.  A product one of whose rows is no multiple of them (197 tokens of a ViT, 1500 units
  of an LSTM) is given to slower kernels (`Profile.unaligned_flops_share`, `unaligned_hbm_share`).
- cuDNN's tensor-core convolutions read channels 16 bytes at a time.  Images of three channels are padded to eight first
  and run on a kernel of an older generation: 50 to 140 TFLOP/s on an H100, the zeros counted, where others reach 400 to
  850 (`unaligned_efficiency`).
- Those of one channel a group run outside the tensor cores, at a thirtieth of memory's rate (`depthwise_efficiency`).
- XLA adds rows into a tensor, and a max-pooling's gradient into zeros, element by element in atomic operations, those
  of 16-bit numbers in loops of compare-and-swap (`atomic_s`), after it has read what is added.  Where windows overlap,
  as many tries as windows have an element are needed (16 to 21 ps of windows of 3 x 3 two apart, 8 to 10 side by side).

Measured on an H100, kernel by kernel, in fourteen train steps (experiments/gpu_truth).  What the planner prices of an
operation, and the yardstick of a compiled kernel, is computed here from the same numbers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..hardware import Profile
from ..ir import Graph, Op
from ..sharding import MeshAxes, Strategies, pieces
from .kinds import is_kernels_gradient
from .tiles import local_sizes

_ALIGNED_BYTES = 16
"""By which a tensor core's operands are loaded (NVIDIA, "Matrix Multiplication Background User's Guide")."""

_POOLING = "select_and_scatter_add"
_ADDING = frozenset({"scatter-add", "scatter_add", "scatter-mul", "scatter_mul", _POOLING})


class Channels(NamedTuple):
    """Of a convolution as its forward pass would have it: of an image and of its result, in each group, and groups."""

    images: int
    results: int
    groups: int


def channels_of(op: Op, graph: Graph) -> Channels | None:
    """Those of a convolution or of its gradient; None for any other operation."""
    if op.primitive != "conv_general_dilated":
        return None
    numbers = op.params["dimension_numbers"]
    lhs, rhs = (graph.values[v].shape for v in op.operands[:2])
    groups = max(op.params["feature_group_count"], op.params["batch_group_count"])
    if is_kernels_gradient(graph, op):
        images, results = lhs[numbers.lhs_spec[0]], rhs[numbers.rhs_spec[0]]
    else:
        images, results = rhs[numbers.rhs_spec[1]] * groups, rhs[numbers.rhs_spec[0]]
    return Channels(max(images // groups, 1), max(results // groups, 1), groups)


def convolution_seconds(
    flops: npt.ArrayLike, bytes: npt.ArrayLike, dtype: str, channels: Channels, profile: Profile
) -> npt.NDArray[np.float64]:
    """Least seconds of a convolution whose channels keep it from the tensor cores' rate; 0 where they don't.

    Args:
      flops, bytes: of one device, without padding.
      dtype: NumPy name of the operands' dtype.
    """
    seconds = np.zeros(np.broadcast_shapes(np.shape(flops), np.shape(bytes)))
    if profile.unaligned_efficiency is None or profile.depthwise_efficiency is None:
        return seconds
    if channels.groups > 1:
        if channels.images > 1:
            return seconds
        rate = profile.hbm_bytes_per_s * profile.depthwise_efficiency
        return np.asarray(seconds + np.asarray(bytes, np.float64) / rate)
    aligned = _ALIGNED_BYTES // np.dtype(dtype).itemsize
    if channels.images % aligned == 0 or not _on_tensor_cores(dtype, profile):
        return seconds
    padded = np.asarray(flops, np.float64) * math.ceil(channels.images / aligned) * aligned / channels.images
    return np.asarray(seconds + padded / (profile.peak_for(dtype) * profile.unaligned_efficiency))


def unaligned(row_bytes: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Whether rows of so many bytes keep a product from the fast kernels; short ones lie together with others."""
    size = np.asarray(row_bytes, np.float64)
    return np.asarray((size > _ALIGNED_BYTES) & (size % _ALIGNED_BYTES != 0))


def _on_tensor_cores(dtype: str, profile: Profile) -> bool:
    """Whether products of this NumPy dtype are."""
    return profile.flops_class(dtype) not in ("f32", "f64", None)


def unaligned_seconds(
    flops: npt.ArrayLike, made_s: npt.ArrayLike, dtype: str, profile: Profile
) -> npt.NDArray[np.float64]:
    """Of a product of such rows that would take `made_s` without them, as it does outside tensor cores; dtype: NumPy
    name of its operands'."""
    shares = profile.unaligned_flops_share, profile.unaligned_hbm_share
    if shares[0] is None or shares[1] is None or not _on_tensor_cores(dtype, profile):
        return np.asarray(made_s, np.float64)
    rate = profile.peak_for(dtype) * profile.matmul_efficiency * shares[0]
    return np.maximum(np.asarray(flops) / rate, np.asarray(made_s) / shares[1])


def operation_seconds(
    op: Op,
    graph: Graph,
    options: Strategies,
    axes: MeshAxes,
    work: tuple[np.ndarray, np.ndarray, np.ndarray],
    whole: np.ndarray,
    profile: Profile,
) -> np.ndarray:
    """`float64[n]`: seconds of an operation under every strategy.

    Args:
      work: `float64[n]` each, of one device: arithmetic, bytes moved, and the seconds that they take by the rates.
      whole: `bool[n]`: no product that is split, see `split_k`: XLA pads the rows of those.
    """
    flops, bytes, made_s = work
    dtype = graph.values[op.operands[0]].dtype if op.operands else ""
    channels = channels_of(op, graph)
    if channels is not None:
        return np.maximum(made_s, convolution_seconds(flops, bytes, dtype, channels, profile))
    if op.primitive == "dot_general":
        odd = np.zeros(len(options), bool)
        for value, places in zip((*op.operands, *op.results), (*options.operands, *options.results), strict=True):
            tensor = graph.values[value]
            rows = [d for d, size in enumerate(tensor.shape) if size > 1][-1:]
            if rows:
                odd |= unaligned(local_sizes(tensor.shape, places, axes)[:, rows[0]] * tensor.item_bytes)
        return np.where(odd & whole, unaligned_seconds(flops, made_s, dtype, profile), made_s)
    if profile.atomic_s is not None and op.primitive in _ADDING and not op.params.get("unique_indices"):
        place, tries = 2, 1.0
        if op.primitive == _POOLING:
            place, tries = 0, math.prod(op.params["window_dimensions"]) / math.prod(op.params["window_strides"])
        elements = math.prod(graph.values[op.operands[place]].shape)
        return made_s + profile.atomic_s * max(tries, 1.0) * elements / pieces(options.operands[place], axes)
    return made_s
