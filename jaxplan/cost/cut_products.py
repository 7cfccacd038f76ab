"""What XLA for GPU keeps of a product that is cut: queries, keys and values that one product makes.

Products with batches take their operands by these, the first one with what it sums last, the second one with what it
sums first.  What they read of a part in one order is copied into it at once.  Keys are read in two, for the scores and
for the queries' gradient.  The second copy is made just before it is read, of the whole, which is in memory till then
beside the copies of queries and values: five thirds of it.  Where the parts are moved to the front, or cut before heads
are told apart, Triton's products read all of one copy each, and nothing is kept.

Where cuBLAS makes all products (see `without_triton`) it needs the two orders however the parts are cut.  But there
the kernel that copies the queries makes the second copy of the keys, too, which is in the same order, and the whole
is gone; unless the program moves the parts to the front, or XLA made one product of several: slices of what is written
so share no kernel (`ParameterSlicesAreNonOverlapping`, xla/service/gpu/transforms/multi_output_fusion.cc).

What a product of f32 reads there in half precision, as the scores' gradients of `jax.nn.dot_product_attention` do, is
a copy of its own, of queries too.  Copies are padded to whole 16 bytes (257 tokens to 264), and what is read
padded first and in another order as it is, as those keys are, is kept for that.  Three layers of a recommender of 200
tokens and nine of a U-ViT of 257, and attention of 200 to 512 tokens by one product or three, `split` by heads or by
columns and `moveaxis`, in both types, compiled for H100 with and without Triton's products (jax 0.10.2, 2026-11-29).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..ir import VIEWS, Graph, Lives, Op
from ..sharding import UNREDUCED, MeshAxes
from .merged_products import kept_until, merged_results
from .scores import is_batched
from .tiles import local_bytes, local_sizes
from .without_triton import Piece, pieces_of, steps_from

if TYPE_CHECKING:
    from .crossing import Traffic

_CUTS = frozenset({"slice", "split", "unstack"})
_HALF = 2
"""Bytes of an element of half precision."""

_PADDED = 8
"""Elements of half precision that every dimension of an operand is padded to whole numbers of (`CublasPadForGemms`)."""


class Copy(NamedTuple):
    """How a part is read: in which order, as a product's operand, whether padded, and by one of unlike types."""

    order: tuple[tuple[Piece, ...], ...]
    padded: bool
    unlike: bool


def kept_whole(
    graph: Graph,
    axes: MeshAxes,
    crossing: Traffic,
    lives: Lives,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    all_cublas: bool,
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of what is in memory beside the parts that are read.

    Args:
      values, reads: see `simulate_memory`; all_cublas: see `without_triton`.
    """
    merged = ((True, one) for one in merged_results(graph, axes, crossing.merged, values, reads))
    for moved, parts in (*_cut(graph, crossing.producers), *(merged if all_cublas else ())):
        if moved and not all_cublas:
            continue
        if any(v not in values or UNREDUCED in values[v].tolist() for v, _ in parts):
            continue
        copies = {part: _copies(graph, axes, part, reads, all_cublas) for part, _ in parts}
        shared = {one for found in copies.values() for one in found if len(found) == 1 and all_cublas and not moved}
        kept = [(v, _is_copied(copies[v], shared) if copies[v] else copied) for v, copied in parts]
        for value, start, stop in kept_until(lives, kept):
            yield start, stop, local_bytes(graph.values[value], values[value], axes, "gpu")


def _is_copied(copies: Sequence[Copy], shared: Set[Copy]) -> bool:
    """Whether a part is in memory beside the whole, or without it, until it is last read.

    Args:
      copies: see `_copies`; shared: those of other parts, read in one way each, which a kernel makes with its own.
    """
    first, *later = copies
    if shared >= {*later}:
        return True
    return any(copy.order != first.order and copy.padded != first.padded for copy in later)


def _cut(graph: Graph, producers: Sequence[int]) -> Iterator[tuple[bool, list[tuple[int, bool]]]]:
    """Whether a product's result is transposed before it is cut, and the parts, copied but for those that `_copies`
    says more of."""
    found: dict[tuple[int, bool], list[int]] = {}
    for op in graph.ops:
        if op.primitive in _CUTS:
            maker, steps = steps_from(graph, producers, op.operands[0], VIEWS)
            moved = any(step.primitive == "transpose" for step in steps)
            if maker >= 0 and graph.ops[maker].primitive == "dot_general" and not is_batched(graph.ops[maker]):
                found.setdefault((maker, moved), []).extend(op.results)
    for (_, moved), parts in found.items():
        if len(parts) > 1:
            yield moved, [(part, True) for part in parts]


def _copies(
    graph: Graph, axes: MeshAxes, part: int, reads: Mapping[tuple[int, int], np.ndarray], all_cublas: bool
) -> list[Copy]:
    """The copies of a part that products with batch dimensions read, the first one first; none where anything else
    reads it, or where they read it as it lies.  Triton's products pad and convert what they read by themselves."""
    found, uses = dict[Copy, int](), graph.uses()
    waiting: list[tuple[int, tuple[Op, ...]]] = [(part, ())]
    while waiting:
        value, steps = waiting.pop()
        for index, place in uses[value]:
            op = graph.ops[index]
            if op.primitive in (*VIEWS, "convert_element_type"):
                waiting.append((op.results[0], (op, *steps)))
                continue
            row = reads.get((index, place))
            if row is None or not is_batched(op) or (dims := pieces_of(graph, part, steps)) is None:
                return []
            sums, batch = (dims_[place] for dims_ in op.params["dimension_numbers"])
            kept = [d for d in range(len(dims)) if d not in (*sums, *batch)]
            order = [tuple(p for d in some for p in dims[d] if p[1] > 1) for some in (batch, kept, sums)]
            if order[0] == tuple(sorted({p for some in order for p in some}))[: len(order[0])]:
                return []
            local = local_sizes(graph.values[value].shape, row[None], axes)[0]
            sizes = [graph.values[v].item_bytes for v in op.operands[:2]]
            padded = max(sizes) == _HALF and any(local[list(some)].prod() % _PADDED for some in (kept, sums))
            order = order if place == 0 else [order[0], *reversed(order[1:])]
            copy = Copy(tuple(order), all_cublas and bool(padded), all_cublas and sizes[0] != sizes[1])
            found[copy] = min(index, found.get(copy, index))
    return sorted(found, key=found.__getitem__)
