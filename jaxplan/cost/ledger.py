"""Adds up what is alive: the bytes of one device at every operation, by what they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .._jax import PLACES_ARE_LENT
from .packing import gap_bytes, lent, most_alive
from .vector_memory import Stay, VectorMemory

_COMPUTED = frozenset({"activations", "residuals", "scratch"})
"""Parts that kernels write: XLA for TPU lets no all_gather or exchange write into the caller's buffers."""

TABLE_BYTES = 2**14
"""What every result of several arrays has on TPU beside these: a table of 512 bytes, in 16 KiB that nothing else uses
before or after it. Kernels of several results, collectives, and copies to and from the vector memory have one each; see
`vector_memory` and, for steps that leave it alone, `Profile.result_tables` for how many."""

_GAPS, _ROOMS, _MANY = 0.06, 2, 50
"""What gaps take of buffers that are copied out of vector memory or into it, up to twice what that has room for, where
there are as many. The copies break up the order in which buffers come and go: of nine networks of 36 MB to 1.1 GB,
compiled for v5e and v6e, gaps were 0 to 19 MB, 11 in the median and 14 or less in five of six, tables of results
(see `TABLE_BYTES`) aside (jax 0.10.2, libtpu 0.0.42.1, 2026-11-29); a few buffers leave none."""


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """Bytes alive on one device.

    Attributes:
      peak_bytes: the most at any time, and the gaps between buffers; peak_time: then.
      parts: what the peak is made of: "parameter", "optimizer", "state", "batch", "constants", "residuals"
        (stacked by loops), "activations", "copies" (resharded or converted), "results", "scratch" (of split
        products, pooling's gradients, sorting and decompositions), "tables" (of results on TPU), "gaps" (see
        `packing`).
      curve: `int64[n_ops]`, bytes alive at every time.
      times: when each operation runs; as they stand where it is empty.
    """

    peak_bytes: int
    peak_time: int
    parts: Mapping[str, int]
    curve: np.ndarray
    times: Sequence[int] = ()

    @property
    def heap(self) -> np.ndarray:
        """`int64[n_ops]`, by operation: bytes alive while it runs, and the gaps between buffers that `peak_bytes` has:
        they lie there all along."""
        curve = self.curve[list(self.times)] if self.times else self.curve
        return np.asarray(curve + (self.peak_bytes - self.curve.max(initial=0)))

    @property
    def peak_op(self) -> int:
        """The operation that runs then."""
        return next((op for op, at in enumerate(self.times) if at == self.peak_time), self.peak_time)


class Ledger:
    """Adds up intervals: bytes of each part at every operation.

    `vector`: where what may lie on the chip lies; None keeps everything in main memory.
    """

    def __init__(self, length: int, vector: VectorMemory | None = None) -> None:
        self._length = length
        self._vector = vector
        self._stays: list[Stay] = []
        self._parts = defaultdict[str, np.ndarray](lambda: np.zeros(length + 1, np.int64))
        self._placed: list[tuple[int, int, int]] = []
        self._part_of: list[str] = []
        self._copied_out: list[int] = []

    def add(
        self, part: str, start: int, stop: int, size: int, *, given: bool = False, value: int | None = None
    ) -> None:
        """`given`: the caller's buffer, which lies where it lies; `value`: which one, if vector memory may hold it."""
        if stop > start and size:
            stop = min(stop, self._length)
            delta = self._parts[part]
            delta[start] += size
            delta[stop] -= size
            if not given:
                self._placed.append((start, stop, size))
                self._part_of.append(part)
            if self._vector is not None and value is not None and value not in self._vector.outside:
                self._stays.append(Stay(part, start, stop, size, value, given))

    def copy_out(self, stop: int, size: int, value: int) -> None:
        """A donated argument is copied before anything else; the copy is there until `stop`, its place others'."""
        if stop > 0 and size:
            self._copied_out.append(len(self._placed))
            self.add("copies", 0, stop, size, value=value)

    def profile(self, platform: str) -> MemoryProfile:
        """Gaps are those of all buffers: where vector memory has some, others come and go in main memory for it."""
        on_chip, gone = list[Stay](), list[Stay]()
        if self._vector is not None:
            on_chip, gone, tables = self._vector.kept(self._stays, most_alive(self._placed))
            self.add("tables", 0, self._length, tables * TABLE_BYTES, given=True)
        for one in on_chip:
            self._parts[one.part][one.start] -= one.size
            self._parts[one.part][one.stop] += one.size
        chip = {(one.start, one.stop, one.size) for one in on_chip}
        if self._copied_out and PLACES_ARE_LENT:
            self._lend(chip)
        curves = {part: np.cumsum(delta[:-1]) for part, delta in sorted(self._parts.items())}
        total = sum(curves.values(), np.zeros(self._length, np.int64))
        peak = int(np.argmax(total))
        parts = {part: int(curve[peak]) for part, curve in curves.items() if curve[peak]}
        gaps = gap_bytes(self._placed, platform)
        if self._vector is not None:
            gaps = min(gaps, most_alive([one for one in self._placed if one not in chip]))
            broken_up = most_alive([(one.start, one.stop, one.size) for one in gone])
            share = _GAPS * min(len(gone) / _MANY, 1.0) ** 2
            gaps = max(gaps, int(share * min(broken_up, _ROOMS * self._vector.room)))
        if gaps:
            parts["gaps"] = gaps
        return MemoryProfile(peak_bytes=int(total[peak]) + gaps, peak_time=peak, parts=parts, curve=total)

    def _lend(self, on_chip: Collection[tuple[int, int, int]]) -> None:
        """Takes out what lies where arguments were."""
        copied_out, lying = {*self._copied_out}, []
        for buffer, (one, part) in enumerate(zip(self._placed, self._part_of, strict=True)):
            may_lie = (part in _COMPUTED or buffer in copied_out) and one not in on_chip
            lying.append(one if may_lie else (*one[:2], 0))
        gone = {*lent(lying, self._copied_out)}
        for buffer in gone:
            start, stop, size = self._placed[buffer]
            delta = self._parts[self._part_of[buffer]]
            delta[start] -= size
            delta[stop] += size
        self._placed = [one for buffer, one in enumerate(self._placed) if buffer not in gone]
