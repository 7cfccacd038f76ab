"""Sums that XLA for TPU makes whole on every device and then cuts, though each device wants a piece.

It scatters a sum in whole tiles of the layout in which the piece lies: the one that pads the piece least, of equals the
one with the last dimension in lanes and the last but one in rows.  Where the dimension that is scattered lies in lanes,
a piece has to be whole lane tiles long, of 2-byte elements an even number of them (two rows are packed into one); where
it lies in rows, whole tiles of 8 rows, of 2-byte elements 16 unless it is the outermost dimension.  Any other dimension
is scattered always.  (Products of 60 shapes of two to four dimensions, scattered over all and parts of v5e 2x4, v5p
2x2x2 and v6e 4x4, jax 0.10.2, libtpu 0.0.42.1.)
"""

from __future__ import annotations

import numpy as np

from ..ir import Value
from ..sharding import MeshAxes
from .tiles import LANES, SUBLANES, local_sizes, padding


def made_whole(tensor: Value, places: np.ndarray, axes: MeshAxes) -> np.ndarray:
    """`bool[n, rank]`: of pieces of `tensor` under each layout of a place array, whether a sum scattered onto each of
    the dimensions is made whole.  Sums of what is `narrowed` are of f32; of other than 2 and 4 bytes nothing is known.
    """
    rank, item_bytes = len(tensor.shape), 4 if tensor.narrowed else tensor.item_bytes
    whole = np.zeros((len(places), rank), bool)
    if rank < 2 or item_bytes not in (2, 4):
        return whole
    sizes, every = local_sizes(tensor.shape, places, axes), np.arange(len(places))
    backwards = np.round(padding(sizes, item_bytes), 6)[:, ::-1, ::-1].reshape(len(places), -1).argmin(axis=1)
    lane, row = rank - 1 - backwards // rank, rank - 1 - backwards % rank
    packed = 2 if item_bytes == 2 else 1
    outermost = sizes.prod(axis=1) == sizes[every, lane] * sizes[every, row]
    whole[every, lane] = sizes[every, lane] % (packed * LANES) != 0
    whole[every, row] = sizes[every, row] % (np.where(outermost, 1, packed) * SUBLANES) != 0
    return whole
