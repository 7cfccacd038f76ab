"""What XLA for TPU does to a sum that is scattered: make it whole and cut it (`whole_sums`), or round its pieces up.

It sends a piece in chunks of whole windows: of units of 8 rows, of 16 where the lanes are an odd number of tiles, for
every chunk is sent round the ring in two directions and halved along its lanes or else its rows; of twice as many over
four chips of a three-dimensional slice's 2 x 2.  One chunk of each device and four more, of f32 whatever is summed,
fill 95 % of the scoped vector memory but for 1 MiB: a chunk has 304 x 1024 elements on eight chips of v5e.  As few
chunks as do, all of one size: a piece of bf16[5632, 2048] on eight chips, 704 rows of 16 tiles, is 88 units in 5 chunks
of 18, 720 rows.  Each piece then begins where the ones before it left off, up to (devices - 1) times the excess too
late, and so many rows are moved on to the next device by a collective_permute.

(1556 matrices of f32 and bf16, of 128 to 18432 lanes, scattered over 2 to 32 chips of v5e 2x2 to 8x8, v5p 2x2x2 to
4x4x4 and v6e 2x4 to 8x8: all but two as said here, jax 0.10.2, libtpu 0.0.42.1, 2026-11-26.)  Tensors of more
dimensions are sent in pieces of their outer ones where these fit, and hardly rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..hardware import Profile, three_dimensional
from ..ir import Value
from ..sharding import NONE, UNREDUCED, MeshAxes, pieces
from .collectives import collective_terms
from .model import CostModel
from .tiles import LANES, SUBLANES, local_sizes, padding
from .whole_sums import depends_on_devices, in_tiles, made_whole

_CHUNKS, _SHARE, _KEPT_BYTES = 4, 0.95, 2**20
"""Chunks beside one of each device; the share of the scoped vector memory that they fill, but for so much."""


def sums_whole(model: CostModel, tensor: Value, places: np.ndarray, axes: MeshAxes, names: Sequence[str]) -> bool:
    """Whether a sum over some mesh axes that is scattered to the layout `places`, a row over `axes`, is made whole
    and cut; see `whole_sums`."""
    if model.profile.kind != "tpu" or len(tensor.shape) < 2:
        return False
    (whole,) = made_whole(tensor, places[None], axes, model.size_of(names))
    return any(dim >= 0 and bool(whole[dim]) for dim in _onto(places, axes, names))


def excess_bytes(model: CostModel, tensor: Value, places: np.ndarray, axes: MeshAxes, names: Sequence[str]) -> int:
    """By how much a piece of a sum over some mesh axes, scattered to the layout `places`, a row over `axes`, is rounded
    up; see the module."""
    onto = _onto(places, axes, names)
    if len(onto) != 1 or max(onto) < 0:
        return 0
    return int(_Pieces(model, tensor, places[None], axes).excess(names)[0, max(onto)])


def _onto(places: np.ndarray, axes: MeshAxes, names: Sequence[str]) -> set[int]:
    """The dimensions that these mesh axes cut; NONE among them where one cuts none."""
    return {int(place) for (name, size), place in zip(axes, places, strict=True) if size > 1 and name in names}


def excess_wire_bytes(excess: npt.ArrayLike, devices: int) -> np.ndarray:
    """What one device sends more where pieces are rounded up by so much: with the sum, and to move it on."""
    return 2.0 * (devices - 1) * np.asarray(excess, np.float64)


def excess_seconds(model: CostModel, excess: npt.ArrayLike, names: Sequence[str]) -> np.ndarray:
    """What it takes that the pieces of a sum over these mesh axes are so many bytes longer, hidden or not."""
    devices, longer, links = model.size_of(names), np.asarray(excess, np.float64), tuple(map(model.link, names))
    _, summed_s = collective_terms("reduce_scatter", links)
    start_s, moved_s = collective_terms("collective_permute", links)
    return np.where(longer > 0, start_s + longer * (devices * summed_s + (devices - 1) * moved_s), 0.0)


def scattering_seconds(
    model: CostModel, tail: np.ndarray, head: np.ndarray, tensor: Value, *, start_share: float = 1.0
) -> np.ndarray:
    """`float64[a, b]`: what sums that are made whole and cut, or scattered in rounded pieces, cost beyond a
    reduce_scatter."""
    more = np.zeros((len(tail), len(head)))
    if model.profile.kind != "tpu" or len(tensor.shape) < 2 or not (tail == UNREDUCED).any():
        return more
    axes, varies = model.axes, depends_on_devices(tensor)
    sizes = np.array([size for _, size in axes])
    scattered = (tail[:, None, :] == UNREDUCED) & (head >= 0)[None, :, :] & (sizes > 1)
    onto = np.where(scattered, head, NONE).max(axis=2)
    # onto several dimensions at once none is scattered, see `reshard`
    scattered &= (~scattered | (head == onto[:, :, None])).all(axis=2, keepdims=True)
    local = tensor.bytes * tensor.as_sent("all_reduce") / pieces(tail, axes)
    codes = scattered @ (1 << np.arange(len(sizes)))
    along = np.maximum(onto, 0)
    cut = _whole_onto(tensor, head, axes, 2, along)
    parts = _Pieces(model, tensor, head, axes)
    if not parts.matrix and not cut.any() and not varies:
        return more
    for code in np.flatnonzero(np.bincount(codes.reshape(-1), minlength=1)):
        over = tuple(i for i in range(len(sizes)) if code >> i & 1)
        if not over:
            continue
        extra, names = np.zeros(more.shape), tuple(axes[i][0] for i in over)
        if varies:
            cut = _whole_onto(tensor, head, axes, model.size_of(names), along)
        if parts.matrix:
            rounded = np.take_along_axis(parts.excess(names), along.T, axis=1).T
            extra = model.exposed * excess_seconds(model, rounded, names)
        if cut.any():
            whole_s = model.collective("all_reduce", local, over, start_share=start_share)
            whole_s = whole_s - model.collective("reduce_scatter", local, over, start_share=start_share)
            extra = np.where(cut, whole_s[:, None], extra)
        more += np.where(codes == code, extra, 0.0)
    return more


def _whole_onto(tensor: Value, head: np.ndarray, axes: MeshAxes, devices: int, along: np.ndarray) -> np.ndarray:
    """`bool[a, b]`: see `made_whole`, onto the dimension `along[a, b]` of layout b."""
    return np.take_along_axis(made_whole(tensor, head, axes, devices), along.T, axis=1).T


class _Pieces:
    """Pieces of a matrix under each layout of a place array, as they are sent.

    Attributes:
      matrix: whether it is one, of a type that is known; nothing else is rounded.
    """

    def __init__(self, model: CostModel, tensor: Value, places: np.ndarray, axes: MeshAxes) -> None:
        self.model, self.found = model, np.zeros((len(places), len(tensor.shape)))
        self.item_bytes = 4 if tensor.narrowed else tensor.item_bytes
        self.matrix = model.profile.kind == "tpu" and len(tensor.shape) == 2 and self.item_bytes in (2, 4)
        if self.matrix:
            self.every, sizes = np.arange(len(places)), local_sizes(tensor.shape, places, axes)
            lane, self.row = in_tiles(np.round(padding(sizes, self.item_bytes), 6), tensor)
            self.lanes, self.rows = sizes[self.every, lane], sizes[self.every, self.row]

    def excess(self, names: Sequence[str]) -> np.ndarray:
        """`float64[n, rank]`: bytes by which they are rounded up where a sum over these mesh axes is scattered, by
        dimension."""
        model, found = self.model, self.found.copy()
        if not self.matrix or model.compiled_kind("reduce_scatter", names) == "all_reduce":
            return found
        tiles = np.ceil(self.lanes / LANES)
        unit = SUBLANES * np.where(tiles % 2, 2, 1) * (2 if _square(model, names) else 1)
        units = np.ceil(self.rows / unit)
        at_once = np.maximum(_chunk(model.profile, model.size_of(names)) // (unit * tiles * LANES), 1)
        chunks = np.ceil(units / at_once)
        rounded = chunks * np.ceil(units / chunks) * unit
        found[self.every, self.row] = (rounded - self.rows) * self.lanes * self.item_bytes
        return found


def _chunk(profile: Profile, devices: int) -> int:
    """Elements of the largest chunk."""
    assert profile.scoped_bytes is not None
    return int(_SHARE * (profile.scoped_bytes - _KEPT_BYTES)) // (4 * (_CHUNKS + devices))


def _square(model: CostModel, names: Sequence[str]) -> bool:
    """Whether a sum over four devices goes over 2 x 2 chips of a slice of three dimensions."""
    sizes = [model.link(name).size for name in names]
    every = math.prod(size for _, size in model.axes)
    return three_dimensional(model.profile) and math.prod(sizes) == 4 and (max(sizes) == 2 or every <= 8)
