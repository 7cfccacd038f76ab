"""Conversions that a TPU makes in kernels of their own, because their results are moved.

What is converted from an argument XLA for TPU converts again in every product that reads it, as it is read.  But what
is sent, or cut, is in memory first: weights f32[4096, 1024] that are gathered as bf16 take 84 us to convert on v5e,
inputs f32[8192, 4096] that one product reads whole and another one cut 673 us (jax 0.10.2, libtpu 0.0.42.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .residency import Flow


class Conversion(NamedTuple):
    """Attributes:
    bytes: of a value and of what it is converted from; elements: of either.
    """

    bytes: float
    elements: float


def conversions(flow: Flow, stored: Sequence[bool]) -> dict[tuple[int, int], Conversion]:
    """What products read converted from arguments, by (operation, place), outside of loops.

    Args:
      stored: for every value whether it is in memory anyway.
    """
    graph, found = flow.graph, {}
    for op in graph.ops:
        if not flow.rules[op.index].matmul or flow.loop_of[op.index] >= 0:
            continue
        for place, value in enumerate(op.operands):
            maker = graph.ops[flow.producers[value]] if flow.producers[value] >= 0 and not stored[value] else None
            if maker is not None and maker.primitive == "convert_element_type":
                made, source = graph.values[value], graph.values[maker.operands[0]]
                if flow.producers[source.index] < 0:
                    found[op.index, place] = Conversion(made.bytes + source.bytes, made.bytes / made.item_bytes)
    return found
