"""Products whose sum over devices is scattered around a ring, on TPU: what they read is in memory.

Outside of loops XLA for TPU makes of an f32 product and the reduce_scatter of its sum one loop, in which a piece of the
product is added to what comes from one neighbour and passed on to the other.  What is computed for the product is
computed before that loop, though a kernel would compute it as it goes along: the gradient of f32 logits in the last
layers of a GRU, a conformer and a masked autoencoder (v5e, jax 0.10.2, libtpu 0.0.42.1).  Of bf16 products of networks
none was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..ir import Graph
from ..sharding import UNREDUCED, MeshAxes
from .residency import unmoved
from .tiles import local_bytes


def ring_operands(
    graph: Graph,
    axes: MeshAxes,
    stored: Sequence[bool],
    producers: Sequence[int],
    times: Sequence[int],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of what is made for such products and else would not be in memory.

    Args:
      stored, producers, times: see `Traffic`; values, reads: see `simulate_memory`.
    """
    around = graph.loops_around()
    for op in graph.ops:
        if (
            op.primitive != "dot_general"
            or around[op.index]
            or graph.values[op.results[0]].dtype != "float32"
        ):
            continue
        made = values.get(op.results[0])
        if made is None or not _scattered(graph, op.results[0], made, reads):
            continue
        for place, value in enumerate(op.operands):
            origin = unmoved(graph, producers, value)
            computed = not stored[value] and not stored[origin] and producers[origin] >= 0
            if computed and (op.index, place) in reads:
                row = reads[op.index, place]
                size = local_bytes(graph.values[value], row, axes, "tpu")
                yield times[op.index], times[op.index] + 1, size


def _scattered(
    graph: Graph, value: int, made: np.ndarray, reads: Mapping[tuple[int, int], np.ndarray]
) -> bool:
    """Whether a sum over devices is read in pieces of it."""
    pending = made == UNREDUCED
    rows = (reads.get(use) for use in graph.uses()[value])
    return bool(pending.any()) and any(row is not None and (row[pending] >= 0).any() for row in rows)
