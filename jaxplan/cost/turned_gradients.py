"""Gradients of attention's projections that lie in two orders on GPU till the end of the step.

The product over heads leaves the gradient of queries, keys or values with the heads first; the weight's gradient reads
it with the tokens first, a copy that the product before it has had made.  The bias' sum reads what the product over
heads made.  Where weights' gradients are held back (see `held_back`), so are the biases' sums, and both are there till
then: three more arrays a layer (vision transformers in f32 under data parallelism, 128 images a device, H100, jax
0.10.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..ir import VIEWS, Graph
from ..sharding import MeshAxes
from .held_back import PRODUCTS
from .scores import is_batched
from .tiles import local_bytes

_SCALED = frozenset({"convert_element_type", "div", "mul", "neg"})


def turned_gradients(
    graph: Graph,
    axes: MeshAxes,
    stored: Sequence[bool],
    times: Sequence[int],
    values: Mapping[int, np.ndarray],
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of the copies, from the first product that reads one to the one that is held back.

    Args:
      stored, times: see `Traffic`, the times with what is held back.
      values: the layout row of every value where it is made.
    """
    producers, uses = graph.producers(), graph.uses()
    for op in graph.ops:
        if op.primitive not in PRODUCTS or times[op.index] <= op.index:
            continue
        for value in op.operands:
            chain, turned = _turned(graph, producers, stored, value)
            if not turned or (row := values.get(chain[-1])) is None:
                continue
            if any(graph.ops[reader].primitive == "reduce_sum" for v in chain for reader, _ in uses[v]):
                first = min(times[reader] for reader, _ in uses[value])
                if first < times[op.index]:
                    yield first, times[op.index] + 1, local_bytes(graph.values[chain[-1]], row, axes, "gpu")


def _turned(graph: Graph, producers: Sequence[int], stored: Sequence[bool], value: int) -> tuple[list[int], bool]:
    """What `value` is made of, back to what a product over heads made, and whether that is transposed."""
    chain, turned = [value], False
    while (maker := producers[chain[-1]]) >= 0 and not stored[chain[-1]]:
        op, size = graph.ops[maker], math.prod(graph.values[chain[-1]].shape)
        alike = [v for v in op.operands if math.prod(graph.values[v].shape) == size]
        if op.primitive not in VIEWS | _SCALED or len(alike) != 1:
            return chain, False
        turned |= op.primitive == "transpose"
        chain += alike
    return chain, turned and maker >= 0 and is_batched(graph.ops[maker])
