"""Broadcasts that are read in several layouts, made anew for all but one of these.

A broadcast costs nothing wherever it is read, so each reader has it as it lies best for that one.  XLA merges those of
one operand before Shardy looks at the program, as it does all that is equal: there is one, in one layout, which
propagation takes on to the readers of the others (the degrees of a graph's nodes, by which sums are divided forward and
backward, cut by eight devices and by four: the backward division was cut by eight, and what two pieces of edges are
gathered from it exchanged, 5 GB; v5p, jax 0.10.2, 2026-11-29), or which is gathered for them (the mask of rows that are
in range, `bool[131072, 1024]`).  Another order of axes is another layout (a bias that is added to images of a
discriminator's step and of the generator's, cut by `data` and `model` and by `model` and `data`: 172 MB of them were
exchanged; v5e, 2026-12-01).  An operand behind a barrier of its own makes another broadcast.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.lax import GatherScatterMode

from ..ir import VIEWS, Graph, Op
from ..sharding import ELEMENTWISE, NONE, UNREDUCED, Layout
from .axis_orders import Orders

_CHEAP = ELEMENTWISE | VIEWS | {"broadcast_in_dim"}

ANEW = "broadcast"
"""`Constraint.why` of an operand that is broadcast anew for its reader."""


def broadcast_anew(
    graph: Graph, values: Mapping[int, np.ndarray], reads: Mapping[tuple[int, int], np.ndarray], orders: Orders
) -> Iterator[tuple[int, int]]:
    """(operation, operand) of those that read a broadcast otherwise than most do, or in another order of axes.

    Args:
      values, reads: the layout row of every value where it is made, and of every operand as it is read.
    """
    around, numbers = graph.loops_around(), _Numbers(graph)
    alike: dict[tuple[object, ...], dict[Layout, list[tuple[int, int]]]] = {}
    for op in graph.ops:
        for position in range(len(op.operands)):
            if (op.index, position) in reads:
                of, use = _of(graph, values, reads, numbers, op, position)
                row = None if use is None else values.get(use[1]) if use[0] == "value" else reads.get(use[1:])
                if use is not None and row is not None:
                    layout = orders.layout(*use, np.where(row == UNREDUCED, NONE, row), int(row.max(initial=-1)) + 1)
                    layouts = alike.setdefault((*of, *around[op.index][-1:]), {})
                    layouts.setdefault(layout, []).append((op.index, position))
    for layouts in alike.values():
        most = max(layouts.values(), key=len)
        for readers in layouts.values():
            yield from readers if readers is not most else ()


def _of(
    graph: Graph,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    numbers: _Numbers,
    op: Op,
    position: int,
) -> tuple[tuple[object, ...], tuple[str, int, int] | None]:
    """What tells apart the broadcast that `op` reads, one of an operation's or its own, and whose layout it has.

    Of a number it is none: Shardy itself has a number's broadcast once for each reader.  Of indices it is the mask of
    those that are in range.
    """
    value = op.operands[position]
    shape, made = graph.values[value].shape, numbers.producers[value]
    if made >= 0 and value not in values and graph.ops[made].primitive == "broadcast_in_dim":
        if graph.values[graph.ops[made].operands[0]].shape:
            return (numbers.of(value),), ("read", op.index, position)
    if op.primitive == "gather" and position == 1 and op.params["mode"] == GatherScatterMode.FILL_OR_DROP:
        rows = graph.values[op.operands[0]].shape, graph.values[op.results[0]].shape
        return (numbers.of(value), *rows, str(op.params["dimension_numbers"])), ("value", op.results[0], 0)
    if op.primitive in ELEMENTWISE and shape and shape != (whole := graph.values[op.results[0]].shape):
        same = [i for i, v in enumerate(op.operands) if graph.values[v].shape == whole and (op.index, i) in reads]
        return (numbers.of(value), whole), ("read", op.index, same[0]) if same else None
    return (), None


class _Numbers:
    """Numbers that are equal where XLA merges what makes two values: cheap operations of the same values."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self.producers = graph, graph.producers()
        self._behind = graph.behind()
        self._known: dict[int, int] = {}
        self._first: dict[Hashable, int] = {}

    def of(self, value: int) -> int:
        """The number of a value: that of the first that is equal."""
        waiting = [value]
        while waiting:
            one = waiting[-1]
            maker = self._graph.ops[self.producers[one]] if self.producers[one] >= 0 else None
            before = [] if maker is None or maker.primitive not in _CHEAP else maker.operands
            if one in self._known or not (unknown := [v for v in before if v not in self._known]):
                waiting.pop()
                self._known.setdefault(one, self._number(one, maker if before else None))
            else:
                waiting += unknown
        return self._known[value]

    def _number(self, value: int, maker: Op | None) -> int:
        tensor = self._graph.values[value]
        if maker is None:
            key: Hashable = value if tensor.number is None else (tensor.dtype, tensor.shape, tensor.number)
        else:
            read = tuple(self._known[v] for v in maker.operands)
            said = tuple(sorted((name, str(of)) for name, of in maker.params.items()))
            key = maker.primitive, maker.results.index(value), said, read, self._behind[maker.index]
        return self._first.setdefault(key, value)


class Broadcasts:
    """Makes anew, of a step that is replayed, what was broadcast; tracers are told apart by identity, and kept."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Any, Any]] = {}

    def note(self, eqn: Any, operands: Sequence[Any], results: Sequence[Any]) -> None:
        """Remember what a broadcast is made of."""
        if eqn.primitive.name == "broadcast_in_dim" and len(operands) == 1 and np.ndim(operands[0]):
            self._made[id(results[0])] = (results[0], operands[0], eqn)

    def anew(self, value: Any, eqn: Any) -> Any:
        """`value` as another broadcast, for its reader; as it is where it isn't known to be one."""
        if id(value) in self._made:
            _, operand, made = self._made[id(value)]
            return made.primitive.bind(jax.lax.optimization_barrier(operand), **made.params)
        return jax.lax.optimization_barrier(value) if value.size < eqn.outvars[0].aval.size else value
