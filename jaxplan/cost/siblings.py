"""Kernels that XLA for GPU joins because they read the same: a sum, and elementwise work beside it.

Both then run when the first could, and what they read and write is in memory at once: the gradient of a learned
temperature, a sum over logits and their gradient, with the gradient of what the temperature scales (a retrieval network
compiled for H100, jax 0.10.2; multi_output_fusion.h).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .held_back import PRODUCTS, last_products
from .residency import Flow

_LITTLE = 8
"""How many times the bytes of what it makes an operation reads that makes little of much."""


def beside_sums(
    flow: Flow,
    times: Sequence[int],
    stored: Sequence[bool],
    leaves: Sequence[Mapping[int, float] | None],
    levels: Sequence[int],
) -> tuple[int, ...]:
    """When each operation runs: what is elementwise and kept, with the first sum over as much of what it reads.

    Args:
      times: of each operation by itself; stored, leaves, levels: of values, values and operations, see `fusion`.
    """
    graph, found = flow.graph, list(times)
    first: dict[tuple[int, int, int], int] = {}
    for op in graph.ops:
        read = {leaf for v in op.operands for leaf in (leaves[v] or ())}
        keys = [(flow.loop_of[op.index], levels[op.index], leaf) for leaf in read]
        if flow.kinds[op.index] == "reduction":
            for key in keys:
                first.setdefault(key, times[op.index])
        elif flow.kinds[op.index] == "fused" and any(stored[v] for v in op.results):
            size = graph.values[op.results[0]].bytes
            together = [first[key] for key in keys if key in first and graph.values[key[2]].bytes >= size]
            ready = max((found[flow.producers[v]] for v in op.operands if flow.producers[v] >= 0), default=0)
            if together and ready <= min(together) < found[op.index]:
                found[op.index] = min(together)
    return tuple(found)


def as_soon_as_there(flow: Flow, times: Sequence[int], stored: Sequence[bool]) -> tuple[int, ...]:
    """When each operation runs: what makes little of much, behind the last product and outside of loops, once that is
    there.

    A step's metrics stand behind its updates; XLA takes the largest of the logits before those are let go (flax's
    lm1b example on H100, jax 0.10.2).  Of weights' gradients, which may be held back, nothing is said here.
    """
    graph, found = flow.graph, list(times)
    held, _ = last_products(graph.ops, ())
    last = max((op.index for op in graph.ops if op.primitive in PRODUCTS), default=len(graph.ops))
    for op in graph.ops:
        kind, results = flow.kinds[op.index], op.results
        if not held.isdisjoint(op.operands):
            held.update(results)
            continue
        if op.index < last or flow.loop_of[op.index] >= 0 or kind not in ("fused", "reduction"):
            continue
        if kind == "fused" and any(stored[v] for v in results):
            continue
        made = [flow.producers[v] for v in op.operands if not flow.source[v]]
        most = max((graph.values[v].bytes for v in op.operands), default=0)
        little = sum(graph.values[v].bytes for v in results) * _LITTLE <= most
        if (kind == "fused" or little) and all(one < 0 or flow.loop_of[one] < 0 for one in made):
            found[op.index] = min(found[op.index], max((found[one] for one in made if one >= 0), default=0))
    return tuple(found)
