"""Which readers of a tensor share one resharded copy of it.

The compiler brings a tensor into a layout once for all that read it so (equal collectives are one), where they run
as often as each other.  What follows is tied to its maker's layout and reshards nothing itself, but for a loop's
stack: what an iteration gathered may be kept so for the loop that reads the stack (a backward pass), which then has
nothing to gather.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ..ir import Graph, Value, total_shares
from ..sharding import NONE, UNREDUCED, Rule, start_shares_of


def tied_layouts(made: np.ndarray, read: np.ndarray, *, cut: bool) -> np.ndarray:
    """`bool[a, b]`: whether layout `b` of `read` follows layout `a` of `made`: equal, with what is pending finished.

    With `cut` a part of what is whole follows too: of a copy that several others read as it is, that is free.
    """
    there, here = made[:, None, :], read[None, :, :]
    same = (there == here) | (there == UNREDUCED)
    if cut:
        same |= (there == NONE) & (here >= 0)
    return np.asarray(same.all(axis=2))


class Sharing:
    """The readers of every value of a graph."""

    def __init__(self, graph: Graph, rules: Sequence[Rule]) -> None:
        self.graph, self.rules = graph, rules
        self.around = graph.loops_around()
        self._producers, self._uses = graph.producers(), graph.uses()
        self.starts = start_shares_of(graph, rules)
        self._totals = total_shares(graph)
        self._behind: dict[int, dict[tuple[int, ...], set[int]]] = {}

    def follows(self, value: int) -> bool:
        """Whether a value has the layout of what it is made of."""
        producer = self._producers[value]
        return producer >= 0 and self.rules[producer].follows

    def readers(self, value: int) -> list[tuple[int, int]]:
        """(operation, operand) of the readers of a value other than the carry's own bookkeeping."""
        ops = self.graph.ops
        return [(o, p) for o, p in self._uses[value] if not (ops[o].primitive == "carry_next" and p == 1)]

    def start_shares(self, tensor: Value) -> tuple[float, float]:
        """Of the starts of what sums and of what gathers a value, how much is its own: see `ir.start_shares` and
        `ir.total_shares`."""
        if not tensor.shape:
            return self._totals.get(tensor.index, 1.0), 1.0
        return self.starts.sent[tensor.index], self.starts.gathered[tensor.index]

    def rounding(self, value: int, readers: Collection[int]) -> set[int]:
        """Of `readers`, operations, those that round all they read of a value to bf16, see `cost.narrowed`."""
        reads = [(o, p) for o, p in self.readers(value) if o in readers]
        return {o for o, _ in reads} - {o for o, p in reads if (o, p) not in self.graph.narrow_reads}

    def trips(self, value: int) -> float:
        """How often what a value is copied from is there anew in one step: a loop's stack only when all is stacked."""
        producer = self._producers[value]
        if producer < 0:
            return 1.0
        op = self.graph.ops[producer]
        return op.trips / (self.inner_trips(producer) if op.primitive == "scan_stack" else 1.0)

    def inner_trips(self, op: int) -> float:
        """Iterations of the innermost loop around an operation."""
        start, stop = self.around[op][-1]
        return next(x.trips for x in self.graph.loops if (x.start, x.stop) == (start, stop)) or 1.0

    def shares(self, value: int, reader: int) -> bool:
        """Whether a reader takes the shared copy: it runs as often as the value is made, and may reshard it.

        What is computed again reads through a barrier, and brings what it reads into layout behind it.
        """
        return self.region(value, reader) == () and self._may_share(value, reader)

    def region(self, value: int, reader: int) -> tuple[int, ...]:
        """The barrier between a value and its reader; () for none."""
        if not self.graph.barriers:
            return ()
        producer, behind = self._producers[value], self.graph.behind()
        made, read = behind[producer] if producer >= 0 else (), behind[reader]
        return () if made == read else read

    def behind(self, value: int) -> dict[tuple[int, ...], set[int]]:
        """By barrier, the readers behind it that take one copy of a value, which is made there."""
        found: dict[tuple[int, ...], set[int]] = {}
        if not self.graph.barriers:
            return found
        if value in self._behind:
            return self._behind[value]
        for reader, _ in self.readers(value):
            region = self.region(value, reader)
            if region and self._may_share(value, reader):
                found.setdefault(region, set()).add(reader)
        self._behind[value] = found
        return found

    def _may_share(self, value: int, reader: int) -> bool:
        producer, op = self._producers[value], self.graph.ops[reader]
        made = self.graph.ops[producer].trips if producer >= 0 else 1.0
        if op.primitive == "carry_init":
            made = self.trips(value)
        if op.trips != made and op.primitive != "scan_slice":
            return False
        if producer < 0 or self.follows(value):
            return not self.rules[reader].follows or op.primitive == "scan_stack"
        return True

    def along(self, value: int) -> list[int]:
        """The loops' slices of a stack that is there before the program's loops, and not made for any one of them."""
        if self._producers[value] >= 0 and not self.follows(value):
            return []
        ops = [self.graph.ops[o] for o, _ in self._uses[value]]
        slices = [op for op in ops if op.primitive == "scan_slice"]
        return [op.index for op in slices if op.trips / self.inner_trips(op.index) == self.trips(value)]

    def several(self, value: int) -> bool:
        """Whether several of those that share the copy of a value may want it otherwise than it is made."""
        sharers = {o for o, _ in self.readers(value) if self.shares(value, o) and not self.rules[o].follows}
        return len(sharers) > 1

    def shares_inside(self, carry: int, reader: int) -> bool:
        """Whether a reader of a loop's carry stands in that loop itself, in none further in, and may reshard it."""
        return self.around[reader][-1:] == (self.loop_after(carry),) and not self.rules[reader].follows

    def loop_after(self, carry: int) -> tuple[int, int]:
        """The operations, from and until, of the loop that a `carry_init` enters."""
        entered = self.graph.loop_after(self._producers[carry])
        assert entered is not None  # what is carried is carried by a loop
        return entered

    def after_loop(self, carry: int) -> list[tuple[int, int]]:
        """(operation, operand) of those who read what a loop leaves of its carry."""
        _, end = self.loop_after(carry)
        return [(o, p) for o, p in self.readers(carry) if o >= end]
