"""Which operations run in one kernel: what is made where it is read, and what reads the same tensor at one level."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from ..disjoint import Disjoint
from ..ir import Op
from .residency import Flow


def joined(
    flow: Flow,
    at_hand: Callable[[int, Op], bool],
    levels: Sequence[int],
    *,
    taking: Container[str],
    beside: Container[str],
) -> Disjoint:
    """The operations of a graph by kernel.

    Args:
      at_hand: whether a value is made by the kernel that an operation is part of.
      levels: of every operation; those of one level that read a tensor of their own shape are one kernel.
      taking: kinds of operations that join the kernels of what they read; beside: those that join other readers.
    """
    shapes = [tensor.shape for tensor in flow.graph.values]
    kernels = Disjoint(len(flow.graph.ops))
    readers: dict[tuple[int, int, int], int] = {}
    for op in flow.graph.ops:
        kind = flow.kinds[op.index]
        if kind not in taking:
            continue
        for value in op.operands:
            if flow.producers[value] >= 0 and not flow.source[value] and at_hand(value, op):
                kernels.join(op.index, flow.producers[value])
            elif kind in beside and shapes[value] == shapes[op.results[0]] != ():
                key = value, flow.loop_of[op.index], levels[op.index]
                kernels.join(op.index, readers.setdefault(key, op.index))
    return kernels
