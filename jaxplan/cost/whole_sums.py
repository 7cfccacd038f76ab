"""Sums that XLA for TPU makes whole on every device and then cuts, though each device wants a piece.

It scatters a sum in whole tiles of the layout in which the piece lies: the one that pads it least.  Of equals, a
product's result has the last dimension of its second operand in lanes and the last one of its first in rows, or the
other way round; a convolution's the channels in lanes and the batch in rows, the other way round, or a dimension of
space in rows; any other tensor the last dimension in lanes and the last but one in rows.  So does a product of ragged
groups in any case, which a kernel of its own writes: bf16[65536, 768] onto 96 lanes is made whole.  The other
dimensions lie outside of the tiles, in their order, but for those that the piece has one element of: these may lie
anywhere.

Where the dimension that is scattered lies in lanes, a piece has to be whole lane tiles long, of 2-byte elements an even
number of them (two rows are packed into one); where it lies in rows, whole tiles of 8 rows, of 2-byte elements 16
unless it is the outermost dimension; dimensions of which a device has a single element may not be all that lies outside
of it (kernels of 1 x 1 convolutions, [1, 1, 512, 2048], or one of two critics, [2, 1536, 1536]); and outside of the
tiles it has to be the outermost one, so that a piece lies in one piece.  Beside scattered rows, lanes of more than 152
tiles are sent in chunks of as many tiles each, 152 at most; where only chunks of a few would do, as of BERT's 30522
words, whose 239 tiles are a prime number, the sum is made whole (products of 60 sizes of up to 708608 words: chunks of
32 tiles are too small, of 58 are not, v5e, f32 and bf16).  Lanes beside at most 16 rows are only halved, until a chunk
of each device and four more fit (57 sizes of 303 to 1024 tiles beside 8 and 16 rows, but for 393 beside 16: logits of
whisper's 51865 words for 64 sequences, 406 tiles, which a step that decodes sums).
(Products of 60 shapes of two to four dimensions, scattered over all and parts of v5e 2x4, v5p 2x2x2 and v6e
4x4, and of 200 more on v5e, 33 convolutions there, jax 0.10.2, libtpu 0.0.42.1.)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..ir import Value
from ..sharding import MeshAxes
from .tiles import LANES, SUBLANES, local_sizes, padding


def made_whole(tensor: Value, places: np.ndarray, axes: MeshAxes, devices: int) -> np.ndarray:
    """`bool[n, rank]`: of pieces of `tensor` under each layout of a place array, whether a sum of so many devices that
    is scattered onto each of the dimensions is made whole.  Sums of what is `narrowed` are of f32, of complex64 two of
    f32; of other than 2 and 4 bytes nothing is known.
    """
    rank, item_bytes = len(tensor.shape), 4 if tensor.narrowed or tensor.dtype == "complex64" else tensor.item_bytes
    whole = np.zeros((len(places), rank), bool)
    if rank < 2 or item_bytes not in (2, 4):
        return whole
    sizes, every = local_sizes(tensor.shape, places, axes), np.arange(len(places))
    lane, row = in_tiles(np.round(padding(sizes, item_bytes), 6), tensor)
    packed = 2 if item_bytes == 2 else 1
    outside = sizes > 1
    outside[every, lane] = outside[every, row] = False
    whole[:] = outside & (np.cumsum(outside, axis=1) > 1)
    whole[every, lane] = sizes[every, lane] % (packed * LANES) != 0
    whole[every, row] = sizes[every, row] % (np.where(outside.any(axis=1), packed, 1) * SUBLANES) != 0
    behind_ones = rank > 2 and ~outside.any(axis=1)
    few = (sizes[every, row] <= _FEW_ROWS) & _unhalved(sizes[every, lane], devices)
    whole[every, row] |= _unchunked(sizes[every, lane]) | few | behind_ones
    whole |= (sizes[every, row] <= SUBLANES // 2)[:, None]
    return whole


_CHUNK, _TOO_SMALL = 152, 32
"""Tiles of the largest chunk of lanes, and of the largest one that was not used."""
_FEW_ROWS, _HALVES, _MORE = 16, 1824, 4
"""Rows beside which lanes are only halved; tiles that all halves of chunks have; the chunks beside one a device."""


def _unchunked(lanes: np.ndarray) -> np.ndarray:
    """`bool[n]`: whether so many elements in lanes are no equal chunks of whole tiles."""
    found, tiles = np.zeros(len(lanes), bool), np.ceil(lanes / LANES).astype(int)
    for count in set(tiles[tiles > _CHUNK].tolist()):
        found[tiles == count] = all(count % chunk for chunk in range(_TOO_SMALL + 1, _CHUNK + 1))
    return found


def depends_on_devices(tensor: Value) -> bool:
    """Whether over how many devices a sum goes may matter to `made_whole`."""
    return max(tensor.shape, default=0) > _CHUNK * LANES


def _unhalved(lanes: np.ndarray, devices: int) -> np.ndarray:
    """`bool[n]`: whether so many elements in lanes cannot be halved, and again, to what fits among so many devices."""
    tiles, largest = np.ceil(lanes / LANES).astype(int), _HALVES // (_MORE + devices)
    odd = tiles // (tiles & -tiles).clip(1)
    return (tiles > _CHUNK) & ((odd > largest) | (tiles % 2 > 0))


def in_tiles(padded: np.ndarray, tensor: Value) -> tuple[np.ndarray, np.ndarray]:
    """A sum's dimensions in lanes and in rows; `padded`: `float[n, rank, rank]`, how much each choice of them pads."""
    rank = padded.shape[1]
    choices = [(lane, row) for lane in reversed(range(rank)) for row in reversed(range(rank))]
    if tensor.ordered:
        choices = [(rank - 1, rank - 2)]
    elif tensor.sides is not None:
        choices.sort(key=_unlike_a_product(tensor))
    elif tensor.image is not None:
        batch, channels, *space = tensor.image
        choices = [(channels, batch), (batch, channels), *((channels, d) for d in space)]
    lanes, rows = np.array(choices).T
    chosen = padded[:, lanes, rows].argmin(axis=1)
    return lanes[chosen], rows[chosen]


def _unlike_a_product(tensor: Value) -> Callable[[tuple[int, int]], int]:
    """How far (lane, row) is from where a product's dimensions lie."""
    first, second = tensor.sides or (0, 0)
    own = [d for d in range(first, second) if tensor.shape[d] > 1]
    other = [d for d in range(second, len(tensor.shape)) if tensor.shape[d] > 1]
    in_rows = next((d for d in reversed(own) if tensor.shape[d] % SUBLANES == 0), own[-1] if own else -1)
    in_lanes = other[-1] if other else -1

    def distance(choice: tuple[int, int]) -> int:
        lane, row = choice
        nearest = [(in_lanes, in_rows), (in_rows, in_lanes)]
        if choice in nearest:
            return nearest.index(choice)
        return 2 if lane in other and row in own else 3 if lane in own and row in other else 4

    return distance
