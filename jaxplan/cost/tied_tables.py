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
from typing import NamedTuple

import numpy as np

from ..ir import SUMS, Graph
from ..sharding import UNREDUCED
from .held_back import behind_loops, run_later

_SAME = frozenset({"convert_element_type", "reshape", "transpose"})


class Tied(NamedTuple):
    """A product and the scatter whose result is added to its own; `read`: as which operands, of which operations, both
    are handed on to the sum, the product's own to the sum last."""

    product: int
    scatter: int
    read: tuple[tuple[int, int], ...]


def tied_tables(graph: Graph) -> Iterator[Tied]:
    """Those after the last loop whose results nothing else reads."""
    producers, uses = graph.producers(), graph.uses()
    begins = next((op.index for op in behind_loops(graph)), len(graph.ops))

    def handed_on(value: int) -> tuple[int, list[tuple[int, int]]]:
        read: list[tuple[int, int]] = []
        while (maker := producers[value]) >= 0 and len(uses[value]) == 1:
            if graph.ops[maker].primitive not in _SAME:
                return maker, read
            read.append((maker, 0))
            value = graph.ops[maker].operands[0]
        return -1, read

    for op in graph.ops[begins:]:
        for place in (0, 1) if op.primitive in SUMS and len(op.operands) == 2 else ():
            (product, own), (scatter, other) = (handed_on(op.operands[p]) for p in (place, 1 - place))
            if begins <= product < scatter and graph.ops[product].primitive == "dot_general":
                if graph.ops[scatter].primitive == "scatter-add":
                    yield Tied(product, scatter, (*other, *own, (op.index, place)))


def _rounded(graph: Graph, one: Tied) -> bool:
    """Whether the gradients are added in another type than they are made in: each is summed over devices before."""
    return any(graph.ops[op].primitive == "convert_element_type" for op, _ in one.read)


def after_lookups(
    graph: Graph,
    found: Sequence[Tied],
    times: Sequence[int],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> tuple[int, ...]:
    """`times` of a step on TPU with such products run once the scatter that they wait for has; themselves without any.

    Args:
      found: see `tied_tables`.
      values, reads: the layout row of every value where it is made, and of every operand as it is read.
    """

    def as_made(use: tuple[int, int]) -> bool:
        made, read = values.get(graph.ops[use[0]].operands[use[1]]), reads.get(use)
        return made is not None and read is not None and np.array_equal(made, read)

    until = {
        one.product: max(times[one.scatter], times[one.product])
        for one in found
        if all(map(as_made, one.read)) and (UNREDUCED not in reads[one.read[-1]] or not _rounded(graph, one))
    }
    return run_later(behind_loops(graph), times, until) if until else tuple(times)
