"""Products that wait for a scatter: the gradient of a table that a step looks up rows of and multiplies by, too.

Of a language model that multiplies by its embedding in the end one gradient is the product's and one the lookups'.  XLA
for TPU fuses their sum, and the optimizer's update of it, into the product's kernel, before it decides when anything
runs: the product waits for the lookups' gradient, which the backward pass makes last, and the logits, of which it
computes its operand, and what it multiplies them by are there until then.  Not where the product's result is summed
over devices or brought into another layout first, nor where a loop is between (GPTs of 2 to 8 layers whose vocabulary
is cut over eight v5e: the logits of 64000 words are there for all of the backward pass, 524 MB; with rows or the
table's columns cut they are not; jax 0.10.2, libtpu 0.0.42.1, 2026-11-28).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..ir import SUMS, Graph
from ..sharding import UNREDUCED
from .held_back import behind_loops, run_later

_SAME = frozenset({"convert_element_type", "reshape", "transpose"})


def after_lookups(
    graph: Graph,
    times: Sequence[int],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> tuple[int, ...]:
    """`times` of a step on TPU with such products run once the scatter that they wait for has; themselves without any.

    Args:
      values, reads: the layout row of every value where it is made, and of every operand as it is read.
    """
    last = behind_loops(graph)
    begins = last[0].index if last else len(graph.ops)
    until = {
        product: max(times[scatter], times[product])
        for product, scatter in _added(graph, values, reads)
        if product >= begins
    }
    return run_later(last, times, until) if until else tuple(times)


def _added(
    graph: Graph, values: Mapping[int, np.ndarray], reads: Mapping[tuple[int, int], np.ndarray]
) -> Iterator[tuple[int, int]]:
    """(product, scatter) whose results are added as they were made, and read by nothing else."""
    producers, uses = graph.producers(), graph.uses()

    def made(value: int) -> int:
        while producers[value] >= 0 and len(uses[value]) == 1:
            op = graph.ops[producers[value]]
            if op.primitive not in _SAME:
                return op.index
            reader = (op.index, 0)
            before = values.get(op.operands[0])
            if before is None or reader not in reads or not np.array_equal(before, reads[reader]):
                return -1
            value = op.operands[0]
        return -1

    for op in graph.ops:
        if op.primitive not in SUMS or len(op.operands) != 2:
            continue
        for place in (0, 1):
            product, scatter = made(op.operands[place]), made(op.operands[1 - place])
            if min(product, scatter) < 0 or graph.ops[product].primitive != "dot_general":
                continue
            row, read = values.get(op.operands[place]), reads.get((op.index, place))
            complete = row is not None and read is not None and np.array_equal(row, read) and UNREDUCED not in row
            if complete and graph.ops[scatter].primitive == "scatter-add" and product < scatter:
                yield product, scatter
