"""Which products a TPU's matrix unit multiplies in bf16, f32 operands rounded on the way in."""

from __future__ import annotations

import math
from typing import Any

from jax.lax import Precision

from ..ir import Graph, Op, Value

_ROUNDED = 2
"""Bytes of an element as the matrix unit multiplies it."""


def rounds_operands(op: Op, graph: Graph) -> bool:
    """Whether a product rounds f32 operands to bf16, as at jax's default precision."""
    precision: Any = op.params.get("precision", Precision.HIGHEST)
    both = precision if isinstance(precision, tuple) else (precision, precision)
    if any(one is not None and one != Precision.DEFAULT for one in both):
        return False
    return op.primitive == "conv_general_dilated" or (op.primitive == "dot_general" and not _by_vector(op, graph))


def rounded_share(tensor: Value) -> float:
    """What of a tensor's bytes there is of it where a product rounds it."""
    return min(_ROUNDED / tensor.item_bytes, 1.0)


def _by_vector(op: Op, graph: Graph) -> bool:
    """Whether one operand of a product has nothing but what is summed and what both are batched over."""
    sides = zip(op.operands, *op.params["dimension_numbers"], strict=True)
    return any(
        math.prod(n for d, n in enumerate(graph.values[v].shape) if d not in (*summed, *batch)) == 1
        for v, summed, batch in sides
    )
