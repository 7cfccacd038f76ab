"""Elements that are taken by index, as a cross entropy its labels' logits, and added to.

XLA for TPU takes elements from what is in memory.  Where that is a product's result in a wider type, the product's
kernel writes both: the narrow one, from which everything else is computed again, and the wide one for the gather (f32
beside bf16 logits, to which a bias in f32 may have been added: the words of a DeBERTa, 412 MB beside 824).  A table, an
argument, is itself in memory; what it is converted to see `converted_weights`.

What adds to one element of each row becomes a comparison with the row's index and a selection, fused like any other:
the gradient of `take_along_axis` with one index a row is never stored.  With several indices a row, or where rows are
counted by indices too (`x[jnp.arange(n), labels]`), a scatter stays one.  (Losses and their gradients along the last, a
middle and the first of two and three dimensions, compiled for v5e, jax 0.10.2, libtpu 0.0.42.1.)

XLA for GPU takes elements of what it computes for that, and scatters onto what a scatter into zeros is added to
afterwards, in its place (cross entropies of bf16 and f32 logits, tables that are read twice, compiled for H100).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..ir import SUMS, Graph, Op
from ..sharding import ELEMENTWISE
from .pooling import POOLING

_HANDED_ON = frozenset({"convert_element_type", "reshape", "slice", "squeeze"})


class WideCopy(NamedTuple):
    """What a gather reads in a wider type than is kept: the operation that makes it, the gather, and which of them the
    last is that it waits for: the gather runs at once where its indices are made of nothing of the sort."""

    made: int
    gather: int
    until: int


def is_selection(graph: Graph, op: Op) -> bool:
    """Whether an operation adds to, or sets, one element of each row of a tensor."""
    if op.primitive not in ("scatter", "scatter-add"):
        return False
    dims, shape = op.params["dimension_numbers"], graph.values[op.operands[0]].shape
    along = set(range(len(shape))) - set(dims.operand_batching_dims)
    rows = math.prod(shape[d] for d in dims.operand_batching_dims)
    return (
        len(along) == 1
        and not dims.update_window_dims
        and math.prod(graph.values[op.operands[2]].shape) == rows
    )


def gathered_from(graph: Graph, producers: Sequence[int], value: int) -> int:
    """What is kept of a value that a gather reads: the argument or the narrower result that it is converted from."""
    kept, narrower, converted = value, value, False
    while producers[kept] >= 0 and (handed := _handed_on(graph, graph.ops[producers[kept]])) is not None:
        converted |= graph.ops[producers[kept]].primitive == "convert_element_type"
        kept = handed
        if graph.values[kept].item_bytes < graph.values[value].item_bytes:
            narrower = kept
    return kept if converted and producers[kept] < 0 else narrower


def _handed_on(graph: Graph, op: Op) -> int | None:
    """What `op` converts, takes another view of, or adds a bias to."""
    if op.primitive == "add":
        size = math.prod(graph.values[op.results[0]].shape)
        large = [v for v in op.operands if math.prod(graph.values[v].shape) == size]
        return large[0] if len(large) == 1 else None
    return op.operands[0] if op.primitive in _HANDED_ON else None


def wide_copies(graph: Graph, stored: Sequence[bool], producers: Sequence[int]) -> tuple[WideCopy, ...]:
    """Of every gather whose operand is kept in a narrower type, but for an argument's, or made beside another."""
    found = [*_made_beside(graph, stored, producers)]
    for op in graph.ops:
        if op.primitive == "gather":
            kept = gathered_from(graph, producers, op.operands[0])
            if kept != op.operands[0] and producers[kept] >= 0 and not stored[op.operands[0]]:
                made = producers[op.operands[0]]
                found.append(WideCopy(made, op.index, op.index if _leads_to(graph, made, op) else made))
    return tuple(found)


def _leads_to(graph: Graph, made: int, gather: Op) -> bool:
    """Whether a gather's indices are made of what an operation makes."""
    reached = set(graph.ops[made].results)
    for op in graph.ops[made + 1 : gather.index]:
        if not reached.isdisjoint(op.operands):
            reached.update(op.results)
    return not reached.isdisjoint(gather.operands[1:])


def _made_beside(graph: Graph, stored: Sequence[bool], producers: Sequence[int]) -> Iterator[WideCopy]:
    """Of gathers whose operand XLA for TPU makes late, at once with something else that is made of the same: of bf16
    logits their f32 log-probabilities with the gradient that is written for its products; but not of f32 logits, nor
    what the logits' own kernel makes, as a cap on them (losses of all but the last token and of capped logits, compiled
    for v5e, jax 0.10.2, libtpu 0.0.42.1).

    Outside of loops, and where both are elementwise and as large as what they are made of.
    """
    around = graph.loops_around()
    for gather in graph.ops:
        value = gather.operands[0] if gather.primitive == "gather" else -1
        if value < 0 or producers[value] < 0 or not stored[value] or around[producers[value]]:
            continue
        maker, width = graph.ops[producers[value]], graph.values[value].item_bytes
        while maker.primitive == "slice" and producers[maker.operands[0]] >= 0 and not stored[maker.operands[0]]:
            maker = graph.ops[producers[maker.operands[0]]]  # made whole, and sliced by the gather's kernel
        shape = graph.values[maker.results[0]].shape
        leaves, waited = _large_leaves(graph, stored, producers, maker)
        read = {v for v in leaves if graph.values[v].item_bytes < width}
        if max((producers[v] for v in waited), default=-1) <= max((producers[v] for v in read), default=-1):
            continue
        for op in graph.ops[maker.index + 1 :]:
            made = [v for v in op.results if stored[v] and graph.values[v].shape == shape]
            if made and op.primitive in ELEMENTWISE and not around[op.index]:
                if not read.isdisjoint(_large_leaves(graph, stored, producers, op)[0]):
                    yield WideCopy(op.index, gather.index, op.index)


def _large_leaves(
    graph: Graph, stored: Sequence[bool], producers: Sequence[int], op: Op
) -> tuple[set[int], set[int]]:
    """What is in memory of what an elementwise operation is computed of, of at least as many elements, and the smaller
    values beside."""
    size = math.prod(graph.values[op.results[0]].shape)
    found, seen, smaller, left = set[int](), set[int](), set[int](), [*op.operands]
    while left:
        value = left.pop()
        if math.prod(graph.values[value].shape) < size:
            smaller.add(value)
        if value in seen or value in smaller:
            continue
        seen.add(value)
        if stored[value] or producers[value] < 0:
            found.add(value)
        else:
            left += graph.ops[producers[value]].operands
    return found, smaller


def added_onto(graph: Graph, producers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(what is scattered into zeros, the sum that is its only reader): XLA for GPU scatters onto the other addend.

    The gradient of a max-pooling is (see `pooling`): a U-Net's go onto those of what it hands to its other half
    (compiled for H100, jax 0.10.2).
    """
    uses = graph.uses()
    for op in graph.ops:
        if op.primitive in SUMS:
            for value in op.operands:
                maker = graph.ops[producers[value]] if producers[value] >= 0 else None
                if maker is not None and len(uses[value]) == 1 and _into_zeros(graph, producers, maker):
                    yield value, op.results[0]
                    break


def _into_zeros(graph: Graph, producers: Sequence[int], op: Op) -> bool:
    scattered = op.primitive == "scatter-add" and _is_zero(graph, producers, op.operands[0])
    return scattered or op.primitive == POOLING


def _is_zero(graph: Graph, producers: Sequence[int], value: int) -> bool:
    while producers[value] >= 0 and graph.ops[producers[value]].primitive == "broadcast_in_dim":
        value = graph.ops[producers[value]].operands[0]
    return graph.values[value].number == 0
