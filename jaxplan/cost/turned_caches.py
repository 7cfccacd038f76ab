"""Caches that a loop over tokens carries and attention reads, which XLA for TPU turns round for the loop.

Keys and values of one token are written into an argument, bf16[4, 4096, 8, 128], by an update of one place, and the
attention of that token reads all of it.  The loop's buffer lies as its reader wants it, the argument as arguments do,
so that each is copied before the loop and back behind it, and is in memory twice:

- a key that one query reads is no matrix product: the places written come first, and a cache of which they don't, but
  for dimensions of one, is turned;
- a key of several queries is one: its batches, sequences and heads, come first, before the places (where heads lie
  before places in the argument too, XLA may still turn the keys, or the values, for the writing; that is not counted).

So do caches of 64 columns, whose buffers differ in size too (see `written`), where a key has one query; where it has
several, the argument lies as is wanted.

What is scattered, each sequence at a place of its own, is written where it lies, but for an update under `jax.vmap`
into a cache whose heads are cut to one a device: XLA writes it in a loop of its own, in tiles of heads by columns, 4
bytes for the one head in each of 128 columns: twice what bf16[4, 16384, 1, 128] has as an argument, four times what 64
columns have (not so f32, which fills them, `cache.at[rows, places].set`, heads that are one to begin with, a single
token; nor libtpu 0.0.50.1: `HEADS_ARE_PADDED`).

Decoding of 16 tokens by four layers, 1 to 16 heads of keys, 64 to 256 columns, 1 to 8 sequences a device, f32 and bf16,
heads before and behind places (jax 0.10.2, libtpu 0.0.42.1, v5p, some on v5e and v6e, 2026-11-27), and a Gemma 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .._jax import HEADS_ARE_PADDED
from ..ir import Graph, Op
from ..sharding import MeshAxes
from .converted_weights import Converted
from .tiles import LANES, Tiling, local_bytes, local_shape
from .written import updates_part

_WORD = 4
"""Bytes of an element that fills a tile of one row."""

_RANK = 3
"""Dimensions of a cache at least: places, heads or sequences, and columns."""


class TurnedCache(NamedTuple):
    """A carry that is an argument at first, the loop's operations, the dimension that is written along, None where each
    sequence has a place of its own, and those that its reader wants before it: none where one query reads each key."""

    carry: int
    loop: tuple[int, int]
    along: int | None
    batches: tuple[int, ...]


def turned_caches(graph: Graph) -> Iterator[TurnedCache]:
    """Those that one update writes a place of in each turn, and a product reads."""
    uses, given = graph.uses(), set(graph.inputs)
    for op in graph.ops:
        if op.primitive != "carry_init" or op.operands[0] not in given:
            continue
        carry, loop = op.results[0], graph.loop_after(op.index)
        updates = [graph.ops[r] for r, place in uses[carry] if place == 0 and updates_part(graph.ops[r])]
        if loop is None or len(updates) != 1 or len(graph.values[carry].shape) < _RANK:
            continue
        (update,) = updates
        if update.primitive != "dynamic_update_slice":
            if HEADS_ARE_PADDED and update.params["dimension_numbers"].operand_batching_dims:
                yield TurnedCache(carry, loop, None, ())
            continue
        whole, part = (graph.values[v].shape for v in update.operands[:2])
        along = [d for d, (n, m) in enumerate(zip(whole, part, strict=True)) if n != m]
        if len(along) != 1 or part[along[0]] != 1:
            continue
        read = [(r, place) for v in (carry, update.results[0]) for r, place in uses[v]]
        products = [(graph.ops[r], place) for r, place in read if graph.ops[r].primitive == "dot_general"]
        if products:
            yield TurnedCache(carry, loop, along[0], matrix_batches(graph, *products[0]))


def matrix_batches(graph: Graph, product: Op, place: int) -> tuple[int, ...]:
    """The batch dimensions of a cache that is an operand; none where the other operand has but one row for each."""
    (contracted, batched), other = product.params["dimension_numbers"], product.operands[1 - place]
    inside = {*contracted[1 - place], *batched[1 - place]}
    rows = math.prod(size for d, size in enumerate(graph.values[other].shape) if d not in inside)
    return tuple(batched[place]) if rows > 1 else ()


def turned_for_loops(
    graph: Graph, axes: MeshAxes, found: Sequence[TurnedCache], times: Sequence[int], values: Mapping[int, np.ndarray]
) -> Iterator[Converted]:
    """The copies; `values`: the layout row of every value where it is made."""
    for one in found:
        if (row := values.get(one.carry)) is None:
            continue
        tensor = graph.values[one.carry]
        *_, heads, columns = sizes = local_shape(tensor.shape, row, axes)
        tiling: Tiling = "any"
        if one.along is None:
            turned = heads == 1 < tensor.shape[-2] and tensor.item_bytes < _WORD
            tiling = frozenset((len(sizes) - 2, len(sizes) - 1))
        else:
            wanted = [d for d in one.batches if d > one.along] if one.batches else range(one.along)
            turned = columns >= LANES and any(sizes[d] > 1 for d in wanted)
        if turned:
            size = local_bytes(tensor, row, axes, "tpu", tiling)
            yield Converted(times[one.loop[0]], times[one.loop[1] - 1] + 1, size, one.carry)
