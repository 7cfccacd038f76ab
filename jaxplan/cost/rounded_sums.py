"""What XLA for TPU runs behind a sum over devices whose pieces are rounded up, and moved on by a permute.

The permute (see `scattered_sums`) is asynchronous.  XLA's latency-hiding scheduler, which works from the last operation
to the first, starts one only when nothing else is left to place, and what leads to the sum is placed before that start:
whatever else is ready by then, none of which the sum is made of, runs behind it with its operands kept.  Where the
gradient of an embedding is such a sum, the last of the backward pass, that is every weight's gradient whose sum is
whole on every device, many such in one collective (not those that are scattered, of a Hyena), and the log-probabilities
that only the loss reads: a network of 96 recomputed layers took 14.0 GB for 3.4 (v5e, tables of 8192 x 768 in pieces of
1032 rows for 1024, and of 16384 x 768; none of 4096 or 8196 rows, nor on v5p and v6e, where pieces are not rounded; jax
0.10.2, libtpu 0.0.42.1, 2026-11-27).  It does so while that fits the chip's memory: of 112 and 128 layers, for which it
would take more, 15.9 and 14.5 GB of 16.9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..ir import Graph, Op
from ..sharding import MeshAxes
from .held_back import PRODUCTS, behind_loops, run_later, summed_over_devices
from .model import CostModel
from .scattered_sums import excess_bytes


class Behind(NamedTuple):
    """What runs behind a sum that is rounded up, see the module.

    Attributes:
      ops: products, and what is made for lookups, in the order of the program.
      at: the operation that makes the last such sum.
    """

    ops: tuple[int, ...]
    at: int


def behind_rounded(
    graph: Graph,
    axes: MeshAxes,
    model: CostModel,
    stored: Sequence[bool],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> Behind | None:
    """What a step on TPU runs behind the last of its sums that are rounded up; None: none is.

    Args:
      stored: see `fusion.Traffic`.
      values, reads: the layout row of every value where it is made, and of every operand as it is read.
    """
    last = behind_loops(graph)
    rounded, whole = set[int](), set[int]()
    for value, row, step in summed_over_devices(graph, axes, {v for op in last for v in op.results}, values, reads):
        if step.kind == "all_reduce":
            whole.add(value)
        elif step.kind == "reduce_scatter" and excess_bytes(model, graph.values[value], row, axes, step.axes):
            rounded.add(value)
    if not rounded:
        return None
    needed = set(rounded)
    for op in reversed(last):
        if not needed.isdisjoint(op.results):
            needed.update(op.operands)
    made, uses = graph.producers(), graph.uses()
    at = max(made[value] for value in rounded)

    def waits(op: Op) -> bool:
        readers = {graph.ops[reader].primitive for value in op.results if stored[value] for reader, _ in uses[value]}
        looked_up = op.primitive != "gather" and "gather" in readers
        return looked_up or (op.primitive in PRODUCTS and not whole.isdisjoint(op.results))

    ops = (op.index for op in last if op.index < at and needed.isdisjoint(op.results) and waits(op))
    return Behind(tuple(ops), at)


def put_behind(graph: Graph, times: Sequence[int], behind: Behind) -> tuple[int, ...]:
    """`times` of a step with all of `behind` run there, products one after another."""
    until, free, last = dict[int, int](), behind.at, len(graph.ops) - 1
    for index in behind.ops:
        product = graph.ops[index].primitive in PRODUCTS
        until[index] = free if product else behind.at
        free = min(free + product, last)
    return run_later(behind_loops(graph), times, until)
