"""Seconds of the collectives that the partitioner inserts, those that XLA will start together priced as such."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..cost import CostModel
from ..ir import Graph, start_shares
from ..sharding import Collective, Rule


def collective_prices(
    graph: Graph, rules: Sequence[Rule], model: CostModel, collectives: Sequence[tuple[Collective, int]]
) -> tuple[float, ...]:
    """Seconds of all runs of each collective, hidden or not, and of what packs it; 0 for those that move nothing.

    Args:
      collectives: with the operation that needs each, -1 where it is not known.
    """
    shares = start_shares(graph, [rule.matmul for rule in rules], [bool(rule.reduction) for rule in rules])

    # Parts of a total: XLA combines their sums on every platform (on CPU, five of them: one all_reduce of a tuple).
    scalars = Counter((item.kind, item.axes) for item, _ in collectives if not item.shape)

    def share(item: Collective, op: int) -> float:
        around = (*graph.ops[op].operands, *graph.ops[op].results) if op >= 0 and item.shape else ()
        return min((shares[v] for v in around if graph.values[v].shape == item.shape), default=1.0)

    def seconds(item: Collective, op: int) -> float:
        sent_s = model.collective_over(item.kind, item.bytes, item.axes, start_share=share(item, op))
        whole = (sent_s + model.packing_seconds(item.kind, item.axes)) * item.trips
        return whole if item.shape else whole / scalars[item.kind, item.axes]

    return tuple(0.0 if item.kind == "all_slice" else seconds(item, op) for item, op in collectives)
