"""The order in which a compiler that starts from the results meets a program's operations.

XLA goes through a computation's instructions so that operands come before who reads them, from its root on, each
operand's before the next one's (`HloComputation::MakeInstructionPostOrder`).  What it combines of collectives that are
alike it takes in that order, not in the program's: of a step's gradients those first whose updated weight the step
returns first (an MLP's, by their names: head, layer_0, layer_1; H100, jax 0.10.2).  A loop's body is a computation of
its own, whose root has what it carries, then what it stacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .graph import Graph, Loop


def post_order(graph: Graph) -> tuple[int, ...]:
    """For every operation its place in that order, what nothing wants last; a loop's operations are side by side."""
    found = [0] * len(graph.ops)
    roots = (graph.producers()[value] for value in graph.outputs)
    for place, op in enumerate(_Walk(graph).body(0, len(graph.ops), graph.loops, roots)):
        found[op] = place
    return tuple(found)


class _Walk:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.producers = graph, graph.producers()

    def body(self, start: int, stop: int, loops: Sequence[Loop], roots: Iterable[int]) -> Iterator[int]:
        """Operations `start` to `stop`, of which `loops` hold some, from these on."""
        outer: list[Loop] = []
        for loop in loops:
            if not any(one.start <= loop.start and loop.stop <= one.stop for one in outer):
                outer.append(loop)
        loop_of = {op: loop for loop in outer for op in range(loop.start, loop.stop)}
        met: set[int] = set()
        for root in (*roots, *range(start, stop)):
            walk = [iter((root,))]
            behind: list[int] = []
            while walk:
                op = next(walk[-1], None)
                if op is None:
                    walk.pop()
                    if behind:
                        yield from self._whole(behind.pop(), loop_of, loops)
                    continue
                unit = loop_of[op].start if op in loop_of else op
                if start <= unit < stop and unit not in met:
                    met.add(unit)
                    behind.append(unit)
                    walk.append(self._before(unit, loop_of))

    def _before(self, unit: int, loop_of: dict[int, Loop]) -> Iterator[int]:
        loop = loop_of.get(unit)
        inside = range(unit, unit + 1) if loop is None else range(loop.start, loop.stop)
        for op in inside:
            for value in self.graph.ops[op].operands:
                if (maker := self.producers[value]) >= 0 and maker not in inside:
                    yield maker

    def _whole(self, unit: int, loop_of: dict[int, Loop], loops: Sequence[Loop]) -> Iterator[int]:
        loop = loop_of.get(unit)
        if loop is None:
            yield unit
            return
        within = [one for one in loops if one is not loop and loop.start <= one.start and one.stop <= loop.stop]
        ops = self.graph.ops[loop.start : loop.stop]
        ends = [op.index for kind in ("carry_next", "scan_stack") for op in ops if op.primitive == kind]
        yield from self.body(loop.start, loop.stop, within, ends)
