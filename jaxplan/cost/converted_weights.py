"""Weights that XLA for TPU converts in a kernel of their own, and keeps converted until the last product reads them.

A product converts f32 weights as it reads them, each product anew. Not so weights that a projection to heads reads as
they lie, f32[1024, 8, 128]: the contracted dimension is none of the two that lie in tiles, and what is converted once
there all products read, forward and backward (25 shapes compiled for v5e, three for v5p, one layer's forward pass
alone, jax 0.10.2, libtpu 0.0.42.1). Nor so what so many products read that reading f32 in each takes more than reading
it once, writing bf16 and reading that: four, of two forward passes and their backward passes, but not three (three
shapes, 1 to 6 products, v5e). Weights that lie otherwise, for these would pad them (6 heads, or heads of 64), are
converted as they are read, and so are those with the contracted dimension in tiles, f32[8, 128, 1024].

A table whose rows are gathered is converted whole before, however large it is and however few the rows, and a product
with the same table, as tied logits are, reads that: f32[131072, 2048] leaves 537 MB until the last of both (tables of
1,024 to 1,024,000 rows of 16 to 2048, gathered alone and with tied logits, forward and with gradients, v5e).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..ir import Graph, Value
from ..sharding import MeshAxes
from .residency import Flow
from .tiles import local_sizes, padding

_READERS = {("dot_general", 0), ("dot_general", 1), ("gather", 0)}
"""Operations, and which of their operands they read as it was converted."""


class Converted(NamedTuple):
    """A copy: from when to when, its bytes, and the value that was converted."""

    start: int
    stop: int
    size: int
    value: int


def converted_weights(
    graph: Graph,
    axes: MeshAxes,
    stored: Sequence[bool],
    times: Sequence[int],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> Iterator[Converted]:
    """Those of products outside of loops, read where they lie.

    Args:
      stored, times: see `Traffic`; values, reads: see `simulate_memory`.
    """
    producers, uses, around = graph.producers(), graph.uses(), graph.loops_around()
    for source, made in _narrowed(graph, producers):
        wide, narrow, row = graph.values[source], graph.values[made[0]], values.get(source)
        if row is None or len(wide.shape) < 2 or any(stored[v] for v in made):
            continue
        readers = [
            (reader, place)
            for value in made
            for reader, place in uses[value]
            if (graph.ops[reader].primitive, place) in _READERS
            and not around[reader]
            and np.array_equal(reads.get((reader, place), row), row)
        ]
        products = [(reader, place) for reader, place in readers if graph.ops[reader].primitive == "dot_general"]
        looked_up = len(readers) > len(products)
        if looked_up:
            turned = [(reader, place) for value in made for reader, place in _turned(graph, uses, value)]
            readers += [(r, p) for r, p in turned if _as_made(graph, r, p, values, reads) and not around[r]]
        tiles = _in_tiles(wide, row, axes)
        read_wide = len(products) * wide.item_bytes
        read_narrow = wide.item_bytes + narrow.item_bytes + len(products) * narrow.item_bytes
        if looked_up or read_wide > read_narrow or any(_spares(graph, *read, tiles) for read in products):
            when = [times[reader] for reader, _ in readers]
            sizes = local_sizes(narrow.shape, row[None], axes)
            size = narrow.item_bytes * sizes.prod() * padding(sizes, narrow.item_bytes)[(0, *tiles)]
            yield Converted(min(when), max(when) + 1, math.ceil(size), made[0])


def _turned(graph: Graph, uses: Sequence[Sequence[tuple[int, int]]], value: int) -> Iterator[tuple[int, int]]:
    """The products, and their operands' places, that read a value's transpose."""
    for reader, _ in uses[value]:
        op = graph.ops[reader]
        if op.primitive == "transpose":
            yield from (use for use in uses[op.results[0]] if graph.ops[use[0]].primitive == "dot_general")


def _as_made(
    graph: Graph, reader: int, place: int, values: Mapping[int, np.ndarray], reads: Mapping[tuple[int, int], np.ndarray]
) -> bool:
    """Whether an operand is read in the layout that it is made in."""
    row, made = reads.get((reader, place)), values.get(graph.ops[reader].operands[place])
    return row is not None and made is not None and np.array_equal(row, made)


def table_traffic(flow: Flow, bytes_of: Sequence[float], reads: list[tuple[float, ...]]) -> None:
    """Counts in `reads`, bytes by operand of every operation, the conversion of tables that rows are gathered of."""
    graph, uses = flow.graph, flow.graph.uses()
    for source, made in _narrowed(graph, flow.producers):
        readers = [graph.ops[reader] for value in made for reader, place in uses[value] if place == 0]
        gathers = [op.index for op in readers if op.primitive == "gather" and flow.loop_of[op.index] < 0]
        if gathers:
            first = min(gathers)
            reads[first] = (reads[first][0] + bytes_of[source] + bytes_of[made[0]], *reads[first][1:])


def _narrowed(graph: Graph, producers: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Arguments, and what they are converted to in narrower numbers: what is converted alike is converted once."""
    alike: dict[tuple[int, str], list[int]] = {}
    for op in graph.ops:
        if op.primitive == "convert_element_type" and producers[source := op.operands[0]] < 0:
            made = graph.values[op.results[0]]
            if made.item_bytes < graph.values[source].item_bytes:
                alike.setdefault((source, made.dtype), []).append(made.index)
    for (source, _), results in alike.items():
        yield source, results


def _in_tiles(weights: Value, row: np.ndarray, axes: MeshAxes) -> tuple[int, int]:
    """The dimensions that an argument's tiles hold: of those that pad it least the last ones, in lanes first."""
    (waste,) = padding(local_sizes(weights.shape, row[None], axes), weights.item_bytes)
    lane, rows = np.argwhere(waste <= waste.min())[-1].tolist()
    return lane, rows


def _spares(graph: Graph, product: int, place: int, dims: tuple[int, int]) -> bool:
    """Whether a product sums over none of these dimensions of an operand, and has no batch."""
    (contracted, batched) = (sides[place] for sides in graph.ops[product].params["dimension_numbers"])
    return not batched and not set(contracted) & set(dims)
