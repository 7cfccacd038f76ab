"""A peak that no plan on so many devices is under: refusals are proved by it without a search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..ir import Graph, settled_values
from ..sharding import Rule
from .crossing import Traffic


def least_memory(
    graph: Graph, rules: Sequence[Rule], crossing: Traffic, placed: Iterable[int], read: Iterable[tuple[int, int]],
    devices: int,
) -> int:  # fmt: skip
    """Bytes of one device that `simulate_memory` finds at least, whatever the layouts are.

    A device keeps no less than its even share of a tensor.  Counted are arguments, and values from where they are made
    until a step before their last reader is done: they lie there themselves, or copies of them in other layouts, each
    of which is made while the original still lies there.  Left out is what may be nowhere for a while, or in another's
    buffer: sums that may be pending, and next values of donated arguments.

    Args:
      crossing: see `traffic`; of a machine that runs operations at other times for some layouts (a GPU) nothing is
        told.
      placed, read: the values, and the (operation, operand) places, that have layouts of their own.
    """
    needed, intervals = crossing.lives
    end, settled, inputs = max(len(graph.ops), 1), settled_values(graph), {v: i for i, v in enumerate(graph.inputs)}
    aliased = {i for i, _ in graph.aliases}
    last: dict[int, int] = {}
    for op, position in read:
        value = graph.ops[op].operands[position]
        last[value] = max(last.get(value, 0), needed[op])
    rounded = {graph.ops[op].operands[position] for op, position in graph.narrow_reads}  # copies may be in half
    change = np.zeros(end + 1)
    for value in placed:
        start, stop = intervals[value]
        if value in inputs:
            stop = end if inputs[value] in aliased or inputs[value] not in graph.donated else stop
        elif not crossing.stored[value] or value in settled:
            continue
        else:
            producer = crossing.producers[value]
            if rules[producer].reduction or rules[producer].linear:
                continue
            if graph.ops[producer].primitive not in ("carry_init", "scan_stack"):
                stop = min(stop, last.get(value, 0)) - 1
        tensor = graph.values[value]
        least = tensor.narrow() if value in rounded and value not in inputs else tensor
        if stop > start:
            change[start] += least.bytes / devices
            change[min(stop, end)] -= least.bytes / devices
    return int(np.cumsum(change).max())
