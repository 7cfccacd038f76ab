"""Copies that a TPU makes where collectives make the next value of a donated argument.

XLA for TPU lets no collective write into the caller's buffers: what an all_gather or an exchange makes is copied into
the argument's place at the end of the step, and the argument out of it at the beginning, whichever dimension is
gathered and whatever reads it (weights of an MLP and a GPT, and stacks of weights, under ZeRO-1, compiled for v5e, jax
0.10.2, libtpu 0.0.42.1: f32[4096, 8192] takes 408 us for each copy).  Of pieces that are no whole tiles there is one
copy, which brings them into order (f32[50400, 192] and f32[1536, 6300] of a language model).  What vector memory holds
is brought there and back beside other kernels, which takes no time; so most of what fits was seen to be.

The argument's place is free from the first copy to the second, and other buffers lie there, see `packing.lent`: of the
weights of that model 1.9 GB are copied, and take 0.45 GB more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..ir import Graph, Value, settled_values
from ..sharding import MeshAxes
from .tiles import LANES, SUBLANES, device_bytes, gathered_bytes, lane_and_row, local_sizes


def copied_back(
    tensor: Value, before: np.ndarray, after: np.ndarray, axes: MeshAxes, room_bytes: float
) -> np.ndarray:
    """`int64[a, b]`: bytes that are copied out at the beginning and in at the end; 0 where vector memory holds them.

    Args:
      before, after: place arrays; what is gathered are the dimensions that an axis cuts before and not after.
    """
    there, then = before[:, None, :], after[None, :, :]
    gathered = ((there >= 0) & (then != there)).any(axis=2)
    if not gathered.any():  # most arguments: their padded sizes need not be known
        return np.zeros(gathered.shape, np.int64)
    whole = device_bytes(tensor, after, axes, "tpu")
    return np.where(gathered & (whole > room_bytes)[None, :], whole[None, :], 0)


class BackAndForth(NamedTuple):
    """What copies an argument takes.

    Attributes:
      value: its next value.
      out: until when what is copied out of the argument is read, and its bytes.
      back: (start, stop, bytes) of what is gathered, where nothing else copies that.
    """

    value: int
    out: tuple[int, int] | None
    back: tuple[int, int, int] | None


def back_and_forth(
    graph: Graph,
    axes: MeshAxes,
    room_bytes: float,
    times: Sequence[int],
    needed: Sequence[int],
    values: Mapping[int, np.ndarray],
) -> Iterator[BackAndForth]:
    """The copies of arguments whose next values are gathered.

    Args:
      room_bytes: what is taken to be held in vector memory; 0 where that is told by what else there is.
    """
    uses, producers = graph.uses(), graph.producers()
    for value, argument in settled_values(graph).items():
        if producers[value] < 0 or value not in values or argument not in values:
            continue
        tensor, made, kept = graph.values[value], values[value][None], values[argument][None]
        size = int(copied_back(tensor, made, kept, axes, room_bytes)[0, 0])
        if size:
            start = times[producers[value]]
            # what is gathered comes when all of it is read; else it is left where it lies
            read = max((needed[index] for index, _ in uses[argument]), default=0) <= start + 1
            own = gathered_bytes(tensor, made, kept, axes, "tpu")[0, 0]
            yield BackAndForth(
                value=value,
                out=(start, size) if read and _in_whole_tiles(tensor, made, kept, axes) else None,
                back=None if own else (start, len(graph.ops), size),
            )


def _in_whole_tiles(tensor: Value, made: np.ndarray, kept: np.ndarray, axes: MeshAxes) -> bool:
    """Whether pieces are gathered as they lie in the argument: what else brings them into order writes to its place."""
    rank = len(tensor.shape)
    if rank < 2:
        return True
    lane, row = lane_and_row(tensor, kept, axes)
    gathered = {int(dim) for dim, then in zip(made[0], kept[0], strict=True) if dim >= 0 and then != dim}
    piece = local_sizes(tensor.shape, made, axes)[0]
    tiles = {lane: LANES, row: SUBLANES}
    return all(piece[dim] % tiles.get(dim, 1) == 0 for dim in gathered)
