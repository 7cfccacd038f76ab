"""Products that XLA for GPU holds back: weights' gradients that are all_reduced.

Nothing but the end of the step wants them, and XLA's latency-hiding scheduler, which works from the last operation to
the first, places them between the starts and ends of their sums: after all of the backward pass, one beside each sum.
They keep their operands till then, so that the activations and gradients of every layer are there at once.

What was compiled for eight H100 by jax 0.10.2: the layers' gradients of MLPs of width 1024, 2048, 4096 and 8192 and of
a GPT of four layers, not scanned, all run after the last product of the backward pass where they are all_reduced,
whole or after a reduce_scatter; where they are only scattered, layers' gradients run with the backward pass.  A loop
stays where it stands, and an LSTM's products before the backward loops stay before them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..ir import Graph
from ..sharding import UNREDUCED, MeshAxes, reshard_steps

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


def held_back(
    graph: Graph,
    axes: MeshAxes,
    stored: Sequence[bool],
    times: Sequence[int],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> tuple[int, ...]:
    """`times` of a step on GPU, with its last products held back if the sum of one of them is all_reduced.

    Args:
      stored, times: see `fusion.Traffic`.
      values, reads: the layout row of every value where it is made, and of every operand as it is read.

    Returns:
      Times at which products after the last loop that no other product needs run when what they make is wanted.
    """
    last = graph.ops[max((loop.stop for loop in graph.loops), default=0) :]
    needed: set[int] = set()  # by products
    for op in reversed(last):
        if op.primitive in _PRODUCTS or not needed.isdisjoint(op.results):
            needed.update(op.operands)
    held = {v for op in last if op.primitive == "dot_general" for v in op.results} - needed
    read = [(graph.ops[op].operands[position], row) for (op, position), row in reads.items()]
    if not any(value in held and _all_reduced(graph, axes, value, values, row) for value, row in read):
        return tuple(times)
    later = list(times)
    wanted: dict[int, int] = {}
    for op in reversed(last):
        if not held.isdisjoint(op.results) or not any(stored[v] or v in needed for v in op.results):
            first = min((wanted[v] for v in op.results if v in wanted), default=0)
            later[op.index] = max(later[op.index], first)
        for value in op.operands:
            wanted[value] = min(wanted.get(value, later[op.index]), later[op.index])
    return tuple(later)


def _all_reduced(
    graph: Graph, axes: MeshAxes, value: int, values: Mapping[int, np.ndarray], row: np.ndarray
) -> bool:
    made = values.get(value)
    if made is None or UNREDUCED not in made.tolist():
        return False
    return any(step.kind == "all_reduce" for step in reshard_steps(made, row, graph.values[value].bytes, axes))
