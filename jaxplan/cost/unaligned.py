"""Reshapes that XLA for TPU can't make views of: dimensions that it merges, or takes apart, inside memory tiles.

The last two physical dimensions lie in tiles of 8 x 128, and XLA chooses which those are (see `tiles`).  A reshape is a
view where it leaves two dimensions as they are, for these lie in tiles then, or merges one whose places fill tiles.
Logits of tokens that are shifted by one and put into one list, f32[16, 1023, 50280] to [16368, 50280], are a copy of
all of them, and their gradient is another: 1023 fills neither rows nor lanes, and nothing but the vocabulary is left
beside (Mamba-2 of jax-ml/bonsai).  So it is where products or gathers read it, as the labels' logits are gathered for
the loss: what is elementwise made of a reshape and summed XLA makes before it, and reshapes nothing.

What is converted to a wider type next is converted as it is copied.  Where the dimension that is left fills no lanes,
the tokens lie in them, and there is a copy in that order between the two; it lives when the first one ends and the
second one begins, so that the heap has room for all three (logits of bf16 and f32, 16 and 64 sequences of 1024 tokens,
by sequences and by words, 4000 and 8192 a device, v5e, jax 0.10.2, libtpu 0.0.42.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ..ir import Graph, Op
from ..sharding import ELEMENTWISE, MeshAxes
from .tiles import LANES, SUBLANES, local_bytes, local_shape

_PASSED = ELEMENTWISE | {"convert_element_type"}
_SUMS = frozenset({"argmax", "argmin", "reduce_max", "reduce_min", "reduce_sum"})


def copying(graph: Graph) -> Iterator[int]:
    """The operations that copy: conversions where such a reshape is converted to a wider type, else the reshapes."""
    for op in graph.ops:
        if op.primitive == "reshape" and cuts_tiles(*_shapes(graph, op)) and not _sinks(graph, op):
            readers = [graph.ops[reader] for reader, _ in graph.uses()[op.results[0]]]
            yield from [r.index for r in readers] if readers and all(_widens(graph, r) for r in readers) else [op.index]


def _sinks(graph: Graph, op: Op) -> bool:
    """Whether XLA moves a reshape past all that is elementwise made of it, to sums, or away, as it brings back what was
    reshaped."""
    uses, producers = graph.uses(), graph.producers()
    there, back = _shapes(graph, op), _shapes(graph, op)[::-1]

    def passed(value: int) -> bool:
        readers = [graph.ops[reader] for reader, _ in uses[value]]
        return all(r.primitive in _PASSED | _SUMS or _reshapes(graph, r, back) for r in readers)

    made = _reached(op.results[0], lambda v: [r for r, _ in uses[v]], lambda one: graph.ops[one].results, graph)
    if all(map(passed, made)):
        return True
    of = _reached(op.operands[0], lambda v: [producers[v]], lambda one: graph.ops[one].operands, graph)
    made_by = [graph.ops[producers[v]] for v in of if producers[v] >= 0 and graph.values[v].shape == there[0]]
    return any(_reshapes(graph, one, back) for one in made_by)


def _reached(
    value: int, beside: Callable[[int], Sequence[int]], of: Callable[[int], Sequence[int]], graph: Graph
) -> set[int]:
    """The values that elementwise operations lead to.

    Args:
      beside: operations beside a value; of: the values that one of them leads to.
    """
    found, waiting = {value}, [value]
    while waiting:
        for index in beside(waiting.pop()):
            if index >= 0 and graph.ops[index].primitive in _PASSED:
                new = set(of(index)) - found
                found |= new
                waiting += new
    return found


def _reshapes(graph: Graph, op: Op, shapes: tuple[Sequence[int], Sequence[int]]) -> bool:
    return op.primitive == "reshape" and _shapes(graph, op) == shapes


def _widens(graph: Graph, op: Op) -> bool:
    if op.primitive != "convert_element_type":
        return False
    return graph.values[op.results[0]].item_bytes > graph.values[op.operands[0]].item_bytes


def _shapes(graph: Graph, op: Op) -> tuple[Sequence[int], Sequence[int]]:
    return tuple(graph.values[op.operands[0]].shape), tuple(graph.values[op.results[0]].shape)


def copied_in_lanes(
    graph: Graph, axes: MeshAxes, found: Sequence[int], times: Sequence[int], values: Mapping[int, np.ndarray]
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of what copies take beside what they read and write, see the module.

    Args:
      found: see `copying`; times: see `Traffic`; values: the layout row of every value where it is made.
    """
    producers = graph.producers()
    for index in found:
        op = graph.ops[index]
        merged = op.operands[0] if op.primitive == "convert_element_type" else op.results[0]
        read, made = graph.ops[producers[merged]].operands[0], op.results[0]
        shape = graph.values[made].shape
        if (row := values.get(made)) is None or shape[-1:] != graph.values[read].shape[-1:]:
            continue
        if local_shape(shape, row, axes)[-1] % LANES:
            yield times[index], times[index] + 1, local_bytes(graph.values[made], row, axes, "tpu")


def cuts_tiles(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether a reshape from one shape to another is work on TPU, whichever dimensions lie in tiles."""
    kept, merged = 0, list[int]()
    for one, other in _groups([n for n in before if n > 1], [n for n in after if n > 1]):
        if one == other:
            kept += 1
        else:
            merged.append(math.gcd(one[-1], other[-1]))
    if not merged or kept >= 2:
        return False
    rows = sum(inner % SUBLANES == 0 for inner in merged)
    lanes = sum(inner % LANES == 0 for inner in merged)
    return not rows if kept else len(merged) > 1 and not (rows > 1 and lanes)


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The dimensions of two shapes of as many elements, in the finest groups of as many elements each."""
    found, one, other = list[tuple[list[int], list[int]]](), list[int](), list[int]()
    left, right = list(before), list(after)
    while left or right:
        if math.prod(one) <= math.prod(other) and left:
            one.append(left.pop(0))
        else:
            other.append(right.pop(0))
        if math.prod(one) == math.prod(other):
            found.append((one, other))
            one, other = [], []
    return found
