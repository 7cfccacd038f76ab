"""What a TPU's step keeps in the chip's vector memory and never has in main memory.

XLA for TPU gives each buffer in its turn a place there (xla/service/memory_space_assignment/algorithm.cc; libtpu logs
every decision of it with `TPU_VMODULE=algorithm=3`): those first that save the most time for the root of their bytes,
the time being what the kernels that write and read them wait for memory. A buffer stays from one access to the next if
there is room for it and they are no further apart than copying the whole of vector memory takes `_LONGEST` times
(prefetch_interval_picker.h, "max overlap to mem size async copy ratio"). One that can't stay until its last read is in
main memory from the beginning: it takes room until the read that it can stay for, and from a copy's length before later
ones. Arguments are in main memory anyhow, and take room before they are read. Kernels take what `estimates` says,
communication takes no time, and loops run `_ITERATIONS` times, whatever their number of iterations; what a loop reads
and doesn't make has its place for all of them. Both numbers are options as libtpu 0.0.42.1 writes them out,
`xla_msa_max_overlap_to_mem_size_async_copy_ratio` and `xla_tpu_memory_space_assignment_while_execution_count`. What
loops stack is given a place for the time before, in, between and behind them, each by itself.

XLA's places are pieces of addresses: buffers of more than three quarters of the room, half of it where twice as much is
alive, are taken to find none. What kernels make for a later loop is copied for it, and left in main memory, too.

Of 26 networks of 12 MB to 1.2 GB on eight v5e (our plan, jax 0.10.2, 2026-11-28) a GPT of 54 MB has everything there
but four buffers, a Llama in bf16 two of its four layers' scores beside its logits, a mixture of experts next to
nothing, for its scatters are taken to last longer than the longest wait.

Left out is what sorts, branches and products of ragged groups read and write, which lies in main memory (29 primitives
compiled by themselves for v5e), and all of a step with Fourier transforms or decompositions, or where a device has few
images: of these XLA makes more than the model knows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
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

_SCATTER = 16.0
"""How much longer than other kernels scatters are taken to wait for memory: for 81 MB of a DLRM's tables 1.4 ms, not
0.1."""

_LARGE = 1e-4
"""Buffers under this share of vector memory are left where they are."""


class Stay(NamedTuple):
    """A buffer that may lie on the chip: of which part of memory, from when to when, its bytes and what it holds.

    `given`: an argument, which is in main memory whatever becomes of it.
    """

    part: str
    start: int
    stop: int
    size: int
    value: int = -1
    given: bool = False


class VectorMemory(NamedTuple):
    """What decides where a buffer lies.

    Attributes:
      room: of buffers in vector memory, in bytes.
      bytes_per_s: of copies to and from it.
      elapsed_s: `float64[n + 1]`, seconds of kernels until every moment.
      weight: `float64[n]`, of the time that a kernel waits for memory; 0 where its arithmetic takes longer.
      loops: when each begins and ends, outer ones first.
      uses: of every value when it is read.
      outside: values that lie in main memory.
    """

    room: int
    bytes_per_s: float
    elapsed_s: np.ndarray
    weight: np.ndarray
    loops: tuple[tuple[int, int], ...]
    uses: Mapping[int, Sequence[int]]
    outside: frozenset[int]

    def kept(self, stays: Sequence[Stay], most: int) -> tuple[list[Stay], list[Stay]]:
        """Those, or the pieces of those that loops stack, that have a place in vector memory all along, and those that
        come and go: arguments aside.

        Args:
          most: bytes of all buffers, these and others, that are ever alive at once.
        """
        largest = (3 * self.room - min(max(most - self.room, 0), self.room)) // 4
        pieces = [piece for stay in stays if stay.size >= _LARGE * self.room for piece in self._pieces(stay)]
        used, kept, gone = np.zeros(len(self.weight), np.int64), list[Stay](), list[Stay]()
        copying_s = np.diff(self.elapsed_s)  # what is left for copies
        for one in sorted(pieces, key=lambda stay: (-self._worth(stay), -stay.size)):
            if not one.given and one.size <= largest and self._fits(one, used):
                used[one.start : one.stop] += one.size
                kept.append(one)
            elif self._come_and_go(one, used, copying_s) and not one.given:
                gone.append(one)
        return kept, gone

    def _worth(self, stay: Stay) -> float:
        """What the time that a place saves, over the root of the bytes, is proportional to."""
        moments = [t for t in self.uses.get(stay.value, ()) if stay.start <= t < stay.stop]
        if not stay.given:
            moments.append(stay.start)
        return math.sqrt(stay.size) * sum(self.weight[t] for t in moments)

    def _reads(self, stay: Stay) -> list[tuple[int, int]]:
        """First and last moment of each read; a loop that begins later reads for all of its iterations."""
        reads = set[tuple[int, int]]()
        for t in self.uses.get(stay.value, ()):
            if stay.start <= t < stay.stop:
                around = next(((a, b) for a, b in self.loops if a <= t < b and not a <= stay.start < b), (t, t + 1))
                reads.add((max(around[0], stay.start), min(around[1], stay.stop) - 1))
        end = max(stay.stop - 1, stay.start)
        return sorted(reads) or [(end, end)]

    def _fits(self, stay: Stay, used: np.ndarray) -> bool:
        """Whether there is room for all of its life, and none of its waits is too long."""
        if used[stay.start : stay.stop].max(initial=0) + stay.size > self.room:
            return False
        reads = self._reads(stay)
        if stay.part == "activations" and any(first < last for first, last in reads):
            return False
        moments = [stay.start, *(t for read in reads for t in read)]
        return all(self._may_wait(stay, a, b) for a, b in pairwise(moments))

    def _come_and_go(self, stay: Stay, used: np.ndarray, copying_s: np.ndarray) -> bool:
        """Takes room for what is there until some read, and is copied in before others; whether it ever is."""
        there, before, since, ever = not stay.given, stay.start, stay.start, False
        for read in self._reads(stay):
            if not there or not self._holds(stay, since, read, used):
                since, left_s = read[0], stay.size / self.bytes_per_s
                while left_s > 0 and since > before + 1:
                    since -= 1
                    left_s -= copying_s[since]
                there = left_s <= 0 and self._holds(stay, since, read, used)
                if there:
                    copying_s[since : read[0]] = 0.0
                    copying_s[since] = -left_s
            if there:
                used[since : read[1] + 1] += stay.size
            ever |= there
            before, since = read[1], read[1] + 1
        return ever

    def _holds(self, stay: Stay, since: int, read: tuple[int, int], used: np.ndarray) -> bool:
        """Whether it may be there from `since` until the end of a read."""
        if used[since : read[1] + 1].max(initial=0) + stay.size > self.room:
            return False
        return self._may_wait(stay, since, read[0]) and self._may_wait(stay, *read)

    def _may_wait(self, stay: Stay, start: int, stop: int) -> bool:
        """Whether two moments, of one iteration of the loops within which a life is, are near enough."""
        life = stay.start, stay.stop
        around = sum(loop[0] <= life[0] and life[1] <= loop[1] and loop != life for loop in self.loops)
        longest_s = _LONGEST * self.room / self.bytes_per_s
        return bool(self.elapsed_s[stop] - self.elapsed_s[start] < longest_s * _ITERATIONS**around)

    def _pieces(self, stay: Stay) -> list[Stay]:
        if stay.part != "residuals":
            return [stay]
        bounds = sorted({t for loop in self.loops for t in loop})
        cuts = [stay.start, *(t for t in bounds if stay.start < t < stay.stop), stay.stop]
        return [stay._replace(start=a, stop=b) for a, b in pairwise(cuts)]


def vector_memory(
    graph: Graph,
    times: Sequence[int],
    needed: Sequence[int],
    seconds: Mapping[int, float],
    busy: Collection[int],
    profile: Profile,
) -> VectorMemory | None:
    """Of a step; None where nothing stays on the chip.

    Args:
      times: when each operation runs; needed: until when what it reads is.
      seconds, busy: see `estimates.estimated`.
    """
    room = profile.vector_memory_bytes or 0
    if not room or any(op.primitive in _EXPANDED for op in graph.ops):
        return None
    around, count = graph.loops_around(), max(len(graph.ops), 1)
    took_s, depth, weight = np.zeros(count), np.zeros(count, np.int64), np.ones(count)
    outside, uses = set[int](), dict[int, set[int]]()
    for op in graph.ops:
        took_s[times[op.index]] += seconds.get(op.index, 0.0) * _ITERATIONS ** len(around[op.index])
        if op.index in busy:
            weight[times[op.index]] = 0.0
        elif op.primitive.startswith("scatter"):
            weight[times[op.index]] = _SCATTER
        for value in op.operands:
            uses.setdefault(value, set()).add(min(max(needed[op.index] - 1, times[op.index]), count - 1))
        if op.primitive in _MAIN_MEMORY:
            outside.update(op.operands, op.results)
    loops = sorted({(loop.start, loop.stop) for loop in graph.loops}, key=lambda loop: (loop[0], -loop[1]))
    for start, stop in loops:
        depth[start:stop] += 1
    return VectorMemory(
        room=room,
        bytes_per_s=profile.hbm_bytes_per_s * profile.hbm_efficiency,
        elapsed_s=np.concatenate(([0.0], np.cumsum(took_s))),
        weight=weight * float(_ITERATIONS) ** depth,
        loops=tuple(loops),
        uses={value: sorted(moments) for value, moments in uses.items()},
        outside=frozenset(outside),
    )
