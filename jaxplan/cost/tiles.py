"""Bytes of a tensor in a device's memory, padded as XLA for TPU pads.

XLA for TPU lays the last two physical dimensions of a tensor out in tiles of 8 x 128 elements ("Tiled layout",
openxla.org/xla/tiled_layout) and chooses which dimensions those are. A tile has fewer rows where the dimension does,
but as many at least as four bytes hold of its elements: f32[512, 1, 128] lies in tiles of one row in the order of its
dimensions, bf16[512, 1, 128] of two, which would double it, and so with its 512 in rows (arguments of 16 shapes in f32,
bf16 and int8 compiled for v5e, jax 0.10.2, libtpu 0.0.42.1). The choice that pads least is assumed, but for what is
gathered and scattered in whole rows: those lie with the elements of a row side by side, as many lanes as that fills. So
do the tables that rows are gathered from and added to, where that pads them little or leaves them small (tables and
rows of 2 to 64 columns compiled for v5e, jax 0.10.2, libtpu 0.0.42.1), and rows lie as their table does: f32[123718656,
16] of a graph's 2,449,408 nodes takes 7.9 GB, not 63; bags of 8 of 32 columns do not, f32[32768, 8, 32] from
f32[1000000, 32] takes 134 MB and not 34, but those of 32768 do; a piece of one column is no row and pads least (a graph
attention network whose heads are cut). The result of an all_gather lies with the gathered dimension outermost, the
others in order: 12 heads of 64 columns in tiles of 16 x 128, 2.7 times their bytes (T5's new parameters, gathered for
the next step, and those of a GPT block). Of several dimensions at once the pieces lie one after the other, each as it
was: f32[650, 4, 650] of eight pieces as [5200, 1, 325] (an LSTM).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from ..ir import Value
from ..sharding import UNREDUCED, MeshAxes, pieces


@dataclass(frozen=True)
class Table:
    """A table that `places` rows are added to: from jax 0.11 on XLA keeps it in rows, too, where a device's part takes
    at most `most` bytes so and wastes at most `_WASTE_A_ROW` rows for each that is added.

    How many of them a device adds is not known here; all are counted.
    """

    places: int
    most: float


@dataclass(frozen=True)
class RowsOf:
    """Rows that are taken from tables, or added to them: in tiles of the last dimensions where one of the tables is.

    Where `listed`, they are one list of rows of several dimensions: else in the tiles of their last dimensions that pad
    least, for the list is in order only so.  Where `brief`, they lie in rows only while they are taken or added, with
    as much room then.
    """

    tables: tuple[tuple[Value, Tiling], ...]
    listed: bool = False
    brief: bool = False


Tiling = Literal["any", "rows", "table"] | Table | RowsOf | tuple[int, int] | frozenset[int]
"""Which dimensions lie in tiles: those that pad least, the last ones, or the last ones of a table (see the module, and
`Table`); a pair of dimensions: the second one in lanes, or the first one with the second in rows (see `images`); a set:
those of them that pad least (see `written`), one alone in lanes (see `sliced`)."""

LANES, SUBLANES = 128, 8
"""Columns and rows of a TPU's memory tile, see `device_bytes`."""

_REMEMBERED = 2**16
"""Layouts of shapes whose bytes are remembered."""

_TABLE_WASTE, _TABLE_BYTES = 2, 2**27
"""Tables lie in rows where that takes at most so many times the least, or so many bytes more: 102 MB instead of 2,
146.5 instead of 18.3 and 512 instead of 256 were seen, 146 instead of 2 and 512 instead of 65 not (v5e has 128 MiB of
vector memory)."""

_WASTE_A_ROW = 240
"""How many rows a table may waste for each that is added: to 1,000,000 rows of 2, 16 and 32 columns 4097, 3641 and 3121
are added in rows, eight fewer are not; so to 1,500,000 of 8 and 600,000 of 32, in bf16, and on v5p and v6e (compiled
for v5e, jax 0.12.0.1, libtpu 0.0.50.1, 2026-11-29; bags on 0.0.48.1 of jax 0.11.2)."""


def device_bytes(
    tensor: Value, places: np.ndarray, axes: MeshAxes, platform: str, tiling: Tiling = "any"
) -> np.ndarray:
    """`int64[n]`: bytes that one device needs for its part of `tensor` under each layout of a place array; none of what
    lies in the host's memory.

    Args:
      platform: "tpu", "gpu" or "cpu"; tiling: which dimensions of a TPU's tensor lie in tiles, see the module.
    """
    if tensor.host:
        return np.zeros(len(places), np.int64)
    whole = np.ceil(tensor.bytes / pieces(places, axes)).astype(np.int64)
    if tensor.narrowed:  # a device's share of a sum is not
        whole = np.where((places == UNREDUCED).any(axis=1), 2 * whole, whole)
    rank = len(tensor.shape)
    if platform != "tpu" or rank < 2:
        return whole
    sizes = local_sizes(tensor.shape, places, axes)
    waste = padding(sizes, tensor.item_bytes)
    least = waste.min(axis=(1, 2))
    if isinstance(tiling, tuple):
        batch, channels = tiling
        least = np.minimum(waste[:, channels].min(axis=1), waste[:, batch, channels])
    if isinstance(tiling, frozenset):
        dims = sorted(tiling)
        least = waste[:, dims][:, :, dims if len(dims) > 1 else range(rank)].min(axis=(1, 2))
    if isinstance(tiling, (RowsOf, Table)) or tiling in ("rows", "table"):
        # a dimension of which a device has one place lies wherever it pads nothing
        second = np.where(sizes[:, :-1] > 1, np.arange(rank - 1), 0).max(axis=1)
        in_rows = np.where(sizes[:, -1] > 1, waste[np.arange(len(places)), rank - 1, second], least)
        kept = np.full(len(places), tiling == "rows")
        if tiling == "table" or isinstance(tiling, Table):
            kept = _kept_in_rows(waste, whole, sizes, tiling)
        elif isinstance(tiling, RowsOf):
            for table, lies in tiling.tables:  # whole but for its columns, which are cut as its rows' are
                columns = sizes[:, -1:]
                others = np.full_like(columns, math.prod(table.shape[:-1]))
                bytes_ = table.item_bytes * (others * columns)[:, 0]
                of_table = np.concatenate([others, columns], axis=1)
                kept |= _kept_in_rows(padding(of_table, table.item_bytes), bytes_, of_table, lies)
            if tiling.listed:
                least = np.minimum(waste[:, rank - 1, rank - 2], waste[:, rank - 2, rank - 1])
        least = np.where(kept, in_rows, least)
    return np.asarray(np.ceil(whole * least), np.int64)


def local_bytes(tensor: Value, row: np.ndarray, axes: MeshAxes, platform: str, tiling: Tiling = "any") -> int:
    """`device_bytes` of one layout row."""
    if tensor.host:
        return 0
    return _local_bytes(
        tensor.shape, tensor.item_bytes, tensor.narrowed, tuple(row.tolist()), axes, platform, tiling
    )  # fmt: skip


@lru_cache(_REMEMBERED)
def _local_bytes(
    shape: tuple[int, ...], item_bytes: float, narrowed: bool, row: tuple[int, ...], axes: MeshAxes, platform: str,
    tiling: Tiling,
) -> int:  # fmt: skip
    """Of tensors of one shape: a step's memory is looked at many times, and its layers are alike."""
    tensor = Value(index=-1, shape=shape, dtype="", item_bytes=item_bytes, name="", narrowed=narrowed)
    return int(device_bytes(tensor, np.array([row], np.int64).reshape(1, -1), axes, platform, tiling)[0])


def lies_in_rows(table: Value, row: np.ndarray, axes: MeshAxes, tiling: Tiling = "table") -> bool:
    """Whether a table in this layout lies with the elements of a row side by side, see the module.

    Args:
      tiling: "table", or what is added to it.
    """
    if len(table.shape) < 2:  # a list of numbers has no rows
        return False
    whole, sizes = np.ceil(table.bytes / pieces(row[None], axes)), local_sizes(table.shape, row[None], axes)
    return bool(_kept_in_rows(padding(sizes, table.item_bytes), whole, sizes, tiling)[0])


def _kept_in_rows(waste: np.ndarray, bytes_: np.ndarray, sizes: np.ndarray, tiling: Tiling) -> np.ndarray:
    """`bool[n]`: whether tables of that waste (see `padding`) are padded little so or are small, or much is added."""
    least, in_rows = waste.min(axis=(1, 2)), waste[:, -1, -2]
    kept = (in_rows <= _TABLE_WASTE * least) | (bytes_ * (in_rows - least) <= _TABLE_BYTES)
    if isinstance(tiling, Table):
        added = SUBLANES * math.ceil(tiling.places / SUBLANES)
        enough = (1 - least / in_rows) * sizes[:, :-1].prod(axis=1) <= _WASTE_A_ROW * added
        kept |= enough & (bytes_ * in_rows <= tiling.most)
    return np.asarray(kept)


def gathered_bytes(
    tensor: Value, before: np.ndarray, after: np.ndarray, axes: MeshAxes, platform: str
) -> np.ndarray:
    """`int64[a, b]`: bytes of an all_gather's result that has to be copied to where the tensor lies; 0: need not be.

    Args:
      before, after: place arrays; what is gathered are the dimensions that an axis cuts before and not after.
    """
    rank = len(tensor.shape)
    found = np.zeros((len(before), len(after)), np.int64)
    if platform not in ("tpu", "gpu") or rank < 2 or tensor.host:
        return found
    there, then = before[:, None, :], after[None, :, :]
    gathered = np.where((there >= 0) & (then != there), there, -1)
    dims = gathered.max(axis=2)
    waste = padding(local_sizes(tensor.shape, after, axes), tensor.item_bytes)
    local = tensor.bytes / pieces(after, axes)
    for dim in set(dims.reshape(-1).tolist()) - {-1}:
        if platform == "gpu":
            copied = device_bytes(tensor, after, axes, platform) * (dim > 0)
        else:
            *_, row, lane = (dim, *(d for d in range(rank) if d != dim))
            in_place = (dim == 0) & (waste[:, rank - 1, rank - 2] == waste.min(axis=(1, 2)))
            copied = np.where(in_place, 0, np.ceil(local * waste[:, lane, row])).astype(np.int64)
        found = np.where(dims == dim, copied, found)
    if platform == "tpu":
        several = sum((gathered == dim).any(axis=2).astype(int) for dim in range(rank)) > 1
        as_it_was = padding(local_sizes(tensor.shape, before, axes), tensor.item_bytes)[:, rank - 1, rank - 2]
        found = np.where(several, np.round(local * as_it_was[:, None]), found).astype(np.int64)
    return found


def tiles_of_rows(tensor: Value, places: np.ndarray, axes: MeshAxes, item_bytes: float) -> np.ndarray:
    """`float64[n]`: how many times more tiles an argument or a result, of elements of `item_bytes`, has than one
    whose tiles are of eight rows.

    It lies in row-major order or, where that would pad it more, in the order that pads it least, of equals the one that
    fills most rows: a table of which a device has two columns, f32[10131232, 2], in tiles of 2 x 128.
    """
    rank = len(tensor.shape)
    if rank < 2:
        return np.ones(len(places))
    sizes = local_sizes(tensor.shape, places, axes)
    waste = padding(sizes, item_bytes)
    least = waste.min(axis=(1, 2))
    more = SUBLANES / np.minimum(2 ** np.ceil(np.log2(sizes)), SUBLANES)
    fullest = np.where(waste <= least[:, None, None], more[:, None, :], np.inf).min(axis=(1, 2))
    in_order = waste[:, rank - 1, rank - 2] <= least
    return np.asarray(np.where(in_order, more[:, rank - 2], fullest))


def lane_and_row(tensor: Value, places: np.ndarray, axes: MeshAxes) -> tuple[int, int]:
    """Which dimensions of an argument or a result of two dimensions or more fill tiles, of one layout: see
    `tiles_of_rows`."""
    rank = len(tensor.shape)
    waste = padding(local_sizes(tensor.shape, places, axes), tensor.item_bytes)[0]
    if waste[rank - 1, rank - 2] <= waste.min():
        return rank - 1, rank - 2
    lane, row = np.unravel_index(int(waste.argmin()), waste.shape)
    return int(lane), int(row)


def local_sizes(shape: tuple[int, ...], places: np.ndarray, axes: MeshAxes) -> np.ndarray:
    """`float64[n, rank]`: the dimensions of one device's part."""
    if len(places) == 1:
        return np.array([local_shape(shape, places[0], axes)])
    local = np.broadcast_to(np.array(shape, np.float64), (len(places), len(shape))).copy()
    for axis, (_, size) in enumerate(axes):
        cut = np.flatnonzero(places[:, axis] >= 0)
        local[cut, places[cut, axis]] /= size
    return np.maximum(np.ceil(local), 1)


def local_shape(shape: tuple[int, ...], row: np.ndarray, axes: MeshAxes) -> list[float]:
    """`local_sizes` of one layout row."""
    local = [float(size) for size in shape]
    for (_, size), dim in zip(axes, row.tolist(), strict=False):
        if dim >= 0:
            local[dim] /= size
    return [float(max(math.ceil(size), 1)) for size in local]


def padding(local: np.ndarray, item_bytes: float) -> np.ndarray:
    """`float64[n, rank, rank]`: how many times its bytes a part of these sizes takes with one dimension in lanes and
    another in rows, of elements of `item_bytes`."""
    rank = local.shape[1]
    lanes = np.ceil(local / LANES) * LANES / local
    # a tile of fewer rows is used where the dimension has fewer, 1, 2 or 4, but not less than 4 bytes of a column
    few = np.maximum(2 ** np.ceil(np.log2(local)), min(max(4 / item_bytes, 1), SUBLANES))
    rows = np.where(local > 4, np.ceil(local / SUBLANES) * SUBLANES, few) / local
    waste = lanes[:, :, None] * rows[:, None, :]
    waste[:, range(rank), range(rank)] = np.inf
    return np.asarray(waste)
