"""How much memory buffers take when they are laid out: more than what is alive at once, for they leave gaps.

XLA gives every buffer one offset for its whole life.  For GPU its heap simulator places the largest first, each in the
smallest gap that is free for all of its life, else on top (`GlobalDecreasingSizeBestFitHeap`,
xla/service/heap_simulator/heap_simulator.h), once by size and once by size and length of life, and keeps the better.
XLA for TPU places them in the order of the program: in Llama compiled for v5p the gradient of the head, 66 MB, lies on
top of the 2.1 GB of logits that it is made of, and leaves a gap of 1.1 GB below the next layer's scores (libtpu
0.0.42.1).  Each takes a multiple of 16 KiB, above the tables of results (see `ledger`): so placed, XLA's own buffers
with their own lives are as high as XLA has them, within 0.1 %, in 25 of 26 networks' steps compiled for v5e, v5p and
v6e.  What statistics of a few bytes lie between those that are freed decides over gaps of up to a fifth there; which
ones do, and from when on, is not known well enough here: with all of ours placed, gaps came nearer to XLA's in some
networks, and went further off in others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_LENT = 1e-2
"""Buffers under this share of the largest place are not looked for in places that are lent."""

_SMALL = 1e-4
"""Buffers under this share of all bytes fill gaps: they are not placed."""

_NONE = (np.zeros(0, np.int64),) * 3


def gap_bytes(buffers: Sequence[tuple[int, int, int]], platform: str) -> int:
    """Bytes by which buffers, each (start, stop, bytes), take more laid out as XLA does than are ever alive at once."""
    start, stop, size = _columns(buffers)
    large = size >= _SMALL * size.sum()
    start, stop, size = start[large], stop[large], size[large]
    if not len(size):
        return 0
    by_size = np.lexsort((start, start - stop, -size))
    by_life = np.lexsort((start, -size, start - stop))
    in_order = np.lexsort((size, start - stop, start))
    orders = [in_order] if platform == "tpu" else [by_size, by_life]
    placed = min(_place(start[order], stop[order], size[order]) for order in orders)
    return placed - _most_alive(start, stop, size)


def lent(buffers: Sequence[tuple[int, int, int]], copied_out: Sequence[int]) -> list[int]:
    """The buffers, each (start, stop, bytes), that lie in places of arguments which were copied out of them.

    A donated argument's place is its own until it is copied out of it, and free until it is written at the end: XLA,
    which places the largest first, puts each buffer into the smallest such place that is free for all of its life
    (`BufferAssigner::AssignSingleHloBuffer`, xla/service/buffer_assignment.cc), copies of other arguments among them.
    So does libtpu 0.0.42.1; 0.0.50.1 puts nothing there (`PLACES_ARE_LENT`).

    Args:
      copied_out: which of `buffers` are those copies, in the order in which they are made.
    """
    order = {buffer: at for at, buffer in enumerate(copied_out)}
    sizes = [buffers[buffer][2] for buffer in copied_out]
    smallest_first = sorted(range(len(sizes)), key=sizes.__getitem__)
    least = _LENT * max(sizes, default=0)
    there: list[list[tuple[int, int]]] = [[] for _ in sizes]
    found = []
    for buffer in sorted((i for i, one in enumerate(buffers) if one[2] >= least), key=lambda i: -buffers[i][2]):
        start, stop, size = buffers[buffer]
        for place in smallest_first:
            free = all(stop <= other_start or other_stop <= start for other_start, other_stop in there[place])
            if sizes[place] >= size and free and place < order.get(buffer, len(sizes)):
                there[place].append((start, stop))
                found.append(buffer)
                break
    return found


def most_alive(buffers: Sequence[tuple[int, int, int]]) -> int:
    """Bytes of buffers, each (start, stop, bytes), that are alive at once."""
    return _most_alive(*_columns(buffers)) if buffers else 0


def _columns(buffers: Sequence[tuple[int, int, int]]) -> tuple[np.ndarray, ...]:
    return tuple(np.array(column, np.int64) for column in zip(*buffers, strict=True)) if buffers else _NONE


def _most_alive(start: np.ndarray, stop: np.ndarray, size: np.ndarray) -> int:
    delta = np.zeros(int(stop.max()) + 1, np.int64)
    np.add.at(delta, start, size)
    np.subtract.at(delta, stop, size)
    return int(np.cumsum(delta).max())


def _place(start: np.ndarray, stop: np.ndarray, size: np.ndarray) -> int:
    """The highest end of buffers placed in this order, each in the tightest gap."""
    offset = np.zeros(len(size), np.int64)
    top = 0
    for i in range(len(size)):
        others = np.flatnonzero((start[:i] < stop[i]) & (start[i] < stop[:i]))
        if len(others):
            others = others[np.argsort(offset[others], kind="stable")]
            ends = np.maximum.accumulate(offset[others] + size[others])
            gap_starts = np.concatenate(([0], ends[:-1]))
            gaps = offset[others] - gap_starts
            fits = np.flatnonzero(gaps >= size[i])
            offset[i] = gap_starts[fits[np.argmin(gaps[fits])]] if len(fits) else ends[-1]
        top = max(top, int(offset[i] + size[i]))
    return top
