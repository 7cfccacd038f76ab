"""Inputs of which a step replaces pieces: replay buffers, pools of pages, histories."""

from __future__ import annotations

from ..ir import Graph, Op

_SAME = frozenset({"carry_init", "copy", "reshape", "roll", "scan_slice", "scan_stack", "squeeze", "transpose"})
"""What passes on what it is given, element by element, or a part of it in a loop over all parts."""

_WRITES = frozenset({"concatenate", "dynamic_update_slice", "scatter"})


def written_buffers(graph: Graph) -> frozenset[int]:
    """The inputs that come back as they were but for pieces that are replaced: nothing is added to any of them.

    What is trained comes back with every element changed.
    """
    broken: set[int] = set()
    while True:
        source, written = _followed(graph, broken)
        carried = [op.operands for op in graph.ops if op.primitive == "carry_next"]
        lost = {carry for after, carry in carried if carry in source and source.get(after) != source[carry]}
        if not lost:
            break
        broken |= lost
    for after, carry in carried:
        if after in written:
            written.add(carry)
    _followed(graph, broken, written)
    return frozenset(
        graph.inputs[position]
        for position, result in graph.aliases
        if source.get(graph.outputs[result]) == graph.inputs[position] and graph.outputs[result] in written
    )


def _followed(graph: Graph, broken: set[int], written: set[int] | None = None) -> tuple[dict[int, int], set[int]]:
    """Of the values that hold an input's elements, or some of them, that input; and those with pieces replaced.

    Args:
      broken: carries that don't, as a later iteration shows.
      written: values that are known to have pieces replaced already, grown in place.
    """
    source = {value: value for value in graph.inputs}
    written = set() if written is None else written
    for op in graph.ops:
        held = _held(op, source)
        if held is None:
            continue
        for value in op.results:
            if value not in broken:
                source[value] = source[held]
                if op.primitive in _WRITES or held in written:
                    written.add(value)
    return source, written


def _held(op: Op, source: dict[int, int]) -> int | None:
    """The operand whose elements the results of an operation hold; None where they hold none's."""
    if op.primitive in _SAME or op.primitive in ("dynamic_update_slice", "scatter", "slice"):
        return op.operands[0] if op.operands[0] in source else None
    if op.primitive == "cond_join":
        sources = {source.get(value) for value in op.operands[1:]}
        return op.operands[1] if len(sources) == 1 and None not in sources else None
    if op.primitive == "concatenate":  # what is left of the old, beside the new
        return next((value for value in op.operands if value in source), None)
    return None
