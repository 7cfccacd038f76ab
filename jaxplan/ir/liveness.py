"""When each value of a Graph is alive, in program order.

Time step `t` is operation `t`; a value lives from the operation that makes it to its last use, half open.  What
is used inside a loop but made outside lives to the loop's end; a stacked result is allocated when its loop
starts; a carry lives as long as its loop.  Inputs live from the start: to the end when they are not donated (the
caller owns them), to their last use when they are.  A value that is never stored is computed where it is used, so
what it is computed from lives as long as it would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .graph import Graph


class Interval(NamedTuple):
    """Half-open [start, stop) in operation indices."""

    start: int
    stop: int


def needed_until(graph: Graph, stored: Sequence[bool], times: Sequence[int] | None = None) -> list[int]:
    """For every operation the time until which its operands must live: past it, and past the readers of what it
    makes but doesn't store.

    Args:
      stored: for every value whether it exists in memory.
      times: when each operation runs, no earlier than those that make its operands; None: in program order.
    """
    around = graph.loops_around()
    when = range(len(graph.ops)) if times is None else times
    start = _starts(graph, around, when)
    until = [when[op.index] + 1 for op in graph.ops]
    stop = [0] * len(graph.values)
    for op in reversed(graph.ops):
        past, loops = until[op.index], around[op.index]
        for value in op.results:
            if not stored[value] and stop[value] > past:
                past = stop[value]
        until[op.index] = past
        for operand in op.operands:
            needed = past_loops(past, loops, start[operand]) if loops else past
            if needed > stop[operand]:
                stop[operand] = needed
    return until


def _starts(graph: Graph, around: Sequence[Sequence[tuple[int, int]]], when: Sequence[int]) -> list[int]:
    start = [0] * len(graph.values)
    for op in graph.ops:
        for result in op.results:
            # a stack is allocated before the loop that fills it; that loop is the innermost around the operation
            start[result] = around[op.index][-1][0] if op.primitive == "scan_stack" else when[op.index]
    return start


def past_loops(stop: int, around: Sequence[tuple[int, int]], start: int) -> int:
    """`stop` moved past the outermost loop around a reader that a value, made at `start`, is made outside of."""
    for loop_start, loop_stop in around:
        if start < loop_start:
            return max(stop, loop_stop)
    return stop


def live_intervals(
    graph: Graph,
    stored: Sequence[bool] | None = None,
    times: Sequence[int] | None = None,
    until: Sequence[int] | None = None,
) -> list[Interval]:
    """The live interval of every value; empty (start == stop) for those never used.

    Args:
      stored: for every value whether it exists in memory; None: all do.
      times: see `needed_until`; until: what that returns for the same, where it is known.
    """
    end = len(graph.ops)
    around = graph.loops_around()
    when = range(end) if times is None else times
    start = _starts(graph, around, when)
    if until is None:
        until = needed_until(graph, [True] * len(graph.values) if stored is None else stored, when)
    stop = [0] * len(graph.values)
    for op in graph.ops:
        for result in op.results:
            stop[result] = max(stop[result], when[op.index] + 1)
            if op.primitive == "scan_stack":
                stop[result] = max(stop[result], around[op.index][-1][1])
        past, loops = until[op.index], around[op.index]
        for operand in op.operands:
            needed = past_loops(past, loops, start[operand]) if loops else past
            if needed > stop[operand]:
                stop[operand] = needed
            if op.primitive == "carry_next" and operand == op.operands[1]:
                stop[operand] = max(stop[operand], around[op.index][-1][1])
    for output in graph.outputs:
        stop[output] = end
    for position, value in enumerate(graph.inputs):
        start[value] = 0
        if position not in graph.donated:
            stop[value] = end
    for value in graph.constants:
        start[value], stop[value] = 0, end
    return [Interval(a, max(a, b)) for a, b in zip(start, stop, strict=True)]


class Lives(NamedTuple):
    """What `needed_until` and `live_intervals` say of a program."""

    needed: Sequence[int]
    intervals: Sequence[Interval]


def lives_of(graph: Graph, stored: Sequence[bool], times: Sequence[int] | None = None) -> Lives:
    """Both of them; see there."""
    needed = needed_until(graph, stored, times)
    return Lives(needed, live_intervals(graph, stored, times, needed))


def settled_values(graph: Graph) -> dict[int, int]:
    """Next values of donated arguments -> the argument's value, whose buffer they are written into."""
    return {graph.outputs[o]: graph.inputs[i] for i, o in graph.aliases if i in graph.donated}


def written_over(intervals: Sequence[Interval], argument: int, start: int) -> int:
    """Until when an argument's next value, made at `start`, needs a buffer of its own: while the argument is read.

    The last operation to read the argument writes in place.
    """
    stop = intervals[argument].stop
    return stop if stop > start + 1 else start
