"""When operations run on a platform, as indices of operations: see `fusion.Traffic`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .carries import added_in_place
from .chained_products import chained
from .late_products import late_products
from .residency import Flow, run_times
from .siblings import beside_sums


def run_at(
    flow: Flow,
    platform: str,
    stored: Sequence[bool],
    leaves: Sequence[Mapping[int, float] | None],
    levels: Sequence[int],
) -> tuple[int, ...]:
    """When each operation runs.

    Args:
      stored, leaves: of every value whether it is in memory, and what kernels compute it from; levels: of operations.
    """
    if platform == "gpu":
        return beside_sums(flow, late_products(flow, stored), stored, leaves, levels)
    if platform != "tpu":
        return tuple(range(len(flow.graph.ops)))
    found = list(run_times(flow, stored))
    for op, made in added_in_place(flow, stored).items():
        found[op] = found[made]
    for op, last in chained(flow):
        found[op] = max(found[op], last)
    return tuple(found)
