"""Memory of one device over the step: what is alive at every operation, at the layouts that were decided.

Counted: arguments (to the end when the caller keeps them or gets their next value back in the same buffer),
captured constants, every materialised value from where it is made to its last use, residuals stacked by loops
for their whole loop, and resharded copies from their first to their last reader.  Not counted: values inside one
fused kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..ir import Graph, enclosing_stop, live_intervals, needed_until, settled_values, written_over
from ..sharding import UNREDUCED, MeshAxes, pieces, reshard_steps


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """Bytes alive on one device.

    Attributes:
      peak_bytes: the most at any operation; peak_time: that operation.
      parts: what the peak is made of: "parameter", "optimizer", "state", "batch", "constants", "residuals"
        (stacked by loops), "activations", "copies" (resharded), "results".
      curve: `int64[n_ops]`, bytes alive at every operation.
    """

    peak_bytes: int
    peak_time: int
    parts: Mapping[str, int]
    curve: np.ndarray


def simulate_memory(
    graph: Graph,
    axes: MeshAxes,
    stored: Sequence[bool],
    kinds: Sequence[str],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> MemoryProfile:
    """The live sets of `graph`.

    Args:
      stored: for every value whether it is materialised.
      kinds: for every input position its kind ("parameter", "optimizer", ...).
      values, reads: the layout row of every value where it is made, and of every operand as it is read; values
        without a row are made where they are used and take no memory.
    """
    ledger = _Ledger(max(len(graph.ops), 1))
    intervals = live_intervals(graph, stored)
    whole = len(graph.ops)
    aliased = {graph.inputs[i] for i, _ in graph.aliases}
    settled = settled_values(graph)
    inputs = {value: position for position, value in enumerate(graph.inputs)}

    def local(value: int, row: np.ndarray) -> int:
        return int(np.ceil(graph.values[value].bytes / pieces(row[None, :], axes)[0]))

    for value, position in inputs.items():
        stop = whole if value in aliased or position not in graph.donated else intervals[value].stop
        ledger.add(kinds[position], 0, stop, local(value, values[value]))
    for value in graph.constants:
        ledger.add("constants", 0, whole, int(graph.values[value].bytes))

    copies, own_reads = _copies(graph, axes, needed_until(graph, stored), values, reads)
    for start, stop, size in copies.values():
        ledger.add("copies", start, stop, size)
    producers = graph.producers()
    outputs = set(graph.outputs)
    for value, row in values.items():
        pending = bool((row == UNREDUCED).any())
        if value in inputs or not (stored[value] or pending):
            continue
        start, stop = intervals[value]
        primitive = graph.ops[producers[value]].primitive
        if pending:
            stop = start + 1
        elif value in settled:
            moved = not np.array_equal(row, values[settled[value]])
            stop = start + 1 if moved else written_over(intervals, settled[value], start)
        elif value not in outputs and primitive not in ("carry_init", "scan_stack"):
            stop = min(stop, max([start + 1, *own_reads.get(value, ())]))
        part = "residuals" if primitive == "scan_stack" else "results" if value in outputs else "activations"
        ledger.add(part, start, stop, local(value, row))
    return ledger.profile()


def _copies(
    graph: Graph,
    axes: MeshAxes,
    needed: Sequence[int],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> tuple[dict[tuple[int, bytes, tuple[int, int]], tuple[int, int, int]], dict[int, list[int]]]:
    """Resharded copies, and until when the originals are read.

    The first maps (value, layout, loop) to (first reader, after the last reader, bytes); the second values to the
    stops of those who read them as they are, and the starts of their copies.
    """
    around = enclosing_stop(graph)
    copies: dict[tuple[int, bytes, tuple[int, int]], tuple[int, int, int]] = {}
    own: dict[int, list[int]] = {}
    for (op, position), row in reads.items():
        value = graph.ops[op].operands[position]
        made = values.get(value)
        if made is None or not reshard_steps(made, row, graph.values[value].bytes, axes):
            own.setdefault(value, []).append(needed[op])
            continue
        loop = around[op][-1] if around[op] else (0, len(graph.ops))
        # a whole stack is resharded before the loop and stays for its length
        start, stop = loop if graph.ops[op].primitive == "scan_slice" else (op, needed[op])
        size = int(np.ceil(graph.values[value].bytes / pieces(row[None, :], axes)[0]))
        key = (value, row.tobytes(), loop)
        before = copies.get(key, (start, stop, size))
        copies[key] = (min(before[0], start), max(before[1], stop), size)
        own.setdefault(value, []).append(copies[key][0] + 1)
    return copies, own


class _Ledger:
    """Adds up intervals: bytes of each part at every operation."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._parts: dict[str, np.ndarray] = {}

    def add(self, part: str, start: int, stop: int, size: int) -> None:
        if stop > start and size:
            delta = self._parts.setdefault(part, np.zeros(self._length + 1, np.int64))
            delta[start] += size
            delta[min(stop, self._length)] -= size

    def profile(self) -> MemoryProfile:
        curves = {part: np.cumsum(delta[:-1]) for part, delta in sorted(self._parts.items())}
        total = sum(curves.values(), np.zeros(self._length, np.int64))
        peak = int(np.argmax(total))
        parts = {part: int(curve[peak]) for part, curve in curves.items() if curve[peak]}
        return MemoryProfile(peak_bytes=int(total[peak]), peak_time=peak, parts=parts, curve=total)
