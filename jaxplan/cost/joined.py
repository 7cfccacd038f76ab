"""Which operations run in one kernel: what is made where it is read, and what reads the same tensor at one level."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..disjoint import Disjoint
from ..ir import Op
from .residency import Flow

_ELEMENTWISE = frozenset({"fused", "reduction"})
"""Kinds of what is elementwise, up to a sum of it."""


def joined(flow: Flow, at_hand: Callable[[int, Op], bool], levels: Sequence[int], platform: str) -> Disjoint:
    """The operations of a graph by kernel.

    Elementwise work joins the kernels of what it reads and of others that read the same; on TPU products join what they
    read, too, and sums nothing but that.

    Args:
      at_hand: whether a value is made by the kernel that an operation is part of.
      levels: of every operation; those of one level that read a tensor of their own shape are one kernel.
    """
    taking, beside = (_ELEMENTWISE,) * 2 if platform == "gpu" else (frozenset(flow.kinds), frozenset({"fused"}))
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
