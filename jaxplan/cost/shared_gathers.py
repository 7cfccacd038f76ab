"""What XLA for GPU adds gathered values to, where many do: it is in memory then, before a softmax reads it.

A kernel of a softmax (Triton's) can take in elementwise work, and no gather.  Whether the gather is fused into what
adds it, which then is a kernel of its own, or is one itself, is decided by what all its readers together would save: a
bias by relative positions, gathered for the attention of all layers, is added by six of them in kernels of their own,
and the scores lie in memory as the f32 that they are added in, twice the product's bf16; added by fewer, the bias does.
Two layers are enough with one row a device, three with two rows, four with four, five with six and eight, six with 12
to 32, whatever the length and the heads (f32[32, 12] gathered by [T, T] and transposed, T of 256 to 1024, H100, jax
0.10.2); six are taken to be needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..ir import VIEWS, Graph, Op

_LAYERS = 6

_MOVED = VIEWS | {"broadcast_in_dim", "convert_element_type"}


def added_in_memory(graph: Graph, kinds: Sequence[str]) -> Iterator[int]:
    """Sums, products and the like of gathered values that softmaxes read, or what is gathered."""
    gathers = [op for op in graph.ops if op.primitive == "gather"]
    normalised = _normalised(graph, kinds) if gathers else set[int]()
    around = graph.loops_around()
    for gather in gathers:
        adds = [
            op
            for value in gather.results
            for op in _readers(graph, value)
            if around[op.index] == around[gather.index] and kinds[op.index] == "fused"
        ]
        made = [op.results[0] for op in adds if op.results[0] in normalised]
        yield from made if len(adds) >= _LAYERS else gather.results[: len(made)]


def _readers(graph: Graph, value: int) -> Iterator[Op]:
    """What reads a value beside others as large, itself or moved."""
    for index in dict.fromkeys(index for index, _ in graph.uses()[value]):
        op = graph.ops[index]
        if op.primitive in _MOVED:
            yield from _readers(graph, op.results[0])
        elif len(op.operands) > 1 and len(op.results) == 1:
            yield op


def _normalised(graph: Graph, kinds: Sequence[str]) -> set[int]:
    """The values of which, or of a function of which, the largest of each row is taken."""
    found = set[int]()
    for op in reversed(graph.ops):
        if op.primitive == "reduce_max":
            last = len(graph.values[op.operands[0]].shape) - 1
            if tuple(op.params["axes"]) == (last,):
                found.update(op.operands)
        elif kinds[op.index] == "fused" and len(op.results) == 1 and op.results[0] in found:
            found.update(op.operands)
    return found
