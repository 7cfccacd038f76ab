"""Products that sum nothing, kept apart from others of the same operands.

XLA multiplies broadcast operands instead of calling for such a product, and does so before Shardy looks at the program.
The gradient of what a head of one output reads is the head, broadcast, times a number for each row; so is what the head
makes of its input, summed after that, and the head's own gradient; XLA has one broadcast for each operand.  It was cut
by the time steps as the head's input is, the gradient with it, and a loop over time gathered the whole gradient in each
iteration (an LSTM's critic on eight v5e, jax 0.10.2, libtpu 0.0.42.1: 7 GiB for 61 MiB).  So what is broadcast goes
through a barrier of its own, and the result is pinned where it is made.  What is as large as the result does not: a
barrier would have a kernel write what could be made where it is multiplied (Mamba-2's decays, the exponentials of
differences, times scores).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from ..ir import Graph


def multiplied(graph: Graph) -> frozenset[int]:
    """The results of a step's products that sum nothing."""
    products = (op for op in graph.ops if op.primitive == "dot_general")
    return frozenset(op.results[0] for op in products if _sums_nothing(op.params, graph.values[op.operands[0]].shape))


def on_their_own(eqn: Any, operands: list[Any]) -> list[Any]:
    """The operands of an equation, of a product that sums nothing those that it broadcasts behind a barrier."""
    if eqn.primitive.name != "dot_general" or not _sums_nothing(eqn.params, eqn.invars[0].aval.shape):
        return operands
    made = eqn.outvars[0].aval.size
    broadcast = [var.aval.size < made for var in eqn.invars]
    return [jax.lax.optimization_barrier(x) if b else x for x, b in zip(operands, broadcast, strict=True)]


def _sums_nothing(params: Mapping[str, Any], shape: Sequence[int]) -> bool:
    contracted = params["dimension_numbers"][0][0]
    return all(shape[d] == 1 for d in contracted)
