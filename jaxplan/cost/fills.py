"""Buffers that begin as one number everywhere, and that XLA for GPU fills together; for TPU, those that begin early.

Zeros that rows are scattered into, a loop's stack before its first iteration and a carry of zeros are written in
place.  A stack needs nothing to be filled, and is there as soon as the loop before its own is done.  XLA keeps equal
numbers of equal shape once (common subexpressions), copies them for each that writes, and fuses the copies with what
makes them: one kernel fills all, and they are there from when the first is needed.  Elementwise work that reads that
number does not get it fused in then, but reads a buffer that is kept for it.

Seen in an LSTM (26 stacks of two layers' loops filled at once, before the first; stacks of the backward loops before
the head's gradient), in a GPT block, in DLRM (tables' gradients, and the zeros of Adagrad's `where`), and in VGG, whose
poolings' gradients are scattered into zeros that relus read, too, from the first convolution on (3286 MB, 2575
predicted without), compiled for H100 by jax 0.10.2.  Zeros of a pooling that pads its images in front are larger, and
of its own: a ResNet-50's are filled late in the backward pass, its first relu is made anew by the pooling's kernels, as
are VGG's, which share their zeros; a ResNet-34's that pads behind alone, whose windows overlap, is written with them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..ir import Graph, Op
from .pooling import POOLING
from .residency import Flow


@dataclass(frozen=True, kw_only=True)
class Fill:
    """Buffers of one shape, element type and number, in one loop body.

    Attributes:
      written: (value, when it is needed) of those that are written in place.
      read: (value of its shape that is computed from the number, when) of elementwise work beside them.
      added: as `written`, of what is scattered onto what it is added to next (`selections.added_onto`), unless it is
        summed over devices or brought into another layout for that: then it is scattered into zeros.
    """

    written: tuple[tuple[int, int], ...]
    read: tuple[tuple[int, int], ...]
    added: tuple[tuple[int, int], ...] = ()


def fills(flow: Flow, times: Sequence[int], onto: Container[int] = ()) -> tuple[Fill, ...]:
    """Those of a graph that XLA for GPU has in memory for longer than they are written and read.

    Args:
      times: when each operation runs, see `fusion.Traffic`; onto: what is scattered into no zeros, see `selections`.
    """
    graph, values = flow.graph, flow.graph.values
    outer = _loops_around(graph)
    numbers = _numbers(graph)
    written: dict[tuple[object, ...], list[tuple[int, int]]] = defaultdict(list)
    read: dict[tuple[object, ...], list[tuple[int, int]]] = defaultdict(list)
    added: dict[tuple[object, ...], list[tuple[int, int]]] = defaultdict(list)

    def key(value: int, number: float, loop: int) -> tuple[object, ...]:
        return values[value].shape, values[value].dtype, number, loop

    for op in graph.ops:
        loop = flow.loop_of[op.index]
        if op.primitive == "scan_stack":
            written[key(op.results[0], 0.0, outer[loop])].append((op.results[0], _loop_before(graph, outer, loop)))
        elif op.primitive == "carry_init" or op.primitive.startswith("scatter"):
            if (number := numbers.get(op.operands[0])) is not None and values[op.results[0]].shape:
                those = added if op.results[0] in onto else written
                those[key(op.results[0], number, loop)].append((op.results[0], times[op.index]))
        elif op.primitive == POOLING:
            those = added if op.results[0] in onto else written
            of = (*key(op.results[0], 0.0, loop), *_in_front(op))
            those[of].append((op.results[0], times[op.index]))
        elif op.primitive in _READERS and not flow.source[op.results[0]]:
            shape = values[op.results[0]].shape
            for value in op.operands:
                if (number := numbers.get(value)) is not None and values[value].shape in ((), shape):
                    made = (shape, values[value].dtype, number, loop)
                    read[made].append((op.results[0], times[op.index]))
    return tuple(
        Fill(
            written=tuple(written.get(which, ())),
            read=tuple(read.get(which, ())),
            added=tuple(added.get(which, ())),
        )
        for which in {**written, **added}
    )


def early_stacks(flow: Flow, times: Sequence[int]) -> tuple[Fill, ...]:
    """The stacks of a forward pass's loops, which XLA for TPU has in memory as soon as the loop before is done.

    It makes a buffer of such a stack that nothing fills, waits for nothing, and is scheduled first of all: above what
    is computed before the first loop (14 programs compiled for v5e, jax 0.10.2, libtpu 0.0.42.1).  Stacks that several
    loops have of one shape and those of a backward pass, which begins with the last iteration, are filled with zeros
    right before their loop.
    """
    graph, outer = flow.graph, _loops_around(flow.graph)
    stacks = [op for op in graph.ops if op.primitive == "scan_stack"]
    made = {op.results[0] for op in stacks}
    backward = {
        flow.loop_of[op.index] for op in graph.ops if op.primitive == "scan_slice" and not made.isdisjoint(op.operands)
    }
    alike: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for op in stacks:
        value = graph.values[op.results[0]]
        alike[value.shape, value.dtype].add(flow.loop_of[op.index])
    found = []
    for op in stacks:
        value, loop = graph.values[op.results[0]], flow.loop_of[op.index]
        if outer[loop] < 0 and loop not in backward and len(alike[value.shape, value.dtype]) == 1:
            before = _loop_before(graph, outer, loop)
            found.append(Fill(written=((value.index, times[before - 1] + 1 if before else 0),), read=()))
    return tuple(found)


def _in_front(op: Op) -> tuple[int, ...]:
    """By how much a pooling pads each dimension in front; nothing where it pads none."""
    front = tuple(low for low, _ in op.params["padding"])
    return front if any(front) else ()


def _overlaps(op: Op) -> bool:
    windows = zip(op.params["window_dimensions"], op.params["window_strides"], strict=True)
    return any(size > step for size, step in windows)


def written_with_zeros(graph: Graph, onto: Container[int]) -> set[int]:
    """What elementwise work makes of zeros that a pooling's gradient is scattered into, where the pooling's windows
    overlap: the first of a shape."""
    zeros = {
        (graph.values[op.results[0]].shape, graph.values[op.results[0]].dtype)
        for op in graph.ops
        if op.primitive == POOLING and op.results[0] not in onto and not _in_front(op) and _overlaps(op)
    }
    numbers = _numbers(graph) if zeros else {}
    found: dict[tuple[object, ...], int] = {}
    for op in graph.ops if zeros else ():
        if op.primitive in _READERS and any(numbers.get(value) == 0 for value in op.operands):
            made = graph.values[op.results[0]]
            if (made.shape, made.dtype) in zeros:
                found.setdefault((made.shape, made.dtype), op.results[0])
    return set(found.values())


def filled_traffic(
    flow: Flow,
    found: Sequence[Fill],
    bytes_of: Sequence[float],
    reads: list[tuple[float, ...]],
    writes: list[tuple[float, ...]],
) -> None:
    """Counts in `reads` and `writes`, bytes by operand and by result of every operation, what is filled to be read."""
    for fill in found:
        if not fill.written:
            continue
        for value in {value for value, _ in fill.read}:
            reader = flow.graph.ops[flow.producers[value]]
            like = [i for i, v in enumerate(reader.operands) if flow.graph.values[v].shape]
            for position in like[:1]:
                _add(reads, reader.index, position, bytes_of[value])
        if fill.read:
            first = fill.written[0][0]
            _add(writes, flow.producers[first], 0, bytes_of[first])


def filled_shares(
    graph: Graph, reads: Sequence[Sequence[float]], writes: Sequence[Sequence[float]]
) -> dict[int, float]:
    """By operation that writes a loop's stack, how much of the memory that it moves is moved to fill that before.

    Args:
      reads, writes: bytes, see `fusion.Traffic`.
    """
    found: dict[int, float] = {}
    for op in graph.ops:
        if op.primitive == "scan_stack" and (written := sum(writes[op.index])):
            filled = written - graph.values[op.operands[0]].bytes
            found[op.index] = filled / (written + sum(reads[op.index]))
    return found


def _add(traffic: list[tuple[float, ...]], index: int, position: int, size: float) -> None:
    sizes = traffic[index]
    traffic[index] = (*sizes[:position], sizes[position] + size, *sizes[position + 1 :])


def _loops_around(graph: Graph) -> list[int]:
    """For every loop the innermost one around it, or -1."""
    found = []
    for inner, loop in enumerate(graph.loops):
        around = [i for i, o in enumerate(graph.loops[:inner]) if o.start <= loop.start and loop.stop <= o.stop]
        found.append(max(around, default=-1))
    return found


def _loop_before(graph: Graph, outer: Sequence[int], loop: int) -> int:
    """When the last loop before `loop` is done, in the same body; or when that body starts."""
    start = graph.loops[outer[loop]].start if outer[loop] >= 0 else 0
    alike = (o for o, around in zip(graph.loops, outer, strict=True) if around == outer[loop])
    return max((o.stop for o in alike if o.stop <= graph.loops[loop].start), default=start)


def _numbers(graph: Graph) -> dict[int, float]:
    """The values that are one number everywhere: literals, and what they are broadcast, reshaped or cut to."""
    found = {v.index: v.number for v in graph.values if v.number is not None}
    for op in graph.ops:
        if op.primitive in _ALIKE and op.operands[0] in found:
            found[op.results[0]] = found[op.operands[0]]
    return found


_READERS = frozenset({"clamp", "eq", "ge", "gt", "le", "lt", "max", "min", "ne", "select_n"})
"""Elementwise work that reads a number as it is: XLA simplifies arithmetic with zeros and ones away."""

_ALIKE = frozenset({"broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "slice", "transpose"})
"""What leaves a number everywhere one number everywhere."""


def filled_since(
    found: Sequence[Fill],
    layout: Callable[[int], Hashable | None],
    is_moved: Callable[[int], bool] = lambda value: False,
) -> tuple[dict[int, int], list[tuple[int, int, int]]]:
    """Since when written values are there, and the buffers read beside: (a value of their part, start, stop).

    Args:
      layout: how a value lies, equal for equal parts; None: nowhere in memory.
      is_moved: whether what reads a value reads it as it lies nowhere yet.
    """
    since: dict[int, int] = {}
    beside = []
    for fill in found:
        added = [(value, when) for value, when in fill.added if layout(value) is not None and is_moved(value)]
        written, read = _by_layout([*fill.written, *added], layout), _by_layout(fill.read, layout)
        for where, those in written.items():
            first = min(when for _, when in those + read.get(where, []))
            since.update((value, first) for value, _ in those)
            if where in read:
                beside.append((those[0][0], first, 1 + max(when for _, when in read[where])))
    return since, beside


def earlier(found: Sequence[Fill], producers: Sequence[int], at: Mapping[int, int]) -> list[Fill]:
    """Fills of which what the operations in `at` write in place begins then, where that is earlier."""
    def moved(written: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple((value, min(when, at.get(producers[value], when))) for value, when in written)

    return [replace(fill, written=moved(fill.written), added=moved(fill.added)) for fill in found]


def _by_layout(
    those: Sequence[tuple[int, int]], layout: Callable[[int], Hashable | None]
) -> dict[Hashable, list[tuple[int, int]]]:
    found: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for value, when in those:
        if (where := layout(value)) is not None:
            found[where].append((value, when))
    return found
