"""The price of an operation under each of its strategies, and of a collective on each mesh axis.

Compute is a roofline at local shapes, so replicated work is never free.  Elementwise work is fused into its
neighbours: only what crosses a fusion's edge (`materialised`) is read and written.  Collectives are alpha-beta on
the link that their mesh axis runs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..hardware import AxisLink, Profile
from ..ir import Graph, Op
from ..sharding import MeshAxes, Rule, Strategies, pieces
from .collectives import collective_seconds
from .compute import roofline_seconds


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Prices on one machine and mesh: seconds, for one run of the operation (not times its trips).

    Attributes:
      exposed: share of a collective that computation doesn't hide; the search pays only that.
    """

    profile: Profile
    axes: MeshAxes
    links: tuple[AxisLink, ...]
    exposed: float = 1.0

    def collective(self, kind: str, size_bytes: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        """Exposed seconds of a collective over these mesh axes; see `collectives.collective_seconds`."""
        return self.exposed * np.asarray(
            collective_seconds(kind, size_bytes, tuple(self.links[i] for i in axes))
        )

    def collective_over(self, kind: str, size_bytes: float, names: Sequence[str]) -> float:
        """Seconds, hidden or not, of one collective over several named mesh axes (or parts of axes, see `link`)."""
        return float(collective_seconds(kind, np.asarray(size_bytes, float), tuple(map(self.link, names))))

    def link(self, name: str) -> AxisLink:
        """The link of a mesh axis, or of a part of one: "model:(2)4" is four devices of `model`, two apart."""
        whole, _, part = name.partition(":")
        link = self.links[[n for n, _ in self.axes].index(whole)]
        return replace(link, size=int(part.partition(")")[2])) if part else link

    def op_seconds(
        self, op: Op, rule: Rule, options: Strategies, graph: Graph, stored: Sequence[bool]
    ) -> np.ndarray:
        """`float64[n]`: compute seconds of one run of `op` under every strategy.

        Args:
          stored: for every value whether it is materialised in memory (see `materialised`).
        """
        if op.primitive in _LOOP_EDGES:
            return self._loop_edge_seconds(op, options, graph, stored)
        local_bytes = np.zeros(len(options))
        tensors = list(zip(op.operands, options.operands, strict=True)) + list(
            zip(op.results, options.results, strict=True)
        )
        for value, places in tensors:
            if stored[value]:
                local_bytes += graph.values[value].bytes / pieces(places, self.axes)
        flops = rule.flops * options.shares
        dtype = graph.values[op.operands[0]].dtype if op.operands else "float32"
        seconds = np.asarray(
            roofline_seconds(
                flops, local_bytes, dtype, self.profile, matmul=rule.matmul, dims=self._dims(rule, options)
            )
        )
        if rule.follows:
            # a fused operation starts no kernel of its own: no floor, only its share of the traffic
            return np.asarray(local_bytes / self._hbm_rate())
        return seconds

    def _loop_edge_seconds(
        self, op: Op, options: Strategies, graph: Graph, stored: Sequence[bool]
    ) -> np.ndarray:
        """One iteration's slice is read by whoever uses it, or here when that is fused; a stack is written."""
        if op.primitive == "scan_stack":
            moved, places = op.operands[0], options.operands[0]
        elif op.primitive == "scan_slice" and not stored[op.results[0]]:
            moved, places = op.results[0], options.results[0]
        else:
            return np.zeros(len(options))
        return graph.values[moved].bytes / pieces(places, self.axes) / self._hbm_rate()

    def _hbm_rate(self) -> float:
        return self.profile.hbm_bytes_per_s * self.profile.hbm_efficiency

    def _dims(self, rule: Rule, options: Strategies) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Local (m, n, k) of a contraction: products of the factors only in lhs, only in rhs, and reduced."""
        if not rule.matmul or len(rule.operands) < 2:
            return None
        sizes = np.repeat(np.array(rule.sizes, np.float64)[None, :], len(options), axis=0)
        for axis, (_, extent) in enumerate(self.axes):
            chosen = options.factors[:, axis]
            rows = np.nonzero(chosen >= 0)[0]
            sizes[rows, chosen[rows]] /= extent
        lhs = {f for d in rule.operands[0] for f in d}
        rhs = {f for d in rule.operands[1] for f in d}
        out = {f for r in rule.results for d in r for f in d}

        def product(factors: set[int]) -> np.ndarray:
            return sizes[:, sorted(factors)].prod(axis=1) if factors else np.ones(len(options))

        return product((lhs & out) - rhs), product((rhs & out) - lhs), product(set(rule.reduction))


_LOOP_EDGES = frozenset({"scan_slice", "scan_stack", "carry_init", "carry_next", "cond_join"})
"""Our own operations at the edges of loops and branches: none computes."""


def _loop_buffers(op: Op) -> tuple[int, ...]:
    """Values that a loop or branch keeps in a buffer of its own, however cheap the operations around it are."""
    if op.primitive in ("scan_stack", "carry_init", "cond_join"):
        return op.results
    return op.operands if op.primitive == "scan_slice" else ()


def materialised(graph: Graph, rules: Sequence[Rule]) -> list[bool]:
    """For every value whether it exists in memory: inputs, results and operands of operations that aren't fused.

    A value between two elementwise operations lives in registers of one fused kernel.
    """
    stored = [False] * len(graph.values)
    for value in (*graph.inputs, *graph.outputs, *graph.constants):
        stored[value] = True
    for op, rule in zip(graph.ops, rules, strict=True):
        if rule.source:
            continue
        if not rule.follows:
            for value in (*op.operands, *op.results):
                stored[value] = True
        for value in _loop_buffers(op):
            stored[value] = True
    sources = source_values(graph, rules)
    return [kept and not source for kept, source in zip(stored, sources, strict=True)]


def source_values(graph: Graph, rules: Sequence[Rule]) -> list[bool]:
    """For every value whether it can be made anywhere in any layout at no price.

    Constants, iota, broadcast scalars, and elementwise functions of nothing else.
    """
    source = [value.constant and value.index not in graph.constants for value in graph.values]
    for op, rule in zip(graph.ops, rules, strict=True):
        fused = rule.follows and op.primitive not in _LOOP_EDGES
        free = rule.source or (fused and bool(op.operands) and all(source[v] for v in op.operands))
        for value in op.results:
            source[value] = free
    return source
