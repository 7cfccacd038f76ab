"""Copies that a TPU makes where collectives make the next value of a donated argument.

XLA for TPU lets no collective write into the caller's buffers: what an all_gather or an exchange makes is copied into
the argument's place at the end of the step, and the argument out of it at the beginning, whichever dimension is
gathered and whatever reads it (weights of an MLP and a GPT, and stacks of weights, under ZeRO-1, compiled for v5e, jax
0.10.2, libtpu 0.0.42.1: f32[4096, 8192] takes 408 us for each copy).  What vector memory holds is brought there and
back beside other kernels, which takes no time; so most of what fits was seen to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..ir import Graph, Value, settled_values
from ..sharding import MeshAxes
from .tiles import device_bytes, gathered_bytes


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


def back_and_forth(
    graph: Graph,
    axes: MeshAxes,
    room_bytes: float,
    times: Sequence[int],
    needed: Sequence[int],
    values: Mapping[int, np.ndarray],
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of arguments' copies, and of what is gathered where nothing else copies that."""
    uses, producers = graph.uses(), graph.producers()
    for value, argument in settled_values(graph).items():
        if producers[value] < 0 or value not in values or argument not in values:
            continue
        tensor, made, kept = graph.values[value], values[value][None], values[argument][None]
        size = int(copied_back(tensor, made, kept, axes, room_bytes)[0, 0])
        if size:
            start = times[producers[value]]
            if max((needed[index] for index, _ in uses[argument]), default=0) <= start + 1:
                yield 0, start, size  # what is gathered comes when all of it is read; else it is left where it lies
            if not gathered_bytes(tensor, made, kept, axes, "tpu")[0, 0]:
                yield start, len(graph.ops), size
