"""Queries and keys that are normalised, or turned by their positions, head by head: what XLA for TPU keeps of them.

Where a product of matrices makes all heads in one dimension, which is split, and each head is converted to f32 for its
statistics (RMS or layer normalisation of queries and keys), XLA has the product write f32: the reshape stands between
the product and the conversion, which are swapped, and the statistics and what they normalise read it, forward and
backward.  Of a product that makes heads in a dimension of their own (flax's `DenseGeneral`) the bf16 result is kept,
and converted wherever it is read.

Halves that are turned and put together for products lie in tiles as these read them, head by head with a head's columns
in lanes, where those fill lanes: halves of 128 columns take twice their bytes, and what is normalised first is copied
into that order, and kept in both.  Heads of 64 columns, and those that are made in a dimension of their own, lie with
the tokens in lanes, and nothing is copied.

Where the whole is multiplied once, and with its halves exchanged once more, in bf16, products' kernels add both: the
whole and the halves are kept, not the sum.  In f32, which is rounded next, the sum is.

GPTs of four layers of 1024, 16 sequences of 2048 tokens, unrolled, with silu gates, SGD and Adam; v5e, v5p and v6e, jax
0.10.2, libtpu 0.0.42.1, 2026-11-30.  In loops the same is stacked, and was counted already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..ir import VIEWS, Graph, Lives, Op
from ..sharding import ELEMENTWISE, MeshAxes
from .residency import unmoved
from .scores import is_batched
from .tiles import LANES, local_bytes

_SLICES = frozenset({"slice", "split"})


def widened_by_heads(graph: Graph, producers: Sequence[int]) -> set[int]:
    """What is in memory of products whose heads are normalised: their results in wider numbers, head by head."""
    values, found = graph.values, set[int]()
    for op in graph.ops:
        if op.primitive == "convert_element_type":
            wide, heads = op.results[0], op.operands[0]
            maker, columns = producers[heads], (len(values[wide].shape) - 1,)
            split = maker >= 0 and _splits_heads(graph, producers, graph.ops[maker])
            if split and values[wide].item_bytes > values[heads].item_bytes:
                if any(one.params["axes"] == columns for one in _sums(graph, wide)):
                    found.add(wide)
    return found


def _sums(graph: Graph, value: int) -> Iterator[Op]:
    """The operations that sum a value, or its squares."""
    for op in (graph.ops[reader] for reader, _ in graph.uses()[value]):
        if op.primitive in ("integer_pow", "mul", "square"):
            squares = (graph.ops[reader] for reader, _ in graph.uses()[op.results[0]])
            yield from (one for one in squares if one.primitive == "reduce_sum")
        elif op.primitive == "reduce_sum":
            yield op


def turned_by_halves(graph: Graph, producers: Sequence[int]) -> set[int]:
    """What is multiplied whole and, its halves exchanged, once more, in a type that products read."""
    uses, found = graph.uses(), set[int]()
    for op in graph.ops:
        made = graph.values[op.results[0]] if op.primitive == "concatenate" else None
        if made is None or made.item_bytes > 2 or op.params["dimension"] != len(made.shape) - 1:
            continue
        parts = [_part_of(graph, producers, value) for value in op.operands]
        whole = parts[0]
        if whole is not None and set(parts) == {whole} and graph.values[whole].shape == made.shape:
            if any(graph.ops[reader].primitive not in _SLICES for reader, _ in uses[whole]):
                found.add(whole)
    return found


class Halves(NamedTuple):
    """Halves of heads that products read put together.

    Attributes:
      parts: what is put together, and what that is a view of; wide: what they are made of that is normalised.
    """

    parts: tuple[int, ...]
    wide: tuple[int, ...]


def halves_in_lanes(graph: Graph, producers: Sequence[int]) -> Iterator[Halves]:
    """Those of which products read lanes full of columns, from products that make all heads in one dimension."""
    wide = widened_by_heads(graph, producers)
    for op in graph.ops:
        made = graph.values[op.results[0]] if op.primitive == "concatenate" else None
        if made is None or op.params["dimension"] != len(made.shape) - 1 or made.shape[-1] % LANES:
            continue
        if _read_by_products(graph, op.results[0]) and (passed := _split_from(graph, producers, op)) is not None:
            parts = {unmoved(graph, producers, value) for value in op.operands}
            yield Halves((*parts.union(op.operands),), tuple(sorted(wide & passed)))


def normed_twice(
    graph: Graph, axes: MeshAxes, halves: Iterable[Halves], lives: Lives, values: Mapping[int, np.ndarray]
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of what is normalised, once more in that order.

    Args:
      values: the layout row of every value where it is made.
    """
    for value in {wide for one in halves for wide in one.wide}:
        if (row := values.get(value)) is not None:
            alive = lives.intervals[value]
            yield alive.start, alive.stop, local_bytes(graph.values[value], row, axes, "tpu")


def _read_by_products(graph: Graph, value: int) -> bool:
    """Whether products with batch dimensions alone read a value, as it is, converted, or as another view of it."""
    readers = [graph.ops[reader] for reader, _ in graph.uses()[value]]
    return bool(readers) and all(
        is_batched(op)
        or (op.primitive in VIEWS | {"convert_element_type"} and _read_by_products(graph, op.results[0]))
        for op in readers
    )


def _split_from(graph: Graph, producers: Sequence[int], op: Op) -> set[int] | None:
    """What lies between `op` and a product whose one dimension of heads a reshape splits, if all is made of that."""
    seen, todo, makers = set[int](), [*op.operands], set[int]()
    while todo:
        value = todo.pop()
        if value in seen or (maker := producers[value]) < 0:
            continue
        seen.add(value)
        made = graph.ops[maker]
        if made.primitive in ("dot_general", "reshape"):
            makers.add(maker)
        elif made.primitive in ELEMENTWISE | _SLICES | {"convert_element_type"}:
            rank = len(graph.values[value].shape)
            todo += [v for v in made.operands if len(graph.values[v].shape) == rank]
    split = len(makers) == 1 and _splits_heads(graph, producers, graph.ops[makers.pop()])
    return seen if split else None


def _splits_heads(graph: Graph, producers: Sequence[int], op: Op) -> bool:
    """Whether `op` reshapes what a product without batch dimensions makes to fewer columns."""
    if op.primitive != "reshape" or (maker := producers[op.operands[0]]) < 0:
        return False
    whole, heads = (graph.values[v].shape for v in (op.operands[0], op.results[0]))
    of_product = graph.ops[maker].primitive == "dot_general" and not is_batched(graph.ops[maker])
    return of_product and bool(whole and heads) and heads[-1] < whole[-1]


def _part_of(graph: Graph, producers: Sequence[int], value: int) -> int | None:
    """What a value is a part of, or the negative of a part."""
    while (maker := producers[value]) >= 0:
        op = graph.ops[maker]
        if op.primitive in _SLICES:
            return op.operands[0]
        if op.primitive != "neg":
            break
        value = op.operands[0]
    return None
