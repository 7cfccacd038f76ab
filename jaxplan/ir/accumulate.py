"""Sums that a loop accumulates: gradients of microbatches, added up in the loop's carry.

Such a sum need not be finished in every iteration.  What each device adds up of its own part is finished once, after
the loop; what lies between the products and the carry is linear, so that it may work on the parts.
"""

from __future__ import annotations

from .graph import Graph, Loop, Op

SUMS = frozenset({"add", "add_any"})
_LINEAR = frozenset({"convert_element_type", "copy", "neg", "reshape", "scan_stack", "squeeze", "transpose"})
"""Operations of one tensor that may work on the parts of a sum; `convert_element_type` between reals alone."""
_ORIGINS = frozenset({"dot_general", "reduce_sum"})
"""Operations that make such parts, and of which each part can be computed beside the others."""
_REALS = ("float", "bfloat", "complex")


def accumulating_ops(graph: Graph) -> frozenset[int]:
    """The operations that may work on the parts of a sum which a loop accumulates, its `carry_init` among them."""
    return _Accumulations(graph).found()


class _Accumulations:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers = graph.producers()
        self.uses = graph.uses()
        self.last = {op.operands[1]: op for op in graph.ops if op.primitive == "carry_next"}

    def found(self) -> frozenset[int]:
        ops: set[int] = set()
        for op in self.last.values():
            ops.update(self._accumulation(op))
        return frozenset(ops)

    def _accumulation(self, last: Op) -> set[int]:
        """The operations around one carry; none where it is anything but added to."""
        after, carry = last.operands
        loops = [x for x in self.graph.loops if x.start <= last.index < x.stop]
        loop = min(loops, key=lambda x: x.stop - x.start)
        shape = self.graph.values[carry].shape
        ops = {self.producers[carry]}
        value = carry
        while value != after:
            readers = self._readers_within(value, loop, but=last.index)
            if len(readers) != 1:
                return set()
            op = self.graph.ops[readers[0]]
            alike = all(self.graph.values[v].shape == shape for v in op.operands)
            if op.primitive not in SUMS or not alike or op.operands[0] == op.operands[1]:
                return set()
            (addend,) = (v for v in op.operands if v != value)
            if not self._comes_from_products(addend, loop, ops):
                return set()
            ops.add(op.index)
            value = op.results[0]
        return ops if self._readers_within(after, loop, but=last.index) == [] else set()

    def _readers_within(self, value: int, loop: Loop, *, but: int) -> list[int]:
        return [op for op, _ in self.uses[value] if loop.start <= op < loop.stop and op != but]

    def _comes_from_products(self, value: int, loop: Loop, ops: set[int]) -> bool:
        """Whether `value` is made in the loop, of products by linear operations alone; those are added to `ops`."""
        index = self.producers[value]
        if index < loop.start:
            return False
        op = self.graph.ops[index]
        if op.primitive in _ORIGINS:
            return True
        if op.primitive == "carry_init":  # the sum that an inner loop has accumulated
            inside = self._accumulation(self.last[value]) if value in self.last else set()
            ops.update(inside)
            return bool(inside)
        if op.primitive in SUMS:
            alike = all(self.graph.values[v].shape == self.graph.values[value].shape for v in op.operands)
            linear = alike and op.operands[0] != op.operands[1]
        else:
            linear = op.primitive in _LINEAR and all(
                self.graph.values[v].dtype.startswith(_REALS) for v in (*op.operands, *op.results)
            )
        if not linear or not all(self._comes_from_products(v, loop, ops) for v in op.operands):
            return False
        ops.add(index)
        return True
