"""Seconds of local compute: a roofline with a floor.

  seconds = max( flops / (peak * efficiency),  bytes / (memory rate * efficiency),  op overhead )

Williams et al., "Roofline" (CACM 2009).  The peak is that of the matrix unit for a matrix product, with
dims below its tile padded up to it (a 16-wide sum costs a 128-wide one on a 128-wide unit), and of the
vector unit for everything else; where padding makes that faster, on GPU, for a product, too (convolutions of
one channel a group, which cuDNN doesn't give to the tensor cores).  All arguments may be NumPy arrays, one
entry a strategy: a planner prices thousands at once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..hardware import Profile

Array = npt.NDArray[np.float64]
Dims = tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]
BOUNDS: tuple[str, ...] = ("flops", "hbm", "overhead")


def padding_factor(dims: Dims, tile: int, rows: int | None = None) -> Array:
    """How many times more arithmetic a matrix unit does because dims below its tile are padded: >= 1.

    A TPU's unit holds a tile of one operand, whose dims are those that are summed and one other, and the rows of the
    other operand run through it: few of them are padded to fewer.

    Args:
      dims: local (m, n, k) of the product, each a number or an array; batch dims are not padded.
      tile, rows: `Profile.matmul_tile` and `Profile.matmul_rows`.
    """
    m, n, k = (np.maximum(np.asarray(dim, np.float64), 1.0) for dim in dims)
    factor = np.ones(())
    for local, least in ((np.minimum(m, n), tile if rows is None else rows), (np.maximum(m, n), tile), (k, tile)):
        factor = factor * (np.maximum(local, least) / local)
    return factor


def _terms(
    flops: npt.ArrayLike,
    bytes: npt.ArrayLike,
    dtype: str,
    profile: Profile,
    *,
    matmul: bool,
    dims: Dims | None,
) -> tuple[Array, Array, float]:
    work = np.asarray(flops, np.float64)
    if matmul:
        rate = profile.peak_for(dtype) * profile.matmul_efficiency
        if dims is not None:
            work = work * padding_factor(dims, profile.matmul_tile, profile.matmul_rows)
    else:
        rate = profile.vector_flops_per_s
    compute_s = work / rate
    if matmul and profile.kind == "gpu":
        vector_rate = profile.vector_flops_per_s * profile.matmul_efficiency
        compute_s = np.minimum(compute_s, np.asarray(flops, np.float64) / vector_rate)
    traffic = np.asarray(bytes, np.float64)
    return compute_s, traffic / (profile.hbm_bytes_per_s * profile.hbm_efficiency), profile.op_overhead_s


def roofline_seconds(
    flops: npt.ArrayLike,
    bytes: npt.ArrayLike,
    dtype: str,
    profile: Profile,
    *,
    matmul: bool,
    dims: Dims | None = None,
) -> Array:
    """Seconds of an operation on one device, of the arguments' broadcast shape.

    Args:
      flops: arithmetic of the local operation.
      bytes: memory that it reads and writes.
      dtype: NumPy name of the operands' dtype; decides the peak of a matrix product.
      profile: the device.
      matmul: runs on the matrix unit.
      dims: of a matrix product, local (m, n, k), each a number or an array; None: no padding is priced.
    """
    compute_s, memory_s, floor_s = _terms(flops, bytes, dtype, profile, matmul=matmul, dims=dims)
    return np.maximum(np.maximum(compute_s, memory_s), floor_s)


def bound_by(
    flops: npt.ArrayLike,
    bytes: npt.ArrayLike,
    dtype: str,
    profile: Profile,
    *,
    matmul: bool,
    dims: Dims | None = None,
) -> npt.NDArray[np.str_]:
    """Which term of `roofline_seconds` decides, of its shape: one of `BOUNDS`."""
    compute_s, memory_s, floor_s = _terms(flops, bytes, dtype, profile, matmul=matmul, dims=dims)
    terms = np.stack(np.broadcast_arrays(compute_s, memory_s, np.float64(floor_s)))
    return np.array(BOUNDS)[np.argmax(terms, axis=0)]
