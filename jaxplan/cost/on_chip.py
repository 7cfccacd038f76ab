"""What a loop on TPU keeps in the chip's vector memory from one iteration to the next.

Weights that a loop reads and doesn't change, and sums that it adds to, XLA for TPU leaves in vector memory for all its
iterations where they fit together (`Profile.on_chip_bytes`): main memory is read once, before the first one.  A
recurrent network reads its weights in every step of time: from main memory bf16[5120, 5120] takes 80 us on v5e, from
vector memory the product takes 11 (jax 0.10.2, libtpu 0.0.42.1; two such weights stay there, of two bf16[5632, 5632]
one does).  So a device that has all the weights and a piece of the batch is no slower than one that has pieces of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..ir import SUMS, Graph, accumulating_ops
from ..sharding import Rule
from .vector_kernels import vector_product


class Resident(NamedTuple):
    """What an operation in a loop reads or writes of a tensor that may stay on the chip.

    Attributes:
      trips: iterations that one transfer is for.
      together: bytes of all that the loop would keep so, before partitioning.
    """

    trips: float
    together: float

    def transferred(self, size_bytes: np.ndarray, parts: np.ndarray, room: float | None) -> np.ndarray:
        """`float64[n]`: bytes that cross main memory in one iteration, of `size_bytes` read or written in it.

        Args:
          parts: into how many pieces the tensor is cut; the others that the loop keeps are taken to be cut likewise.
          room: of the chip, in bytes.
        """
        if room is None:
            return size_bytes
        return np.where(self.together / parts <= room, size_bytes / self.trips, size_bytes)


def residents(
    graph: Graph, rules: Sequence[Rule], reads: Sequence[Sequence[float]], writes: Sequence[Sequence[float]]
) -> Mapping[tuple[int, int], Resident]:
    """By (operation, which of its operands and then results): what may stay on the chip while a loop runs.

    Not what a product with a vector reads: the vector unit goes through it in every iteration, which takes longer than
    main memory does.
    """
    producers, around, accumulates = graph.producers(), graph.loops_around(), accumulating_ops(graph)
    trips = {(loop.start, loop.stop): loop.trips for loop in graph.loops}
    carried: dict[tuple[int, int], set[int]] = {}
    for op in graph.ops:
        if op.primitive == "carry_next":
            carried.setdefault(around[op.index][-1], set()).add(op.operands[1])
    varies = [False] * len(graph.values)
    kept: dict[tuple[int, int], dict[int, float]] = {}
    places: list[tuple[int, int, tuple[int, int]]] = []
    for op in graph.ops:
        if not around[op.index]:
            continue
        loop = around[op.index][-1]
        carries = carried.get(loop, set())
        changing = [v in carries or (producers[v] >= loop[0] and varies[v]) for v in op.operands]
        for value in op.results:
            varies[value] = op.primitive == "scan_slice" or any(changing)
        if op.primitive in ("scan_slice", "scan_stack", "carry_init", "carry_next") or vector_product(rules[op.index]):
            continue
        sums = op.primitive in SUMS and op.index in accumulates
        for place, value in enumerate(op.operands):
            added = sums and value in carries
            if reads[op.index][place] and (added or not changing[place]):
                places.append((op.index, place, loop))
                size = kept.setdefault(loop, {})
                size[value] = max(size.get(value, 0.0), reads[op.index][place])
                if added and writes[op.index][0]:
                    places.append((op.index, len(op.operands), loop))
    together = {loop: sum(sizes.values()) for loop, sizes in kept.items()}
    return {
        (op, place): Resident(trips=max(trips[loop], 1.0), together=together[loop]) for op, place, loop in places
    }
