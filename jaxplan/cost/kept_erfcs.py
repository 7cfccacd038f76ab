"""Complementary error functions in f32 that XLA for TPU keeps: exact gelus'.

A gelu's derivative reads the function as well as its argument.  XLA for v5p keeps both for the backward pass, for v5e
and v6e the argument alone (`keeps_erfcs`; layers of 384 to 4096 in f32, in products of three and four dimensions and a
ConvNeXt, jax 0.10.2, libtpu 0.0.42.1; in bf16 all three keep two values, the argument and what is scaled of it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..ir import Graph, Lives
from ..sharding import ELEMENTWISE, MeshAxes
from .tiles import device_bytes

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
        value = op.results[0] if op.primitive == "erfc" else -1
        if value < 0 or stored[value] or graph.values[value].item_bytes != _F32 or len(uses[value]) < 2:
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
            yield times[op.index], stop, int(device_bytes(graph.values[value], row[None], axes, "tpu")[0])
