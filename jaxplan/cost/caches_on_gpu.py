"""Caches that XLA for GPU turns round for attention and back for the caller.

Keys and values of new tokens are written into an argument that the step returns, bf16[4, 2048, 8, 128], and several
queries a key read all of it, by a product whose batches, sequences and heads, it wants first.  XLA turns the argument,
writes the tokens into a copy of that, and makes the result, the other way round again, at the end, out of what it has
kept of every layer.  The donated buffers are free meanwhile and hold some of the copies, but a copy that is read after
its neighbour's result is written fits in none: of keys and values of each layer one stays, and one more while a layer
runs, but where the heads are cut to one a device (decoding with 4 queries a key, 4 to 12 layers, one place for all
sequences: 1.0 to 1.2 of a layer's keys; a place for each, under `jax.vmap`: 0.7 to 1.0; `jax.nn.dot_product_attention`,
which turns both: 1.5; bf16 and f32, 64 and 128 columns; H100, jax 0.10.2).  Where a key has one query it is no matrix
product and all is read as it lies, and so are caches with the heads before the places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..ir import Graph
from ..sharding import MeshAxes
from .tiles import local_bytes, local_shape
from .turned_caches import matrix_batches
from .written import updates_part


class ReadCache(NamedTuple):
    """An argument with tokens written into it, `written`, that a product reads, and the dimensions that it wants first
    there."""

    written: int
    product: int
    batches: tuple[int, ...]


def read_caches(graph: Graph) -> Iterator[ReadCache]:
    """Those that the step returns, outside of loops, each with the first product that reads it as a matrix."""
    given, returned, around = set(graph.inputs), set(graph.outputs), graph.loops_around()
    producers, found = graph.producers(), set[int]()
    for op in graph.ops:
        if op.primitive != "dot_general" or around[op.index]:
            continue
        for place, value in enumerate(op.operands):
            dims = matrix_batches(graph, op, place)
            while dims and producers[value] >= 0 and (maker := graph.ops[producers[value]]).primitive == "transpose":
                dims = tuple(maker.params["permutation"][d] for d in dims)
                value = maker.operands[0]
            made = producers[value]
            if not dims or made < 0 or value in found or value not in returned or not updates_part(graph.ops[made]):
                continue
            if graph.ops[made].operands[0] in given:
                found.add(value)
                yield ReadCache(value, op.index, dims)


def turned_for_products(
    graph: Graph, axes: MeshAxes, found: Sequence[ReadCache], times: Sequence[int], values: Mapping[int, np.ndarray]
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of the copies: half of every cache's from its product on, and a whole one at the end.

    Args:
      times: see `Traffic`; values: the layout row of every value where it is made.
    """
    end, largest = len(graph.ops), 0
    for one in found:
        if (row := values.get(one.written)) is None:
            continue
        tensor = graph.values[one.written]
        if _turned(tensor.shape, one.batches):
            size = local_bytes(tensor, row, axes, "gpu")
            yield times[one.product], end, size // 2
            if _turned(local_shape(tensor.shape, row, axes), one.batches):
                largest = max(largest, size)
    if largest:
        yield max(times[one.product] for one in found), end, largest


def _turned(sizes: Sequence[float], batches: Sequence[int]) -> bool:
    """Whether dimensions that come first lie behind others, but for those of one place."""
    wanted = [d for d in batches if sizes[d] > 1]
    return any(sizes[d] > 1 for d in range(max(wanted, default=0)) if d not in wanted)
