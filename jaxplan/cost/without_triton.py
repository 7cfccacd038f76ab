"""Programs of which XLA for GPU makes all products by cuBLAS, and what these take.

Where no GPU is there to time kernels, XLA takes the first tiles that it knows for a product of Triton's: 16 rows by 8
columns, and 16 of what is summed.  An operand that lies transposed is fused into the product's kernel where it is the
first one of a product without batch dimensions, its rows are two runs in memory, and what is summed is one: what
attention's heads make, as `bhts,bshk->bthk` leaves it, by sequence, heads, columns and tokens.  A tile has to be whole
places of the dimensions that rows and sums are merged of: sequences of 4, 8, 48 and 208 tokens and heads of 4, 8, 16 or
32 columns are; sequences of 12, 40, 50, 100, 197, 200 and 257, and heads of 12, 24, 40 and 72 are not, and XLA fails
("Couldn't find output tile sizes").  So it is in f32 and in bf16, on A100, H100 and B200.

Not fused is what another product takes second in the same order, for a kernel writes it for both; what neither of the
maker's operands has its batches first for (scores `bths`, `btsh`); and where rows are few and the sum is made in
parts (see `split_k`), which are a batch (attention of 22 forms in two types, by hand and Linen's, and 1 to 16 sequences
a device: all as compiled for H100, jax 0.10.2, 2026-11-29).

Then the program is compiled without Triton's products (`hardware.targets.compile_for`), and every product is cuBLAS's,
those that would have had tiles, too: none is made in parts, and each has a workspace while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..hardware import Profile
from ..ir import VIEWS, Graph, Op
from ..sharding import MeshAxes
from .scores import is_batched
from .split_k import local_product, split_ways
from .tiles import local_sizes

_TILE = 16
"""Rows, and elements of what is summed, of a tile that Triton's products begin with."""

Piece = tuple[int, int]
"""Of a dimension: which of the maker's result it is, and its size."""


class _Read(NamedTuple):
    """How a product reads what one with batch dimensions makes, the pieces of its dimensions in its own order.

    Attributes:
      maker: the product that makes it; turned: whether the program transposes it in between.
      rows, sums: what the product keeps and what it sums, of a device.
    """

    op: Op
    place: int
    maker: int
    turned: bool
    rows: tuple[Piece, ...]
    sums: tuple[Piece, ...]


def without_triton(
    graph: Graph, axes: MeshAxes, reads: Mapping[tuple[int, int], np.ndarray], profile: Profile
) -> bool:
    """Whether XLA finds no tiles for a product of a device's.

    Args:
      reads: the layout row of every operand as it is read.
    """

    producers = graph.producers()

    def is_whole(op: Op) -> bool:
        lhs, rhs = (reads[op.index, place][None] for place in range(2))
        product = local_product(graph, op, producers, lhs, rhs, axes)
        return product is not None and float(split_ways(product, profile)[0]) == 1

    return profile.kind == "gpu" and any(map(is_whole, _without_tiles(graph, axes, reads)))


def may_be_without_triton(graph: Graph) -> bool:
    """The same where nothing is cut, and no product made in parts."""
    rows = {(op.index, place): np.zeros(0) for op in graph.ops for place in range(2) if op.primitive == "dot_general"}
    return next(_without_tiles(graph, (), rows), None) is not None


def _without_tiles(
    graph: Graph, axes: MeshAxes, reads: Mapping[tuple[int, int], np.ndarray]
) -> Iterator[Op]:
    found = [*_reads(graph, axes, graph.producers(), reads)]
    shared = {(one.maker, one.sums, one.rows) for one in found if one.place == 1}
    for one in found:
        lie = sorted({*one.rows, *one.sums})
        sums = one.sums if one.turned else sorted(one.sums)
        fused = one.place == 0 and _runs(one.rows, lie) == 2 and _runs(sums, lie) == 1
        if fused and (one.maker, one.rows, one.sums) not in shared:
            if not (_is_tiled(one.rows) and _is_tiled(sums)):
                yield one.op


def _reads(
    graph: Graph, axes: MeshAxes, producers: Sequence[int], reads: Mapping[tuple[int, int], np.ndarray]
) -> Iterator[_Read]:
    """Those by products without batch dimensions."""
    for op in graph.ops:
        if op.primitive != "dot_general" or is_batched(op) or any((op.index, place) not in reads for place in range(2)):
            continue
        for place, value in enumerate(op.operands):
            maker, steps = _made_by(graph, producers, value)
            if maker < 0 or (dims := pieces_of(graph, graph.ops[maker].results[0], steps)) is None:
                continue
            local = local_sizes(graph.values[value].shape, reads[op.index, place][None], axes)[0]
            dims = [_cut(pieces, int(size)) for pieces, size in zip(dims, local, strict=True)]
            summed = op.params["dimension_numbers"][0][place]
            rows = tuple(piece for d, pieces in enumerate(dims) if d not in summed for piece in pieces)
            sums = tuple(piece for d in summed for piece in dims[d])
            yield _Read(op, place, maker, any(step.primitive == "transpose" for step in steps), rows, sums)


def _made_by(graph: Graph, producers: Sequence[int], value: int) -> tuple[int, list[Op]]:
    """The product with batch dimensions, first ones of an operand, that makes `value`, or -1, and what shows its result
    otherwise, last first."""
    maker, steps = steps_from(graph, producers, value, {*VIEWS, "convert_element_type"})
    if maker < 0 or not is_batched(graph.ops[maker]):
        return -1, steps
    batches = zip(graph.ops[maker].operands, graph.ops[maker].params["dimension_numbers"][1], strict=False)
    first = any(math.prod(graph.values[v].shape[: max(b) + 1]) == _size(graph, v, b) for v, b in batches)
    return (maker if first else -1), steps


def steps_from(
    graph: Graph, producers: Sequence[int], value: int, primitives: Container[str]
) -> tuple[int, list[Op]]:
    """What makes the value that operations of one operand show as `value`, or -1, and these, last first."""
    steps = list[Op]()
    while (maker := producers[value]) >= 0 and graph.ops[maker].primitive in primitives:
        steps.append(graph.ops[maker])
        value = graph.ops[maker].operands[0]
    return maker, steps


def _size(graph: Graph, value: int, dims: Sequence[int]) -> int:
    return math.prod(graph.values[value].shape[d] for d in dims)


def pieces_of(graph: Graph, value: int, steps: Sequence[Op]) -> list[list[Piece]] | None:
    """For each dimension of what `steps` (last first) make of `value` the pieces that it is merged of; None where one
    is cut."""
    dims = [[(place, size)] for place, size in enumerate(graph.values[value].shape)]
    for op in reversed(steps):
        shape = graph.values[op.results[0]].shape
        if op.primitive == "transpose":
            dims = [dims[d] for d in op.params["permutation"]]
        elif op.primitive != "convert_element_type":
            merged = _regrouped([piece for pieces in dims for piece in pieces if piece[1] > 1], shape)
            if merged is None:
                return None
            dims = merged
    return dims


def _regrouped(pieces: list[Piece], shape: Sequence[int]) -> list[list[Piece]] | None:
    """Pieces in order as the dimensions of `shape`; None where one would have to be cut."""
    found, left = list[list[Piece]](), list(pieces)
    for size in shape:
        group = list[Piece]()
        while left and math.prod(n for _, n in group) < size:
            group.append(left.pop(0))
        if math.prod(n for _, n in group) != size:
            return None
        found.append(group)
    return found


def _cut(pieces: Sequence[Piece], size: int) -> list[Piece]:
    """What a device has of a dimension, the outermost pieces cut first; without those of one element."""
    inner, found = 1, list[Piece]()
    for place, n in reversed(pieces):
        found.append((place, max(min(n, math.ceil(size / inner)), 1)))
        inner *= n
    return [piece for piece in reversed(found) if piece[1] > 1]


def _runs(pieces: Sequence[Piece], lie: Sequence[Piece]) -> int:
    """In how many runs pieces lie in memory among all that do, in their order."""
    at = [lie.index(piece) for piece in pieces]
    return sum(after != before + 1 for before, after in zip([-2, *at], at, strict=False))


def _is_tiled(pieces: Sequence[Piece]) -> bool:
    """Whether a tile is whole places of what pieces are merged to."""
    left = _TILE
    for _, size in reversed(pieces):
        if size % left == 0:
            return True
        if left % size:
            return False
        left //= size
    return True
