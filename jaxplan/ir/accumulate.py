"""Sums that a loop accumulates: gradients of microbatches, added up in the loop's carry.

Such a sum need not be finished in every iteration.  What each device adds up of its own part is finished once, after
the loop; what lies between the products and the carry is linear, so that it may work on the parts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .graph import Graph, Loop, Op

SUMS = frozenset({"add", "add_any"})
_LINEAR = frozenset({"convert_element_type", "copy", "neg", "reshape", "scan_stack", "squeeze", "transpose"})
"""Operations of one tensor that may work on the parts of a sum; `convert_element_type` between reals alone."""
_MOVED = _LINEAR - {"neg", "scan_stack"}
_SCALES: Mapping[str, tuple[int, ...]] = {"div": (0,), "mul": (0, 1)}
"""Operations of two operands that are linear in one of them, and which may be that one; the other is no sum then."""
_ORIGINS = frozenset({"dot_general", "reduce_sum", "scatter-add"})
"""Operations that make such parts, and of which each part can be computed beside the others."""
_REALS = ("float", "bfloat", "complex")

Parts = dict[int, tuple[int, ...]]
"""By operation, the operands of which it takes the parts of a sum."""


def accumulating_ops(graph: Graph) -> Parts:
    """The operations that may work on the parts of a sum which a loop accumulates, its `carry_init` among them."""
    return _Accumulations(graph).found()


def summed_behind_loops(graph: Graph) -> dict[int, float]:
    """Products in loops whose sums over devices XLA finishes after the loop, whatever was asked for: its trips.

    Where all that becomes of the whole sum is to be added to a carry, XLA for TPU and GPU adds up each device's share
    and makes one all_reduce behind the loop (WhileLoopAllReduceCodeMotion: a GRU's and accumulated gradients compiled
    for v5e and H100, jax 0.10.2).  Scaled in between, as by the number of microbatches, it stays where it is; so does a
    reduce_scatter.
    """
    parts, around, uses, producers = accumulating_ops(graph), graph.loops_around(), graph.uses(), graph.producers()
    trips = {(loop.start, loop.stop): loop.trips for loop in graph.loops}
    next_carries = {op.operands[0] for op in graph.ops if op.primitive == "carry_next"}
    found: dict[int, float] = {}
    for op in graph.ops:
        value = op.results[0] if around[op.index] and makes_parts(op) else -1
        while value >= 0 and len(uses[value]) == 1:
            reader = graph.ops[uses[value][0][0]]
            if reader.index not in parts or around[reader.index] != around[op.index]:
                break
            if reader.primitive not in SUMS and reader.primitive not in _MOVED:
                break
            value = reader.results[0]
            makers = [graph.ops[producers[v]].primitive for v in reader.operands if producers[v] >= 0]
            if value in next_carries and "carry_init" in makers:
                found[op.index] = trips[around[op.index][-1]]
                break
    return found


def turned_sums(graph: Graph, waited: Collection[int] = ()) -> Parts:
    """Transpositions between a product and an addition to another sum: what two uses of one weight add to its gradient.

    Shardy adds the parts before it sums them where nothing but transpositions lies between, XLA for TPU after it (jax
    0.10.2; of converted, scaled or reshaped ones each is summed by itself).  Nor may anything on the way be
    `waited` for: finished before a loop and read after it.
    """
    producers, uses = graph.producers(), graph.uses()
    returned = frozenset(graph.outputs)

    def turned(value: int) -> list[int]:
        """The transpositions that lead to `value` from a product; none where anything else reads what they turn."""
        found: list[int] = []
        while len(uses[value]) == 1 and value not in returned and value not in waited and producers[value] >= 0:
            op = graph.ops[producers[value]]
            if op.primitive != "transpose":
                return found if op.primitive in SUMS or makes_parts(op) else []
            found.append(op.index)
            value = op.operands[0]
        return []

    return {index: (0,) for op in graph.ops if op.primitive in SUMS for v in op.operands for index in turned(v)}


def makes_parts(op: Op) -> bool:
    """Whether each part of the operation's sum can be computed beside the others."""
    if op.primitive == "conv_general_dilated":  # the gradient of a kernel, summed over the batch
        return op.params["feature_group_count"] == 1
    return op.primitive in _ORIGINS


class _Accumulations:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers = graph.producers()
        self.uses = graph.uses()
        self.last = {op.operands[1]: op for op in graph.ops if op.primitive == "carry_next"}

    def found(self) -> Parts:
        ops: Parts = {}
        for op in self.last.values():
            ops.update(self._accumulation(op))
        return ops

    def _accumulation(self, last: Op) -> Parts:
        """The operations around one carry; none where it is anything but scaled and added to."""
        after, carry = last.operands
        loops = [x for x in self.graph.loops if x.start <= last.index < x.stop]
        loop = min(loops, key=lambda x: x.stop - x.start)
        shape = self.graph.values[carry].shape
        ops: Parts = {self.producers[carry]: (0,)}
        value, added = carry, False
        while value != after:
            readers = self._readers_within(value, loop, but=last.index)
            if len(readers) != 1:
                return {}
            op = self.graph.ops[readers[0]]
            if [self.graph.values[v].shape for v in op.results] != [shape] or op.operands.count(value) != 1:
                return {}
            position = op.operands.index(value)
            if op.primitive in SUMS:
                addend = op.operands[1 - position]
                if self.graph.values[addend].shape != shape or not self._comes_from_products(addend, loop, ops):
                    return {}
                ops[op.index], added = (0, 1), True
            elif position in _SCALES.get(op.primitive, ()) and self._real(op):
                ops[op.index] = (position,)
            else:
                return {}
            value = op.results[0]
        return ops if added and self._readers_within(after, loop, but=last.index) == [] else {}

    def _readers_within(self, value: int, loop: Loop, *, but: int) -> list[int]:
        return [op for op, _ in self.uses[value] if loop.start <= op < loop.stop and op != but]

    def _real(self, op: Op) -> bool:
        return all(self.graph.values[v].dtype.startswith(_REALS) for v in (*op.operands, *op.results))

    def _comes_from_products(self, value: int, loop: Loop, ops: Parts) -> bool:
        """Whether `value` is made in the loop, of products by linear operations alone; those are added to `ops`."""
        index = self.producers[value]
        if index < loop.start:
            return False
        op = self.graph.ops[index]
        if makes_parts(op):
            return True
        if op.primitive == "carry_init":  # the sum that an inner loop has accumulated
            inside = self._accumulation(self.last[value]) if value in self.last else {}
            ops.update(inside)
            return bool(inside)
        if op.primitive in _SCALES:
            return self._scales(op, loop, ops)
        if op.primitive in SUMS:
            alike = all(self.graph.values[v].shape == self.graph.values[value].shape for v in op.operands)
            linear = alike and op.operands[0] != op.operands[1]
        else:
            linear = op.primitive in _LINEAR and self._real(op)
        if not linear or not all(self._comes_from_products(v, loop, ops) for v in op.operands):
            return False
        ops[index] = tuple(range(len(op.operands)))
        return True

    def _scales(self, op: Op, loop: Loop, ops: Parts) -> bool:
        """A sum times a factor: of a product of two sums, the first one is finished before."""
        shape = self.graph.values[op.results[0]].shape
        for position in _SCALES[op.primitive]:
            value = op.operands[position]
            whole = self.graph.values[value].shape == shape and op.operands.count(value) == 1
            inside: Parts = {}
            if whole and self._real(op) and self._comes_from_products(value, loop, inside):
                ops.update(inside)
                ops[op.index] = (position,)
                return True
        return False
