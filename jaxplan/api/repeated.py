"""What all devices of a mesh axis compute alike because the batch doesn't divide: nothing else would show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..ir import Graph, Op, Traced
from ..sharding import NONE, MeshAxes

if TYPE_CHECKING:
    from .found import Candidate

HALF = 0.5
"""Share of the computation that an axis has to leave whole before the batch is blamed for it."""


def repeated(
    traced: Traced, kinds: Sequence[str], batch_dims: Sequence[int], axes: MeshAxes, best: Candidate
) -> tuple[str, ...]:
    """A warning for every mesh axis that cuts less than half of the computation, its size no divisor of the batch.

    The batch is the first dimension that no loop goes along (see `batch_dims`) of the largest leaf that is one (see
    `input_kinds`), where no dimension of that leaf is cut over the axis.
    """
    graph = traced.graph
    leaves = [
        i
        for i, kind in enumerate(kinds)
        # a key is two numbers, and no batch
        if kind == "batch" and len(traced.inputs[i].shape) > _is_key(graph, graph.inputs[i])
    ]
    if not leaves:
        return ()
    sizes = [graph.values[v].bytes for v in graph.inputs]
    largest = max(leaves, key=lambda i: sizes[i])
    dim = batch_dims[largest]
    if dim == len(traced.inputs[largest].shape):
        return ()
    rows = traced.inputs[largest].shape[dim]
    cut = {name for dim in best.inputs[largest].dims for name in dim}
    decision = best.found.decision
    whole_s = sum(decision.compute_s.values())
    told = []
    for axis, (name, size) in enumerate(axes):
        if name in cut or rows <= 1 or rows % size == 0:
            continue
        alike_s = sum(s for op, s in decision.compute_s.items() if decision.factors[op][axis] <= NONE)
        if alike_s > HALF * whole_s:
            fewer = f" or cut it to {rows - rows % size}" if rows > size else ""
            told.append(
                f"all {size} devices of `{name}` do {alike_s / whole_s:.0%} of the computation alike: dimension {dim} "
                f"of {traced.inputs[largest].path}, {rows}, is not divisible by {size}. Pad the batch to "
                f"{rows + size - rows % size}{fewer}"
            )
    return tuple(told)


def _is_key(graph: Graph, value: int) -> bool:
    return any(op.primitive == "random_wrap" for op in _readers(graph, value))


def _readers(graph: Graph, value: int) -> list[Op]:
    return [graph.ops[op] for op, _ in graph.uses()[value]]
