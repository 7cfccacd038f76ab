"""What runs inside a `shard_map`: one device's program, whose shapes no plan changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..ir import Graph, Op, graph_of_body
from ..sharding import Rule, graph_rules
from .kinds import idle, source_values

if TYPE_CHECKING:
    from .crossing import Traffic


@dataclass(frozen=True, kw_only=True)
class Body:
    """The body of a `shard_map`.

    Attributes:
      graph: at the shapes of one device; rules, crossing: of its operations, see `traffic`.
      priced: its operations that take time, those that the user wrote to communicate aside.
    """

    graph: Graph
    rules: tuple[Rule, ...]
    crossing: Traffic
    priced: tuple[int, ...]

    @property
    def rows(self) -> tuple[dict[int, np.ndarray], dict[tuple[int, int], np.ndarray]]:
        """Layout rows over no axis: of every value that is made, and of every operand as it is read."""
        whole = np.empty(0, np.int64)
        free = source_values(self.graph, self.rules)
        values = {v.index: whole for v in self.graph.values if not free[v.index]}
        reads = {(op.index, i): whole for op in self.graph.ops for i, v in enumerate(op.operands) if v in values}
        return values, reads

    def products(self) -> Iterator[tuple[str, float]]:
        """Source and floating-point operations of each of its matrix products and convolutions, in one run of it."""
        for op, rule in zip(self.graph.ops, self.rules, strict=True):
            if rule.matmul:
                yield op.source, (rule.flops - rule.empty_flops) * op.trips
            elif op.index in self.crossing.bodies:
                yield from ((source, flops * op.trips) for source, flops in self.crossing.bodies[op.index].products())


def bodies(
    graph: Graph, platform: str, traffic: Callable[[Graph, Sequence[Rule], str], Traffic]
) -> Mapping[int, Body]:
    """By operation, the bodies of the step's `shard_map`s."""
    return {op.index: _body(op, platform, traffic) for op in graph.ops if op.primitive == "shard_map"}


def _body(op: Op, platform: str, traffic: Callable[[Graph, Sequence[Rule], str], Traffic]) -> Body:
    graph = graph_of_body(op.params["jaxpr"], op.source)
    rules = graph_rules(graph)
    free = source_values(graph, rules)
    priced = (op.index for op in graph.ops if op.primitive not in _WRITTEN and not idle(op, free))
    return Body(graph=graph, rules=rules, crossing=traffic(graph, rules, platform), priced=tuple(priced))


_WRITTEN = frozenset(
    {"all_gather", "all_gather_invariant", "all_to_all", "pbroadcast", "pmax", "pmin", "ppermute",
     "psum", "psum2", "psum_invariant", "psum_scatter", "ragged_all_to_all", "reduce_scatter", "axis_index"}
)  # fmt: skip
"""The partitioner names what these send."""
