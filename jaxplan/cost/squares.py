"""Squares of a gradient that XLA makes once, for its norm and for the optimizer's second moment.

A norm is summed from slices of a gradient that every device has whole, which are free.  Where the optimizer squares the
whole gradient besides, both squares are one value to XLA (common subexpressions), and the kernel that updates weight
and moments writes it in a buffer of its own, of which the norm reads a slice later: DLRM's table of 10 million rows
under Adagrad, and an LSTM's vocabulary under Adam, compiled for v5e by jax 0.10.2, libtpu 0.0.42.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..ir import Graph, Op
from ..sharding import UNREDUCED
from .residency import Flow


class Squares(NamedTuple):
    """Attributes:
    value: the optimizer's squares; reader, place: which operand of which operation sums those of the norm.
    """

    value: int
    reader: int
    place: int


def shared_squares(flow: Flow, stored: Sequence[bool]) -> tuple[Squares, ...]:
    """Where elementwise work squares a value twice, and one of the two is only summed."""
    graph = flow.graph
    made: dict[int, list[int]] = {}
    for op in graph.ops:
        if (value := _squared(op)) is not None and not flow.source[value]:
            made.setdefault(value, []).append(op.results[0])
    found = []
    for squares in made.values():
        if len(squares) > 1 and not any(stored[v] for v in squares):
            summed = {v: end for v in squares if (end := _summed(flow, v)) is not None}
            whole = [v for v in squares if v not in summed]
            found += [Squares(whole[0], op.index, place) for op, place in summed.values() if whole]
    return tuple(found)


def whole_squares(
    found: Sequence[Squares],
    graph: Graph,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> Iterator[int]:
    """The squares that a kernel writes whole for a norm that reads slices of them."""
    for squares in found:
        row, read = values.get(squares.value), reads.get((squares.reader, squares.place))
        if row is not None and read is not None and UNREDUCED not in row and not np.array_equal(row, read):
            yield squares.value


def _squared(op: Op) -> int | None:
    """What `op` squares, or None."""
    twice = op.primitive == "mul" and op.operands[0] == op.operands[1]
    power = op.primitive == "integer_pow" and op.params.get("y") == 2
    return op.operands[0] if twice or power or op.primitive == "square" else None


def _summed(flow: Flow, value: int) -> tuple[Op, int] | None:
    """The sum that alone reads `value`, or what is made of it by adding constants; and as which operand."""
    while len(readers := flow.graph.uses()[value]) == 1:
        (index, place) = readers[0]
        op = flow.graph.ops[index]
        if flow.kinds[op.index] == "reduction":
            return op, place
        if op.primitive not in ("add", "reshape") or not all(flow.source[v] for v in op.operands if v != value):
            return None
        value = op.results[0]
    return None
