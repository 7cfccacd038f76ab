"""What cuBLAS's products leave in memory of one that is cut: queries, keys and values that one product makes.

cuBLAS takes its operands by batches, and XLA hands it what its first one sums last and what its second one sums first.
What products read of a part in one order is copied into it at once.  Keys are read in two, for the scores and for the
queries' gradient: the second copy is made by the kernel that copies the queries, which are in the same order, and kept
like them, and the whole is gone.  Where no kernel can make both, it is made just before it is read, of the whole, which
is in memory till then beside the copies of queries and values: five thirds of it.  So it is where the program moves
the parts to the front (slices of what is written so share nothing, xla/service/gpu/transforms/multi_output_fusion.cc),
and where one copy is padded and the other is not: in half precision to whole 16 bytes (257 tokens to 264), but not for
`jax.nn.dot_product_attention`, whose scores' gradient is f32.  Three layers of a recommender of 200 tokens and nine of
a U-ViT of 257, and attention by `split` and `moveaxis` in both types, compiled for H100 without Triton's products (jax
0.10.2, 2026-11-29).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..ir import VIEWS, Graph, Lives, Op
from ..sharding import UNREDUCED, MeshAxes
from .merged_products import kept_until
from .scores import is_batched
from .tiles import device_bytes, local_sizes
from .without_triton import Piece, pieces_of

_CUTS = frozenset({"slice", "split"})
_PADDED = 8
"""Elements of half precision that every dimension of an operand is padded to whole numbers of (`CublasPadForGemms`)."""


class Copy(NamedTuple):
    """How a part is read: in which order, as a product's operand, and whether padded."""

    order: tuple[tuple[Piece, ...], ...]
    padded: bool


def kept_whole(
    graph: Graph,
    axes: MeshAxes,
    producers: Sequence[int],
    lives: Lives,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of what is in memory beside the parts that are read.

    Args:
      values, reads: see `simulate_memory`.
    """
    for moved, parts in _cut(graph, producers):
        copies = {part: _copies(graph, axes, part, reads) for part in parts}
        known = all(v in values and UNREDUCED not in values[v].tolist() for v in parts)
        if not known or not all(copies.values()):
            continue
        alone = {copy for found in copies.values() if len(found) == 1 for copy in found}
        twice = [v for v, found in copies.items() if len(found) > 1 and (moved or alone.isdisjoint(found))]
        for value, start, stop in kept_until(lives, [(v, v not in twice) for v in parts]) if twice else ():
            yield start, stop, int(device_bytes(graph.values[value], values[value][None], axes, "gpu")[0])


def _cut(graph: Graph, producers: Sequence[int]) -> Iterator[tuple[bool, list[int]]]:
    """The parts that a product's result is cut into, and whether it is transposed before."""
    found: dict[tuple[int, bool], list[int]] = {}
    for op in graph.ops:
        if op.primitive in _CUTS:
            value, moved = op.operands[0], False
            while (maker := producers[value]) >= 0 and graph.ops[maker].primitive in VIEWS:
                moved |= graph.ops[maker].primitive == "transpose"
                value = graph.ops[maker].operands[0]
            if maker >= 0 and graph.ops[maker].primitive == "dot_general" and not is_batched(graph.ops[maker]):
                found.setdefault((maker, moved), []).extend(op.results)
    for (_, moved), parts in found.items():
        if len(parts) > 1:
            yield moved, parts


def _copies(
    graph: Graph, axes: MeshAxes, part: int, reads: Mapping[tuple[int, int], np.ndarray]
) -> set[Copy]:
    """The copies of a part that products with batch dimensions read; none where anything else reads it, or where they
    read it as it lies."""
    found, uses = set[Copy](), graph.uses()
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
                return set()
            sums, batch = (dims_[place] for dims_ in op.params["dimension_numbers"])
            kept = [d for d in range(len(dims)) if d not in (*sums, *batch)]
            order = [tuple(p for d in some for p in dims[d] if p[1] > 1) for some in (batch, kept, sums)]
            if order[0] == tuple(sorted({p for some in order for p in some}))[: len(order[0])]:
                return set()
            local = local_sizes(graph.values[value].shape, row[None], axes)[0]
            half = all(graph.values[v].item_bytes == 2 for v in op.operands[:2])
            padded = half and any(local[list(some)].prod() % _PADDED for some in (kept, sums))
            found.add(Copy(tuple(order if place == 0 else [order[0], *reversed(order[1:])]), bool(padded)))
    return found
