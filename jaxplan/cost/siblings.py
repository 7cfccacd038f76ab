"""Kernels that XLA for GPU joins because they read the same: a sum, and elementwise work beside it.

Both then run when the first could, and what they read and write is in memory at once: the gradient of a learned
temperature, a sum over logits and their gradient, with the gradient of what the temperature scales (a retrieval network
compiled for H100, jax 0.10.2; multi_output_fusion.h).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .residency import Flow


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
