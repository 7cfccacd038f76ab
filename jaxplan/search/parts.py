"""Which operations take the parts of a sum, where the partitioner works on the parts and sums over devices after."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..ir import SUMS, Graph, Parts, turned_sums
from ..sharding import Rule


def parts_taken(graph: Graph, rules: Sequence[Rule], accumulating: Parts, waited: Collection[int]) -> Parts:
    """By operation, the operands of which it may take the parts: additions, what is turned before one, and all that
    leads to a sum that a loop accumulates.

    Args:
      accumulating: see `accumulating_ops`.
      waited: values that are finished before a loop and read after it. The barrier that they pass is there to end what
        makes them, their sum included: neither Shardy nor XLA adds across it.  (What a loop accumulates is held in
        parts by layouts that are written down, through barriers too.)
    """
    sums = {
        op.index: tuple(p for p in (0, 1) if op.index in accumulating or op.operands[p] not in waited)
        for op, rule in zip(graph.ops, rules, strict=True)
        if op.primitive in SUMS and all(dims == rule.results[0] for dims in rule.operands)
    }
    return {**turned_sums(graph, waited), **accumulating, **sums}
