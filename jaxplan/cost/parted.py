"""Rows that XLA for GPU would not write, but for being gathered: one kernel makes and reads them, else two do.

What a norm adds up of scattered gradients, for one: their squares, written by the kernels that update weights, are
gathered, and summed by kernels of their own (155 biases of a U-Net, H100, jax 0.10.2).  What is spread over something
larger is none: the kernel that makes it, for such as read it as it is, is not the one that works on what is larger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from ..ir import VIEWS, Graph

_SEEN = VIEWS | {"broadcast_in_dim"}


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


def is_row(tensor: _Shaped) -> bool:
    """Whether no more than one dimension is longer than 1: pieces lie one behind the other."""
    return sum(extent > 1 for extent in tensor.shape) <= 1


def kernels_beside(tensor: _Shaped, parted: bool) -> float | None:
    """Kernels that XLA for GPU runs beside a gather of a row, see `parted_rows`; None: it is no row."""
    return float(parted) if is_row(tensor) else None


def parted_rows(graph: Graph, stored: Sequence[bool]) -> frozenset[int]:
    """Values of one dimension that no kernel writes, and that others read than such as spread them.

    Args:
      stored: of every value, whether it exists in memory between the kernels that make it and read it.
    """
    found, results = set(), frozenset(graph.outputs)
    for op in graph.ops:
        for value in op.operands:
            tensor = graph.values[value]
            if not tensor.shape or stored[value] or value in results or op.primitive in _SEEN or not is_row(tensor):
                continue
            size = math.prod(tensor.shape)
            if op.results and all(math.prod(graph.values[v].shape) <= size for v in op.results):
                found.add(value)
    return frozenset(found)
