"""What a TPU's step keeps in the chip's vector memory and never has in main memory.

XLA for TPU gives each buffer in its turn a place there (xla/service/memory_space_assignment/algorithm.cc; libtpu logs
every decision of it with `TPU_VMODULE=algorithm=3`): those first that save the most time for the root of their bytes,
the time being what the kernels that write and read them wait for memory. A buffer stays from one access to the next if
there is room for it and they are no further apart than copying the whole of vector memory takes `_LONGEST` times
(prefetch_interval_picker.h, "max overlap to mem size async copy ratio"). One that can't stay until its last read is in
main memory from the beginning until it is back for good: it takes room until the read that it can stay for, and from a
copy's length before later ones. Arguments are in main memory anyhow, and take room before they are read. Kernels take
what `estimates` says, and loops run `_ITERATIONS` times, whatever their number of iterations; what a loop reads and
doesn't make has its place for all of them. Both numbers are options as libtpu 0.0.42.1 writes them out,
`xla_msa_max_overlap_to_mem_size_async_copy_ratio` and `xla_tpu_memory_space_assignment_while_execution_count`. What
loops stack is given a place for the time before, in, between and behind them, each by itself. A place is a piece of
addresses, the smallest that is free and large enough. Buffers of more than three quarters of the room find none, nor
of half of it where twice as much is alive: what XLA brings in for single reads, and the model doesn't know of, lies
between (67 MB of an MLP's, 84 of a table's, 100 of scores, of 117). What is read four times or more, and saves time,
comes before that: logits of 66 MB of 101 (a scanned Llama) and of 117 (a mixture of experts).

Where a device is two cores with a vector memory each (v5p), what products, copies, collectives and lookups make is in
main memory, until it has been copied for a read and where it then stays; fused loops alone write into vector memory.
What loops stack is in main memory there: an iteration reads too little of it to be worth a copy.

What kernels make for a later loop is copied for it, and left in main memory, too.

Each copy there or back has a table of results, see `ledger`. A large buffer is copied there in slices along its first
dimension, of two tables each: a v5e's in four from 1 MiB on, a v6e's in pieces of 4 MiB, a v5p's whole (profile fields
`copied_slices`, `slice_bytes`). What has a table besides is counted (twelve networks on v5e, jax 0.10.2, 2026-11-30): a
kernel of several results for a fourth of all values in memory (0.18 to 0.27), and small buffers, whose places aren't
sought, one copy for a given one (0.4 to 1.9) and one in eight others. Of 21 networks on v5e the tables come out at 0.4
to 1.6 of XLA's, in 16 of them within 30 %; by values alone they were at 0.34 to 1.65, in ten within 30 %. Too few are
those of steps that accumulate gradients in a loop, which copies weights in at each read (0.4 of XLA's, twice).

Of 26 networks of 12 MB to 1.2 GB on eight v5e (our plan, jax 0.10.2, 2026-11-28) a GPT of 54 MB has everything there
but four buffers, a Llama in bf16 two of its four layers' scores beside its logits, a mixture of experts next to
nothing, for its scatters are taken to last longer than the longest wait. A DLRM's tables have the compiler's places in
its order, by the same worth to within 3 %.

Left out is what sorts, branches and products of ragged groups read and write, which lies in main memory (29 primitives
compiled by themselves for v5e), images where a device has few of them, and all of a step with Fourier transforms or
decompositions: of these XLA makes more than the model knows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ..hardware import Profile
from ..ir import Graph
from .estimates import Estimates
from .vector_kernels import VectorKernel
from .vector_places import Places, SpareTime

_LONGEST, _ITERATIONS = 8, 5

_MAIN_MEMORY = ("sort", "top_k", "approx_top_k", "cond_join", "ragged_dot", "ragged_dot_general")
"""Primitives whose operands and results are in main memory."""

_EXPANDED = (
    "fft", "cholesky", "eig", "eigh", "geqp3", "geqrf", "hessenberg", "householder_product", "lu", "qr", "schur", "svd",
    "triangular_solve", "tridiagonal", "tridiagonal_solve",
)  # fmt: skip
"""Primitives of which XLA makes loops with buffers that the model doesn't know, in main memory: all is left there."""

_LARGEST, _OFTEN = 0.75, 4
"""Share of vector memory that a buffer may take, and reads from which on it may where twice as much is alive."""

_LARGE = 1e-4
"""Buffers under this share of vector memory are left where they are."""

_OF_SEVERAL, _OF_SMALL_GIVEN, _OF_SMALL = 0.25, 1.0, 0.125
"""Tables for each value in memory, each small argument and each other small buffer."""


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


class Placed(NamedTuple):
    """Where buffers lie: `kept`, `gone`: see `VectorMemory.kept`; tables: of results that copies and kernels have."""

    kept: list[Stay]
    gone: list[Stay]
    tables: int


class VectorMemory(NamedTuple):
    """What decides where a buffer lies.

    Attributes:
      room: of buffers in vector memory, in bytes.
      bytes_per_s: of copies to and from it.
      elapsed_s: `float64[n + 1]`, seconds of kernels until every moment.
      weight: `float64[n]`, of the time that a kernel waits for memory; 0 where its arithmetic takes longer.
      saved_s: by value and moment, what a kernel waits less if that lies there, where that isn't all of its bytes.
      loops: when each begins and ends, outer ones first.
      uses: of every value when it is read.
      outside: values that lie in main memory.
      written: values that their kernels may write there; None for all.
      of_several: kernels of several results.
      slices, slice_bytes: how buffers are copied there, see `Profile.copied_slices`; firsts: of values, what they have
        along their first dimension.
    """

    room: int
    bytes_per_s: float
    elapsed_s: np.ndarray
    weight: np.ndarray
    saved_s: Mapping[tuple[int, int], float]
    loops: tuple[tuple[int, int], ...]
    uses: Mapping[int, Sequence[int]]
    outside: frozenset[int]
    written: frozenset[int] | None
    of_several: int = 0
    slices: int = 1
    slice_bytes: int = 0
    firsts: Mapping[int, int] = MappingProxyType({})

    def kept(self, stays: Sequence[Stay], most: int) -> Placed:
        """Those, or the pieces of those that loops stack, that have a place in vector memory all along, or since they
        are back for good, and those that come and go: arguments aside.

        Args:
          most: bytes of all buffers, these and others, that are ever alive at once.
        """
        pieces = [piece for stay in stays if stay.size >= _LARGE * self.room for piece in self._pieces(stay)]
        small = [stay.given for stay in stays if stay.size < _LARGE * self.room]
        tables = self.of_several + int(_OF_SMALL_GIVEN * sum(small) + _OF_SMALL * (len(small) - sum(small)))
        largest = _LARGEST * self.room
        usual = largest - min(max(most - self.room, 0), self.room) / 4
        places, kept, gone = Places(self.room, len(pieces)), list[Stay](), list[Stay]()
        spare = SpareTime(np.diff(self.elapsed_s))
        for one in sorted(pieces, key=lambda stay: (-self._worth(stay), -stay.size)):
            fits = one.size <= usual or (one.size <= largest and self._pays_often(one))
            if fits and self._begins_there(one) and self._fits(one) and places.take(one.start, one.stop, one.size):
                kept.append(one)
                continue
            ever, back, times = self._come_and_go(one, places, spare)
            tables += times * self._tables_in(one)
            if ever and not one.given:
                gone.append(one)
                tables += self._begins_there(one)
                if back is not None and fits:
                    kept.append(one._replace(start=back))
        return Placed(kept, gone, tables)

    def _tables_in(self, stay: Stay) -> int:
        """Of a copy to vector memory."""
        if not 0 < self.slice_bytes <= stay.size:
            return 1
        pieces = self.slices or math.ceil(stay.size / self.slice_bytes)
        pieces = min(pieces, self.firsts.get(stay.value, pieces))
        return 1 if pieces == 1 else 2 * pieces

    def _pays_often(self, stay: Stay) -> bool:
        return len(self._reads(stay)) >= _OFTEN and self._worth(stay) > 0

    def _begins_there(self, stay: Stay) -> bool:
        """Whether what makes it may write it there."""
        return not stay.given and (self.written is None or (stay.part == "activations" and stay.value in self.written))

    def _worth(self, stay: Stay) -> float:
        """The time that a place saves over the root of the bytes."""
        moments = {t for t in self.uses.get(stay.value, ()) if stay.start <= t < stay.stop}
        if not stay.given:
            moments.add(stay.start)
        copied_s = stay.size / self.bytes_per_s
        waited_s = sum(self.saved_s.get((stay.value, t), copied_s * self.weight[t]) for t in moments)
        if not stay.given and (stay.value, stay.start) in self.saved_s:  # zeros before what is added up, and its reader
            waited_s += 2 * copied_s
        return float(waited_s / math.sqrt(stay.size))

    def _reads(self, stay: Stay) -> list[tuple[int, int]]:
        """First and last moment of each read; a loop that begins later reads for all of its iterations."""
        reads = set[tuple[int, int]]()
        for t in self.uses.get(stay.value, ()):
            if stay.start <= t < stay.stop:
                around = next(((a, b) for a, b in self.loops if a <= t < b and not a <= stay.start < b), (t, t + 1))
                reads.add((max(around[0], stay.start), min(around[1], stay.stop) - 1))
        end = max(stay.stop - 1, stay.start)
        return sorted(reads) or [(end, end)]

    def _fits(self, stay: Stay) -> bool:
        """Whether none of its waits is too long."""
        reads = self._reads(stay)
        if stay.part == "activations" and any(first < last for first, last in reads):
            return False
        if not self.uses.get(stay.value):
            return self._may_stay(stay, stay.start, reads[-1][1])
        ends = [stay.start, *(last for _, last in reads)]
        waits = zip(ends, reads, strict=False)
        return all(self._may_wait(stay, end, read[0]) and self._may_stay(stay, *read) for end, read in waits)

    def _come_and_go(self, stay: Stay, places: Places, spare: SpareTime) -> tuple[bool, int | None, int]:
        """Takes room for what is there until some read, and is copied in before others; whether it ever is, since when
        for good, and how often it is copied in."""
        there, before, since, ever, back = self._begins_there(stay), stay.start, stay.start, False, None
        times = 0
        for read in self._reads(stay):
            if not there or not self._holds(stay, since, read, places):
                copied = spare.before(read[0], stay.size / self.bytes_per_s, before + 1)
                there = copied is not None and self._holds(stay, copied.since, read, places)
                if copied is not None and there:
                    spare.take(copied)
                back = read[0] if there else None
                times += there
            ever |= there
            before, since = read[1], read[1] + 1
        return ever, back, times

    def _holds(self, stay: Stay, since: int, read: tuple[int, int], places: Places) -> bool:
        """Whether it may be there from `since` until the end of a read; it then has a place."""
        waits = self._may_wait(stay, since, read[0]) and self._may_stay(stay, *read)
        return waits and places.take(since, read[1] + 1, stay.size)

    def _may_wait(self, stay: Stay, start: int, stop: int) -> bool:
        """Whether what runs between two moments is short enough."""
        return self._may_stay(stay, min(start + 1, stop), stop)

    def _may_stay(self, stay: Stay, start: int, stop: int) -> bool:
        """Whether two moments, of one iteration of the loops within which a life is, are near enough."""
        life = stay.start, stay.stop
        around = sum(loop[0] <= life[0] and life[1] <= loop[1] and loop != life for loop in self.loops)
        longest_s = _LONGEST * self.room / self.bytes_per_s
        return bool(self.elapsed_s[stop] - self.elapsed_s[start] < longest_s * _ITERATIONS**around)

    def _pieces(self, stay: Stay) -> list[Stay]:
        if stay.part != "residuals":
            return [stay]
        if self.written is not None:
            return []
        bounds = sorted({t for loop in self.loops for t in loop})
        cuts = [stay.start, *(t for t in bounds if stay.start < t < stay.stop), stay.stop]
        return [stay._replace(start=a, stop=b) for a, b in pairwise(cuts)]


def vector_memory(
    graph: Graph,
    times: Sequence[int],
    needed: Sequence[int],
    found: Estimates,
    profile: Profile,
    kernels: Sequence[VectorKernel | None],
    stored: Sequence[bool],
    left_out: Iterable[int] = (),
) -> VectorMemory | None:
    """Of a step; None where nothing stays on the chip.

    Args:
      times: when each operation runs; needed: until when what it reads is.
      found: see `KernelTimes.at`; kernels, stored: see `Traffic`.
      left_out: values that lie in main memory.
    """
    room = profile.vector_memory_bytes or 0
    if not room or any(op.primitive in _EXPANDED for op in graph.ops):
        return None
    around, count = graph.loops_around(), max(len(graph.ops), 1)
    took_s, depth, weight = np.zeros(count), np.zeros(count, np.int64), np.ones(count)
    outside, saved_s = set(left_out), dict[tuple[int, int], float]()
    for op in graph.ops:
        turns = _ITERATIONS ** len(around[op.index])
        took_s[times[op.index]] += found.seconds.get(op.index, 0.0) * turns
        for value in (*op.operands, *op.results) if op.index in found.saved_s else ():
            saved_s[value, times[op.index]] = found.saved_s[op.index] * turns
        if op.index in found.busy:
            weight[times[op.index]] = 0.0
        if op.primitive in _MAIN_MEMORY:
            outside.update(op.operands, op.results)
    loops = sorted({(loop.start, loop.stop) for loop in graph.loops}, key=lambda loop: (loop[0], -loop[1]))
    for start, stop in loops:
        depth[start:stop] += 1
    fused = (op for op, kernel in zip(graph.ops, kernels, strict=True) if kernel is not None)
    return VectorMemory(
        room=room,
        bytes_per_s=profile.assigned_bytes_per_s,
        elapsed_s=np.concatenate(([0.0], np.cumsum(took_s))),
        weight=weight * float(_ITERATIONS) ** depth,
        saved_s=saved_s,
        loops=tuple(loops),
        uses=_uses(graph, stored, times, needed),
        outside=frozenset(outside),
        written=frozenset(v for op in fused for v in op.results) if profile.split_vector_memory else None,
        of_several=int(_OF_SEVERAL * sum(stored)),
        slices=profile.copied_slices or 0,
        slice_bytes=profile.slice_bytes or 0,
        firsts={tensor.index: tensor.shape[0] for tensor in graph.values if tensor.shape},
    )


def _uses(
    graph: Graph, stored: Sequence[bool], times: Sequence[int], needed: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """When every value is read: by all kernels that have what is computed of it."""
    readers, count = graph.uses(), len(graph.ops)
    last = [min(max(needed[op.index] - 1, times[op.index]), count - 1) for op in graph.ops]
    found: dict[int, set[int]] = {}

    def of(value: int) -> set[int]:
        moments = set[int]()
        for reader, _ in readers[value]:
            moments.add(last[reader])
            moments.update(*(found[made] for made in graph.ops[reader].results if not stored[made] and made in found))
        return moments

    for op in reversed(graph.ops):
        found.update((value, of(value)) for value in op.results)
    found.update((value, of(value)) for value in graph.inputs)
    return {value: tuple(sorted(moments)) for value, moments in found.items()}
