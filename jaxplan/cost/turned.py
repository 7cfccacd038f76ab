"""Updates that XLA for GPU makes the other way round, and not in their arguments' place.

A collective along a dimension wants that dimension outermost in memory: a gradient f32[650, 10000] that is gathered
or scattered along the second one lies as [10000, 650], and what is elementwise made of it is made in that order.
Arguments and results lie in row-major order, so the kernel of the update transposes them on its way in and out, and
cannot write where it reads: the new weights and moments are made side by side in buffers of their own and copied into
the donated ones (an LSTM's head under data parallelism, ResNet-50's weights in slices; H100, jax 0.10.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..ir import Graph, settled_values
from ..sharding import NONE, UNREDUCED, MeshAxes
from .residency import Flow
from .tiles import device_bytes, local_sizes


class Update(NamedTuple):
    """Attributes:
    value: what takes a donated argument's place; argument: that one.
    reads: (operation, place, order) of what it is elementwise made of; `order` has for each dimension of the operand
      the one of `value` that it becomes.
    """

    value: int
    argument: int
    reads: tuple[tuple[int, int, tuple[int, ...]], ...]


def updates_of(flow: Flow) -> tuple[Update, ...]:
    """What every donated argument's next value is made of, through elementwise operations and transpositions."""
    return tuple(
        Update(value, argument, tuple(_reads(flow, value)))
        for value, argument in settled_values(flow.graph).items()
        if len(flow.graph.values[value].shape) > 1
    )


def _reads(flow: Flow, value: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    seen, left = {value}, [(value, tuple(range(len(flow.graph.values[value].shape))))]
    while left:
        made, order = left.pop()
        maker = flow.producers[made]
        if maker < 0 or flow.kinds[maker] != "fused" or flow.loop_of[maker] >= 0:
            continue
        op = flow.graph.ops[maker]
        turns = op.primitive == "transpose"
        taken = order
        if turns:
            taken = tuple(order[op.params["permutation"].index(d)] for d in range(len(order)))
        for place, operand in enumerate(op.operands):
            if turns or flow.graph.values[operand].shape == flow.graph.values[made].shape:
                yield maker, place, taken
                if operand not in seen:
                    seen.add(operand)
                    left.append((operand, taken))


def turned_updates(
    graph: Graph,
    axes: MeshAxes,
    updates: Sequence[Update],
    times: Sequence[int],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of the buffers of updates that one kernel makes the other way round.

    Args:
      times: when each operation runs; values, reads: the layout row of every value where it is made, and of every
        operand as it is read.
    """
    producers = graph.producers()
    kernels: dict[int, list[tuple[int, int]]] = {}
    for update in updates:
        row = values.get(update.value)
        if row is None or not np.array_equal(row, values[update.argument]):
            continue  # it is copied into its argument's place anyway
        tensor = graph.values[update.value]
        sizes = local_sizes(tensor, row[None], axes)[0]
        for op, place, order in update.reads:
            value = graph.ops[op].operands[place]
            made, wanted = values.get(value), reads.get((op, place))
            dim = None if made is None or wanted is None else _outermost(made, wanted, axes)
            if dim is not None:
                lies = [order[d] for d in (dim, *(d for d in range(len(order)) if d != dim))]
                lies = [d for d in lies if sizes[d] > 1]
                if lies != sorted(lies):
                    size = int(device_bytes(tensor, row[None], axes, "gpu")[0])
                    kernels.setdefault(value, []).append((times[producers[update.value]], size))
                    break
    for made_together in kernels.values():
        start = min(time for time, _ in made_together)
        yield start, start + 1, sum(size for _, size in made_together)


def _outermost(made: np.ndarray, wanted: np.ndarray, axes: MeshAxes) -> int | None:
    """The dimension that the last collective between two layouts has outermost; None: there is none, or it has none."""
    moved = [(int(a), int(b)) for a, b, (_, n) in zip(made, wanted, axes, strict=True) if n > 1 and a != b]
    gathered = [a for a, b in moved if a >= 0 and b == NONE]
    scattered = [b for a, b in moved if a == UNREDUCED and b >= 0]
    return max(gathered or scattered, default=None)
