"""In which order a GPU runs the end of a step, by the order in which its scheduler has the kernels.

What a schedule of ours can be trusted with are products and late sums (see `latency_hiding`): a network's branches, two
passes of a discriminator or what a Q-learner's two networks make, run beside each other as it says (of a DQN all images
of both are there at once: 158 MB on eight H100, 123 counted one after the other).  Elementwise work between them is
grouped otherwise by XLA, and stays behind the product that it stands behind, as soon as what it reads is there.  What
stands behind the last product, the optimizer, keeps its place.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from ..ir import Graph, Op


class RunOrder:
    """Operations put one behind the other.

    Attributes:
      order: of what has been put, as indices.
    """

    def __init__(self, graph: Graph, ops: Sequence[Op], leading: Collection[int], apart: Collection[int]) -> None:
        """`ops`: what is put into order; of these those in `leading` take along what stands behind them, up to the next
        of them, but for what is `apart`: that runs when it is put, or what is put wants it."""
        self.graph, self.producers = graph, graph.producers()
        self.order: list[int] = []
        self.done: set[int] = set()
        self.inside = {op.index for op in ops}
        self.readers: dict[int, list[int]] = defaultdict(list)
        self.missing: dict[int, int] = {}  # what each operation waits for, the one that it stands behind included
        self.ready: list[int] = []
        last = -1
        for op in ops:
            if op.index in leading:
                last = op.index
            elif op.index not in apart:
                before = {last, *(self.producers[v] for v in op.operands)} & self.inside
                self.missing[op.index] = len(before)
                for one in before:
                    self.readers[one].append(op.index)
                if not before:
                    heapq.heappush(self.ready, op.index)
        self._drain()

    def put(self, ops: Iterable[int]) -> None:
        """These next, behind what they read, and then what was waiting for nothing else."""
        for op in ops:
            self._force(op)
        self._drain()

    def _force(self, op: int) -> None:
        walk = [op]
        while walk:
            one = walk[-1]
            before = [self.producers[v] for v in self.graph.ops[one].operands]
            lacking = [p for p in before if p in self.inside and p not in self.done]
            if one in self.done or not lacking:
                self._run(walk.pop())
            else:
                walk += lacking

    def _run(self, op: int) -> None:
        if op in self.done:
            return
        self.done.add(op)
        self.order.append(op)
        for reader in self.readers[op]:
            self.missing[reader] -= 1
            if not self.missing[reader]:
                heapq.heappush(self.ready, reader)

    def _drain(self) -> None:
        while self.ready:
            self._run(heapq.heappop(self.ready))
