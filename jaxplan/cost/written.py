"""Buffers that loops write parts of: which values share one, and how it lies on TPU.

XLA writes an update of a slice, or a scatter, into the buffer that it updates where nothing reads that later, and a
loop inside another one carries on in the outer one's buffer: a cache that a loop over tokens and one over layers carry
is in memory once.

On TPU a slice is written as it was made, and the buffer lies so: in tiles of dimensions that the slices span, f32 and
bf16[8, 16, 2048, 8, 64], of which [1, 16, 1, 8, 64] are written, with 64 columns in 128 lanes, though 2048 would fill
them; of more dimensions the last two, in the order of the program (twelve heads of 64 columns: v5p, beams on v5e, too).
So do stacks that a loop inside another one slices and fills.  What only one loop slices and fills lies as the
step's arguments and results do (decoding with caches compiled for v5e, jax 0.10.2, libtpu 0.0.42.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..ir import Graph, Op, settled_values


class Written(NamedTuple):
    """What loops write in parts.

    Attributes:
      shared: value -> the earlier value whose buffer it has.
      in_place: what updates make in the place of what they update.
      spanned: value -> the dimensions that are written whole, where there are others.
    """

    shared: Mapping[int, int]
    in_place: frozenset[int]
    spanned: Mapping[int, frozenset[int]]


def written_in_loops(graph: Graph, stored: Sequence[bool]) -> Written:
    """See the module.

    Args:
      stored: for every value whether it is in memory.
    """
    shared, settled = _shared(graph, stored), settled_values(graph)
    in_place = frozenset(
        op.results[0]
        for op in graph.ops
        if updates_part(op) and (op.results[0] in shared or settled.get(op.results[0]) == op.operands[0])
    )
    return Written(shared, in_place, _spanned(graph))


def most_read(graph: Graph, op: Op, value: int, written: Written) -> float:
    """Bytes that an operation reads of an operand at most: one that takes a part reads no more than it makes, one that
    writes a part in place none of the rest."""
    if value != op.operands[0]:
        return math.inf
    if op.primitive in ("dynamic_slice", "slice", "gather"):
        return graph.values[op.results[0]].bytes
    return 0.0 if op.results[:1] and op.results[0] in written.in_place else math.inf


def written_by(op: Op, value: int, written: Written) -> int:
    """Which value's bytes an operation writes to make `value`: its update's, in place."""
    return op.operands[1 if op.primitive == "dynamic_update_slice" else 2] if value in written.in_place else value


def _shared(graph: Graph, stored: Sequence[bool]) -> dict[int, int]:
    around, uses, returned = graph.loops_around(), graph.uses(), set(graph.outputs)
    loop_of: dict[int, tuple[int, int]] = {}  # of buffers: the loop that carries them
    shared: dict[int, int] = {}

    def is_last(op: Op, value: int) -> bool:
        """Whether nothing reads a buffer after an operation in its loop's body, until that ends."""
        start, stop = loop_of[value]
        inside = [use for use in uses[value] if start <= use[0] < stop]
        later = [graph.ops[t] for t, position in inside if t > op.index or (t == op.index and position > 0)]
        return around[op.index][-1:] == ((start, stop),) and all(_ends(after, value) for after in later)

    for op in graph.ops:
        if op.primitive == "carry_init":
            carry, init = op.results[0], op.operands[0]
            if init in loop_of and is_last(op, init) and stored[init]:
                shared[carry] = init
            if (entered := graph.loop_after(op.index)) is not None:
                loop_of[carry] = entered
        elif updates_part(op) and op.operands[0] in loop_of and op.results[0] not in returned:
            buffer, result = op.operands[0], op.results[0]
            if is_last(op, buffer) and stored[result]:
                shared[result] = buffer
                loop_of[result] = loop_of[buffer]
    return shared


def _ends(op: Op, value: int) -> bool:
    """Whether an operation reads `value` as the carry that the next iteration's takes the place of."""
    return op.primitive == "carry_next" and op.operands[1] == value and op.operands[0] != value


def updates_part(op: Op) -> bool:
    """Whether an operation makes its first operand with a part of it written."""
    return op.primitive == "dynamic_update_slice" or op.primitive.startswith("scatter")


def _spanned(graph: Graph) -> dict[int, frozenset[int]]:
    around, given = graph.loops_around(), set(graph.inputs)
    found: dict[int, frozenset[int]] = {}

    def add(value: int, dims: frozenset[int]) -> bool:
        new = value not in given and value not in found
        if new:
            found[value] = dims
        return new

    for op in graph.ops:
        if around[op.index] and op.primitive == "dynamic_update_slice":
            buffer, update = (graph.values[v].shape for v in op.operands[:2])
            dims = frozenset(d for d, (n, m) in enumerate(zip(buffer, update, strict=True)) if n == m)
            dims = frozenset(sorted(d for d in dims if buffer[d] > 1)[-2:])  # in the order of the program
            if 1 < len(dims) < len(buffer):
                add(op.operands[0], dims)
                add(op.results[0], dims)
    changed = bool(found)
    while changed:
        changed = False
        for op in graph.ops:
            if op.primitive in ("scan_slice", "scan_stack") and len(around[op.index]) > 1:
                stack, piece = op.operands[0], op.results[0]
                if op.primitive == "scan_stack":
                    stack, piece = piece, stack
                if piece in found:
                    changed |= add(stack, frozenset(d + 1 for d in found[piece]))
            elif op.primitive in ("carry_init", "carry_next", "dynamic_update_slice"):
                pair = (op.operands[0], op.operands[1] if op.primitive == "carry_next" else op.results[0])
                for one, other in (pair, pair[::-1]):
                    if one in found:
                        changed |= add(other, found[one])
    return found
