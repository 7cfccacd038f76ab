"""Complementary error functions in f32 that XLA for TPU keeps: exact gelus'.

A gelu's derivative reads the function as well as its argument.  XLA for v5p keeps both for the backward pass, for v5e
and v6e the argument alone (`keeps_erfcs`; layers of 384 to 4096 in f32, in products of three and four dimensions and a
ConvNeXt, jax 0.10.2, libtpu 0.0.42.1; in bf16 all three keep two values, the argument and what is scaled of it).

An exact gelu in f32 that is dropped out of, by bits that are hashed from a key, is too large a kernel for v5e to put
into products: what is dropped out is written for them, as they round it, and kept until the last of them
(`keeps_drops`; layers of 384 and 512, 64, 197 and 256 tokens, 2026-11-30).  v6e makes it again in each product; so does
v5e of tanh's gelus, of bf16 and without the dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ..ir import Graph, Lives, Op
from ..sharding import ELEMENTWISE, MeshAxes
from .converted_weights import Converted
from .held_back import PRODUCTS
from .masks import is_hash
from .precision import rounded_share, rounds_operands
from .residency import made_of
from .tiles import local_bytes

_F32 = 4


def kept_erfcs(
    graph: Graph,
    axes: MeshAxes,
    stored: Sequence[bool],
    times: Sequence[int],
    lives: Lives,
    values: Mapping[int, np.ndarray],
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of those that are in no buffer by the rules of `fusion`: as long as what they are made of.

    Args:
      stored, times: see `Traffic`; values: the layout row of every value where it is made.
    """
    producers, uses = graph.producers(), graph.uses()
    for op in graph.ops:
        value = op.results[0] if _is_erfc(graph, op) else -1
        if value < 0 or stored[value] or len(uses[value]) < 2:
            continue
        origin = op.operands[0]
        while not stored[origin] and (maker := producers[origin]) >= 0 and graph.ops[maker].primitive in ELEMENTWISE:
            shape = graph.values[origin].shape
            origin = next((v for v in graph.ops[maker].operands if graph.values[v].shape == shape), -1)
            if origin < 0:
                break
        if origin < 0 or not stored[origin] or producers[origin] < 0 or (row := values.get(origin)) is None:
            continue
        stop = lives.intervals[origin].stop
        if times[op.index] + 1 < stop:
            yield times[op.index], stop, local_bytes(graph.values[value], row, axes, "tpu")


def kept_drops(
    graph: Graph,
    axes: MeshAxes,
    stored: Sequence[bool],
    times: Sequence[int],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> Iterator[Converted]:
    """What is dropped out of exact gelus in f32 for products that round it.

    Args:
      stored, times: see `Traffic`; reads: the layout row of every operand as it is read.
    """
    if not any(is_hash(graph, op) for op in graph.ops):
        return
    uses = graph.uses()
    products = (op for op in graph.ops if op.primitive == "dot_general" and rounds_operands(op, graph))
    for value in dict.fromkeys(value for op in products for value in op.operands):
        tensor, readers = graph.values[value], [use for use in uses[value] if use in reads]
        if stored[value] or not readers or not _is_dropped(graph, stored, value):
            continue
        moments = [times[op] for op, _ in readers]
        size = local_bytes(tensor, reads[readers[0]], axes, "tpu")
        yield Converted(min(moments) - 1, max(moments) + 1, math.ceil(size * rounded_share(tensor)), value)


def _is_dropped(graph: Graph, stored: Sequence[bool], value: int) -> bool:
    """Whether one kernel would make a value by an error function in f32 and by hashing as many bits."""
    producers, size = graph.producers(), math.prod(graph.values[value].shape)

    def has(wanted: Callable[[Op], bool]) -> bool:
        def within(op: Op) -> bool:
            return not stored[op.results[0]] and op.primitive not in PRODUCTS and not wanted(op)

        made = (v for v in made_of(graph, producers, value, within) if producers[v] >= 0 and not stored[v])
        return any(wanted(graph.ops[producers[v]]) and math.prod(graph.values[v].shape) == size for v in made)

    return has(lambda op: is_hash(graph, op)) and has(lambda op: _is_erfc(graph, op))


def _is_erfc(graph: Graph, op: Op) -> bool:
    return op.primitive == "erfc" and graph.values[op.results[0]].item_bytes == _F32
