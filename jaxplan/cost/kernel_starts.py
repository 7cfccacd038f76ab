"""Starts of a GPU's kernels: elementwise work that is written to memory is a kernel too, however short.

What elementwise work writes starts one kernel for all that is written of one computation, unless a sum is in it, which
pays for its own; every stack that a loop fills is written by a kernel of its own in each iteration.  Of recurrent
networks, whose kernels work on some hundred rows, that is most of the time (a GRU, an LSTM and a conformer's loss,
loops of 10 to 40 such kernels, compiled for H100, jax 0.10.2).  One more counts a loop's iterations; it is counted with
the first of the loop's others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..disjoint import Disjoint
from ..ir import Op
from .residency import Flow


def kernel_starts(flow: Flow, writes: Sequence[Sequence[float]], kernels: Disjoint) -> tuple[float, ...]:
    """By operation, its share of a kernel's start.

    Args:
      writes: bytes, see `fusion.Traffic`; kernels: see `joined`.
    """
    graph = flow.graph
    writers: Counter[int] = Counter()
    paid: set[int] = set()
    for op in graph.ops:
        if flow.kinds[op.index] == "reduction":
            paid.add(kernels.find(op.index))
        elif flow.kinds[op.index] == "fused" and any(writes[op.index]):
            writers[kernels.find(op.index)] += 1

    def share(op: Op) -> float:
        if op.primitive == "scan_stack":
            return 1.0 if any(writes[op.index]) else 0.0
        kernel = kernels.find(op.index)
        written = flow.kinds[op.index] == "fused" and any(writes[op.index]) and kernel not in paid
        return 1.0 / writers[kernel] if written else 0.0

    shares, counted = list(map(share, graph.ops)), {-1}
    for index, loop in enumerate(flow.loop_of):
        if shares[index] and loop not in counted:
            shares[index] += 1.0
            counted.add(loop)
    return tuple(shares)
