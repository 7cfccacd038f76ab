"""When each value of a Graph is alive, in program order.

Time step `t` is operation `t`; a value lives from the operation that makes it to its last use, half open.  What
is used inside a loop but made outside lives to the loop's end; a stacked result is allocated when its loop
starts; a carry lives as long as its loop.  Inputs live from the start: to the end when they are not donated (the
caller owns them), to their last use when they are.
"""

from __future__ import annotations

from typing import NamedTuple

from .graph import Graph


class Interval(NamedTuple):
    """Half-open [start, stop) in operation indices."""

    start: int
    stop: int


def enclosing_stop(graph: Graph) -> list[list[tuple[int, int]]]:
    """For every operation the (start, stop) of the loops around it, outer first."""
    around: list[list[tuple[int, int]]] = [[] for _ in graph.ops]
    for loop in graph.loops:
        for t in range(loop.start, loop.stop):
            around[t].append((loop.start, loop.stop))
    return around


def live_intervals(graph: Graph) -> list[Interval]:
    """The live interval of every value; empty (start == stop) for those never used."""
    end = len(graph.ops)
    around = enclosing_stop(graph)
    start = [0] * len(graph.values)
    stop = [0] * len(graph.values)
    for op in graph.ops:
        for result in op.results:
            start[result] = op.index
            stop[result] = max(stop[result], op.index + 1)
            if op.primitive == "scan_stack":
                # allocated before the loop that fills it; that loop is the innermost around the operation
                start[result] = around[op.index][-1][0]
                stop[result] = max(stop[result], around[op.index][-1][1])
    for op in graph.ops:
        for operand in op.operands:
            last = op.index + 1
            for loop_start, loop_stop in around[op.index]:
                if start[operand] < loop_start:
                    last = max(last, loop_stop)
                    break
            stop[operand] = max(stop[operand], last)
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
