"""What a TPU's step keeps in the chip's vector memory and never has in main memory.

XLA for TPU gives a buffer a place there if one is free for all of its life, and if that is no longer than copying the
whole of vector memory takes `_LONGEST` times (xla/service/memory_space_assignment/prefetch_interval_picker.h, "max
overlap to mem size async copy ratio"); one that lives longer is copied out as soon as it is made. Kernels take as long
as their arithmetic and traffic, communication takes no time, and loops run `_ITERATIONS` times, whatever their number
of iterations; a life within a loop is one iteration's. What loops stack is given a place for the time before, in,
between and behind them, each by itself. Both numbers are options as libtpu 0.0.42.1 writes them out,
`xla_msa_max_overlap_to_mem_size_async_copy_ratio` and `xla_tpu_memory_space_assignment_while_execution_count`. Large
buffers come first: what is saved over the root of the bytes.

Of a step that makes less at once than vector memory has room for hardly anything is in main memory: a GPT of two layers
with 8 x 256 tokens makes 118 MB and has 2 of them there (v5e, jax 0.10.2).

Where a step makes more than there is room for, weights that products are about to read and pieces of long lives contend
for it: of six networks that made 250 MB and more, 46 to 117 MB lay in vector memory when main memory was fullest (v5e).
Half of the room is counted of those that make twice as much.

Left out is what sorts, branches and products of ragged groups read and write, which lies in main memory (29 primitives
compiled by themselves for v5e), and all of a step with Fourier transforms or decompositions, or where a device has few
images: of these XLA makes more than the model knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..hardware import Profile
from ..ir import Graph

_LONGEST, _ITERATIONS = 8, 5

_MAIN_MEMORY = ("sort", "top_k", "approx_top_k", "cond_join", "ragged_dot", "ragged_dot_general")
"""Primitives whose operands and results are in main memory."""

_EXPANDED = (
    "fft", "cholesky", "eig", "eigh", "geqp3", "geqrf", "hessenberg", "householder_product", "lu", "qr", "schur", "svd",
    "triangular_solve", "tridiagonal", "tridiagonal_solve",
)  # fmt: skip
"""Primitives of which XLA makes loops with buffers that the model doesn't know, in main memory: all is left there."""

_LARGE = 1e-4
"""Buffers under this share of vector memory are left where they are."""


class Stay(NamedTuple):
    """A buffer that may lie on the chip: of which part of memory, from when to when, and its bytes."""

    part: str
    start: int
    stop: int
    size: int


class VectorMemory(NamedTuple):
    """What decides where a buffer lies.

    Attributes:
      room: of buffers in vector memory, in bytes.
      longest_s: a life there.
      elapsed_s: `float64[n + 1]`, seconds of kernels until every moment; depth: `int64[n]`, loops around it.
      bounds: moments at which loops begin and end.
      outside: values that lie in main memory.
    """

    room: int
    longest_s: float
    elapsed_s: np.ndarray
    depth: np.ndarray
    bounds: tuple[int, ...]
    outside: frozenset[int]

    def kept(self, stays: Sequence[Stay], most: int) -> list[Stay]:
        """Those, or the pieces of those that loops stack, that have a place in vector memory.

        Args:
          most: bytes of all buffers, these and others, that are ever alive at once.
        """
        room = self.room - min(max(most - self.room, 0), self.room) // 2
        pieces = [piece for stay in stays if stay.size >= _LARGE * self.room for piece in self._pieces(stay)]
        used, kept = np.zeros(len(self.depth), np.int64), []
        for one in sorted(pieces, key=lambda stay: -stay.size):
            if self._life_s(one.start, one.stop) >= self.longest_s:
                continue
            if used[one.start : one.stop].max(initial=0) + one.size <= room:
                used[one.start : one.stop] += one.size
                kept.append(one)
        return kept

    def _pieces(self, stay: Stay) -> list[Stay]:
        if stay.part != "residuals":
            return [stay]
        cuts = [stay.start, *(t for t in self.bounds if stay.start < t < stay.stop), stay.stop]
        return [stay._replace(start=a, stop=b) for a, b in pairwise(cuts)]

    def _life_s(self, start: int, stop: int) -> float:
        around = int(self.depth[start:stop].min(initial=0 if stop <= start else np.iinfo(np.int64).max))
        return float(self.elapsed_s[stop] - self.elapsed_s[start]) / _ITERATIONS**around


def vector_memory(
    graph: Graph, times: Sequence[int], seconds: Mapping[int, float], profile: Profile
) -> VectorMemory | None:
    """Of a step whose operations take `seconds` each, all its runs together; None where nothing stays on the chip.

    Args:
      times: when each operation runs.
    """
    room = profile.on_chip_bytes or 0
    if not room or any(op.primitive in _EXPANDED for op in graph.ops):
        return None
    around, count = graph.loops_around(), max(len(graph.ops), 1)
    took_s, depth = np.zeros(count), np.zeros(count, np.int64)
    outside = set[int]()
    for op in graph.ops:
        depth[times[op.index]] = len(around[op.index])
        once_s = seconds.get(op.index, 0.0) / max(op.trips, 1)
        took_s[times[op.index]] += once_s * _ITERATIONS ** len(around[op.index])
        if op.primitive in _MAIN_MEMORY:
            outside.update(op.operands, op.results)
    ends = {times[i] if i < count else count for loop in graph.loops for i in (loop.start, loop.stop)}
    return VectorMemory(
        room=room,
        longest_s=_LONGEST * room / profile.hbm_bytes_per_s,
        elapsed_s=np.concatenate(([0.0], np.cumsum(took_s))),
        depth=depth,
        bounds=tuple(sorted(ends)),
        outside=frozenset(outside),
    )
