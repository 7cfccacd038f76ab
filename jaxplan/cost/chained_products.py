"""Gradients of weights of ragged groups, which XLA for TPU makes one after another.

Products of ragged groups over rows (`jax.lax.ragged_dot`) are kernels of its own.  Where the ragged dimension is
summed, as for such weights' gradients, it makes each a product of masked rows instead, and lets each but the first wait
for the one before (by tokens), in the order in which the results lead to them.  The first is often that of the first
layer, which the backward pass comes to last: all of them run then, and keep what they read (six layers of 32 experts on
v5e: 3 of 6 GB; jax 0.10.2, 2026-11-29).
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ir import Op, post_order
from .residency import Flow


def chained(flow: Flow) -> Iterator[tuple[int, int]]:
    """(operation, the one that it waits for) of each that runs behind a later one, of its loop's body or the step."""
    found: dict[int, list[int]] = {}
    for op in flow.graph.ops:
        if op.primitive == "ragged_dot_general" and _sums_rows(op):
            found.setdefault(flow.loop_of[op.index], []).append(op.index)
    chains = [ops for ops in found.values() if len(ops) > 1]
    places = post_order(flow.graph) if chains else ()
    for ops in chains:
        last = -1
        for index in sorted(ops, key=lambda index: places[index]):
            last = max(last, index)
            if last > index:
                yield index, last


def _sums_rows(op: Op) -> bool:
    numbers = op.params["ragged_dot_dimension_numbers"]
    contracted, _ = numbers.dot_dimension_numbers[0]
    return bool(set(numbers.lhs_ragged_dimensions) & set(contracted))
