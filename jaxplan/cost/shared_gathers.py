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

from ..ir import Graph, Op
from .kinds import REDUCTIONS

_LAYERS = 6

_MOVED = frozenset(
    {"broadcast_in_dim", "convert_element_type", "expand_dims", "reshape", "squeeze", "transpose"}
)


def added_in_memory(graph: Graph, kinds: Sequence[str]) -> Iterator[int]:
    """Sums, products and the like of gathered values that softmaxes read, or what is gathered."""
    uses = graph.uses()
    around = graph.loops_around()
    for gather in graph.ops:
        if gather.primitive != "gather":
            continue
        adds = [
            op
            for value in gather.results
            for op in _readers(graph, uses, value)
            if around[op.index] == around[gather.index] and kinds[op.index] == "fused"
        ]
        made = [op.results[0] for op in adds if _normalised(graph, uses, kinds, op)]
        yield from made if len(adds) >= _LAYERS else gather.results[: len(made)]


def _readers(graph: Graph, uses: Sequence[Sequence[tuple[int, int]]], value: int) -> Iterator[Op]:
    """What reads a value beside others as large, itself or moved."""
    for index in dict.fromkeys(index for index, _ in uses[value]):
        op = graph.ops[index]
        if op.primitive in _MOVED:
            yield from _readers(graph, uses, op.results[0])
        elif len(op.operands) > 1 and len(op.results) == 1:
            yield op


def _normalised(
    graph: Graph, uses: Sequence[Sequence[tuple[int, int]]], kinds: Sequence[str], op: Op
) -> bool:
    """Whether the largest of each row is taken of what `op` makes, or of a function of it."""
    seen, left = set[int](), [op.results[0]]
    while left:
        value = left.pop()
        for index, _ in uses[value]:
            reader = graph.ops[index]
            if reader.primitive in REDUCTIONS:
                last = len(graph.values[reader.operands[0]].shape) - 1
                if reader.primitive == "reduce_max" and tuple(reader.params.get("axes", ())) == (last,):
                    return True
            elif kinds[index] == "fused" and len(reader.results) == 1 and reader.results[0] not in seen:
                seen.add(reader.results[0])
                left.append(reader.results[0])
    return False
