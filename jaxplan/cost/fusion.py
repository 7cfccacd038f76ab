"""What stays in memory and what crosses it, when XLA fuses a step into kernels.

A kernel is one contraction, or none, with the elementwise work and data movement before and after it.  It is
found by levels: an operation runs at the level of its latest operand; what a reduction makes, and what a contraction
or an operation that can't be fused reads, is a level later.  Values live in registers inside a level.  A cheap value
that a later level needs again is computed there again from what is in memory, as XLA's fusion duplicates cheap
producers, unless that would read more than storing it writes and reads.  Each level reads a tensor once, however many
of its operations use it: XLA fuses siblings that share an operand (xla/service/instruction_fusion.h,
multi_output_fusion.h).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..ir import Graph, Op
from ..sharding import Rule

LOOP_EDGES = frozenset({"scan_slice", "scan_stack", "carry_init", "carry_next", "cond_join"})
"""Our own operations at the edges of loops and branches: none computes."""

_MOVEMENT = frozenset(
    {"broadcast_in_dim", "concatenate", "dynamic_slice", "pad", "reshape", "rev", "slice", "split", "squeeze",
     "transpose"}
)  # fmt: skip
"""Data movement that XLA fuses as it fuses elementwise work, whether or not layouts follow through it."""

_REDUCTIONS = frozenset(
    {"argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"}
)
"""Reductions: the root of a kernel, fused with what makes their operand."""


_EXPENSIVE = frozenset(
    {"acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "div", "erf", "erf_inv", "erfc",
     "exp", "exp2", "expm1", "lgamma", "log", "log1p", "logistic", "pow", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh"}
)  # fmt: skip
"""What no contraction is taken to compute again for its operand: transcendentals and division, in the spirit of
`IsExpensive` of xla/service/instruction_fusion.cc; backends differ (for GPU it calls f32 exp and division cheap)."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Memory traffic of the unpartitioned step, one run of each operation.

    Attributes:
      stored: for every value whether it exists in memory.
      reads: for every operation, for each operand the bytes that it reads because of it.
      writes: for every operation, for each result the bytes that it writes.
    """

    stored: tuple[bool, ...]
    reads: tuple[tuple[float, ...], ...]
    writes: tuple[tuple[float, ...], ...]


def fused(op: Op, rule: Rule) -> bool:
    """Whether `op` starts no kernel of its own."""
    return (rule.follows or op.primitive in _MOVEMENT) and op.primitive not in LOOP_EDGES


def traffic(graph: Graph, rules: Sequence[Rule]) -> Traffic:
    """What crosses memory in `graph`; see the module."""
    return _Kernels(graph, rules).traffic()


def materialised(graph: Graph, rules: Sequence[Rule]) -> list[bool]:
    """For every value whether it exists in memory, `Traffic.stored`."""
    return list(traffic(graph, rules).stored)


def source_values(graph: Graph, rules: Sequence[Rule]) -> list[bool]:
    """For every value whether it can be made anywhere in any layout at no price.

    Constants, iota, broadcast scalars, and elementwise functions of nothing else.
    """
    source = [value.constant and value.index not in graph.constants for value in graph.values]
    for op, rule in zip(graph.ops, rules, strict=True):
        follows = rule.follows and op.primitive not in LOOP_EDGES
        free = rule.source or (follows and bool(op.operands) and all(source[v] for v in op.operands))
        for value in op.results:
            source[value] = free
    return source


class _Kernels:
    def __init__(self, graph: Graph, rules: Sequence[Rule]) -> None:
        self.graph, self.rules = graph, rules
        self.source = source_values(graph, rules)
        self.producers = graph.producers()
        self.kinds = [self._kind(op) for op in graph.ops]
        self.loop_of = [-1] * len(graph.ops)
        for position, loop in enumerate(graph.loops):
            for t in range(loop.start, loop.stop):
                self.loop_of[t] = position  # inner loops stand after outer ones
        self.op_level, self.value_level = [0] * len(graph.ops), [0] * len(graph.values)
        self._find_levels()
        self.stored = self._forced()
        self.leaves: list[Mapping[int, float] | None] = [None] * len(graph.values)
        self._find_leaves()

    def _kind(self, op: Op) -> str:
        if op.primitive in LOOP_EDGES:
            return "edge"
        if fused(op, self.rules[op.index]):
            return "fused"
        return "reduction" if op.primitive in _REDUCTIONS else "heavy"

    def _here(self, value: int, op: Op) -> bool:
        """Whether `value` is made in the loop body that `op` stands in; else it is in memory before the body starts."""
        producer = self.producers[value]
        return producer >= 0 and self.loop_of[producer] == self.loop_of[op.index]

    def _find_levels(self) -> None:
        floor: dict[int, int] = {}
        highest: dict[int, int] = {}
        before = -1
        for op in self.graph.ops:
            loop, kind = self.loop_of[op.index], self.kinds[op.index]
            if loop < before:
                floor[loop] = highest.get(loop, 0) + 1  # no kernel runs before and after a loop
            before = loop
            level = floor.get(loop, 0)
            for value in op.operands:
                if self._here(value, op) and not self.source[value]:
                    complete = kind == "heavy" and self.kinds[self.producers[value]] != "edge"
                    level = max(level, self.value_level[value] + complete)
            self.op_level[op.index] = level
            highest[loop] = max(highest.get(loop, 0), level)
            later = kind == "reduction" or (kind == "heavy" and not self.rules[op.index].matmul)
            for result in op.results:
                self.value_level[result] = level + later

    def _forced(self) -> list[bool]:
        """Values in memory whatever is computed again."""
        stored = [False] * len(self.graph.values)
        for value in (*self.graph.inputs, *self.graph.outputs, *self.graph.constants):
            stored[value] = True
        for op in self.graph.ops:
            if self.rules[op.index].source:
                continue
            kind = self.kinds[op.index]
            matmul = self.rules[op.index].matmul
            whole = (
                list(op.operands) if (kind == "heavy" and not matmul) or op.primitive == "scan_slice" else []
            )
            if kind in ("heavy", "reduction") and not matmul:
                whole += op.results
            if op.primitive in ("scan_stack", "carry_init", "cond_join"):
                whole += op.results
            whole += [v for v in op.operands if not self._here(v, op)]
            for value in whole:
                stored[value] = True
        return [kept and not source for kept, source in zip(stored, self.source, strict=True)]

    def _find_leaves(self) -> None:
        """From which stored values a kernel computes each value again; stores what it can't and a later level reads."""
        crosses = [False] * len(self.graph.values)
        contracted = [False] * len(self.graph.values)
        for op in self.graph.ops:
            for value in op.operands:
                crosses[value] |= self.value_level[value] < self.op_level[op.index]
                contracted[value] |= self.rules[op.index].matmul
        for value in (*self.graph.inputs, *self.graph.constants):
            self.leaves[value] = {value: self.graph.values[value].bytes}
        for op in self.graph.ops:
            for value in op.results:
                if not self.stored[value]:
                    self.leaves[value] = self._from_operands(op, value)
                    dear = self.leaves[value] is None or (contracted[value] and self._kept(op, value))
                    if crosses[value] and dear and not self.source[value]:
                        self.stored[value] = True
                if self.stored[value]:
                    self.leaves[value] = {value: self.graph.values[value].bytes}

    def _from_operands(self, op: Op, value: int) -> Mapping[int, float] | None:
        if op.primitive == "scan_slice":
            return {value: self.graph.values[value].bytes}
        if self.kinds[op.index] != "fused":
            return None
        leaves: dict[int, float] = {}
        for operand in op.operands:
            if not self.source[operand]:
                found = self.leaves[operand]
                if found is None:
                    return None
                leaves.update(found)
        return leaves if sum(leaves.values()) <= 2 * self.graph.values[value].bytes else None

    def _kept(self, op: Op, value: int) -> bool:
        """Whether a contraction wants `value` in memory, though it could compute it again.

        So it is when that takes an expensive function of at least half as many elements; and with a loop's slice:
        XLA for TPU converts a stack of weights once, before the loop (seen in the scanned Llama's program).
        """
        leaves = self.leaves[value] or {}
        if any(not self.stored[leaf] and self._buffer(leaf) for leaf in leaves):
            return True
        ops, todo = self.graph.ops, [op]
        least = math.prod(self.graph.values[value].shape) / 2
        while todo:
            op = todo.pop()
            made = max((math.prod(self.graph.values[v].shape) for v in op.results), default=0)
            if made < least:
                continue
            if op.primitive in _EXPENSIVE:
                return True
            fresh = [
                v for v in op.operands if not self.stored[v] and not self.source[v] and self.producers[v] >= 0
            ]
            todo += [ops[self.producers[v]] for v in fresh if self.kinds[self.producers[v]] == "fused"]
        return False

    def traffic(self) -> Traffic:
        """See `Traffic`."""
        values = self.graph.values
        carried = {op.operands[0] for op in self.graph.ops if op.primitive == "carry_next"}
        runs = self._runs(carried)
        seen: set[tuple[int, int, int]] = set()
        reads, writes = [], []
        for op in self.graph.ops:
            edge = self.kinds[op.index] == "edge"
            reads.append(tuple(self._read(op, v, seen) if runs[op.index] else 0.0 for v in op.operands))
            # a loop's next carry is written into the carry's buffer
            written = [not edge and (self.stored[v] or v in carried) for v in op.results]
            writes.append(tuple(values[v].bytes * w for v, w in zip(op.results, written, strict=True)))
        return Traffic(stored=tuple(self.stored), reads=tuple(reads), writes=tuple(writes))

    def _runs(self, carried: set[int]) -> list[bool]:
        """Whether each operation runs at its level: cheap ones whose readers all run later are computed there only."""
        wanted = [kept or value in carried for value, kept in enumerate(self.stored)]
        runs = [kind != "edge" for kind in self.kinds]
        read_at: list[set[int]] = [set() for _ in wanted]
        for op in reversed(self.graph.ops):
            level = self.op_level[op.index]
            if self.kinds[op.index] == "fused":
                runs[op.index] = any(wanted[v] or level in read_at[v] for v in op.results)
            for value in op.operands:
                if self.kinds[op.index] == "edge":
                    wanted[value] = True
                elif runs[op.index]:
                    read_at[value].add(level)
        return runs

    def _read(self, op: Op, value: int, seen: set[tuple[int, int, int]]) -> float:
        """Bytes that `op` reads for `value`, less what its kernel has at hand or has read already."""
        if self.source[value]:
            return 0.0
        if self.kinds[op.index] == "heavy":
            return sum((self.leaves[value] or {value: self.graph.values[value].bytes}).values())
        level = self.op_level[op.index]
        if self._at_hand(value, op, level):
            return 0.0
        total = 0.0
        for leaf, size in (self.leaves[value] or {}).items():
            key = (leaf, self.loop_of[op.index], level)
            if key not in seen and not self._at_hand(leaf, op, level):
                total += size
            seen.add(key)
        return total

    def _at_hand(self, value: int, op: Op, level: int) -> bool:
        """Whether the kernel that `op` is part of makes `value` itself."""
        return self._here(value, op) and self.value_level[value] == level and not self._buffer(value)

    def _buffer(self, value: int) -> bool:
        if self.producers[value] < 0:
            return False
        return self.graph.ops[self.producers[value]].primitive in LOOP_EDGES
