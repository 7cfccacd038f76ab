"""Updates that XLA for GPU makes the other way round, and not in their arguments' place.

A collective along a dimension wants that dimension outermost in memory: a gradient f32[650, 10000] that is gathered
or scattered along the second one lies as [10000, 650], and what is elementwise made of it is made in that order.
Arguments and results lie in row-major order, so the kernel of the update transposes them on its way in and out, and
cannot write where it reads: the new weights and moments are made side by side in buffers of their own and copied into
the donated ones (an LSTM's head under data parallelism, ResNet-50's weights in slices; H100, jax 0.10.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..ir import Graph, makes_parts, settled_values
from ..sharding import NONE, UNREDUCED, MeshAxes, pieces
from .conversions import Conversion
from .gathered_orders import GatheredOrder
from .residency import Flow
from .tiles import local_bytes, local_sizes


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


class Made(NamedTuple):
    """A next value by its shape and bytes; `order`: what it is made of has its dimensions at these places."""

    shape: tuple[int, ...]
    bytes: float
    order: tuple[int, ...]


class Turning(NamedTuple):
    """What a move may make a kernel write in another order than that of the arguments that it would write over.

    Attributes:
      updates: what is made together of what is moved.
      late: they have the layout that it is moved to, else that in which it was made.
      converted: TPU: what is in memory because it is moved, see `conversions`; gathered: GPU: see `gathered_orders`.
    """

    updates: tuple[Made, ...]
    late: bool
    converted: Conversion | None = None
    gathered: GatheredOrder | None = None


def turned_bytes(turning: Turning, tail: np.ndarray, head: np.ndarray, axes: MeshAxes) -> Iterator[np.ndarray]:
    """`float64[a, b]` for each update: bytes that are copied into its argument's buffer, having been made in a buffer
    of their own.

    Args:
      tail, head: place arrays, before and after the move.
    """
    sizes = np.array([size for _, size in axes])
    made, wanted = tail[:, None, :], head[None, :, :]
    moved = (made != wanted) & (sizes > 1)
    gathered = np.where(moved & (made >= 0) & (wanted == NONE), made, -1).max(axis=2)
    scattered = np.where(moved & (made == UNREDUCED) & (wanted >= 0), wanted, -1).max(axis=2)
    last = np.where(gathered >= 0, gathered, scattered)
    for shape, size, order in turning.updates:
        rows = head if turning.late else tail
        places = np.where(rows >= 0, np.array([*order, NONE])[rows], rows)
        local = local_sizes(shape, places, axes)
        copied, found = size / pieces(places, axes), np.zeros(last.shape)
        for dim in set(last[last >= 0].tolist()):
            lies = np.array([order[d] for d in (dim, *(d for d in range(len(order)) if d != dim))])
            turned = _out_of_order(local, lies) * copied
            found += np.where(last == dim, turned if turning.late else turned[:, None], 0.0)
        yield found


def _out_of_order(local: np.ndarray, lies: np.ndarray) -> np.ndarray:
    """Of rows of local sizes whether their dimensions of more than one element, as they lie, are in another order."""
    return np.array([bool((np.diff([d for d in lies if sizes[d] > 1]) < 0).any()) for sizes in local])


def turnings(
    graph: Graph,
    updates: Sequence[Update],
    conversions: Mapping[tuple[int, int], Conversion] | None = None,
    gathers: Mapping[tuple[int, int], GatheredOrder] | None = None,
) -> tuple[dict[tuple[int, int], Turning], dict[int, Turning]]:
    """What the move of an operand, by (operation, place), turns, and that of a next value to where its argument lies.

    The latter is written in the order in which it is gathered, and with it what its kernel makes beside it.  Where they
    are made of a sum that is scattered itself, that has turned them already, as of the weights of a ResNet's
    convolutions; of a sum that a loop has stacked it has not (ZeRO-1, H100, jax 0.10.2).
    """
    producers = graph.producers()

    def of_a_sum(values: set[int]) -> bool:
        return any(producers[v] >= 0 and makes_parts(graph.ops[producers[v]]) for v in values)

    converted = {use: Turning((), late=True, converted=found) for use, found in (conversions or {}).items()}
    parts = [{u.value} | {graph.ops[op].operands[place] for op, place, _ in u.reads} for u in updates]
    values = [graph.values[u.value] for u in updates]
    reads: dict[tuple[int, int], list[Made]] = {}
    ends: dict[int, Turning] = {}
    for update, tensor, own in zip(updates, values, parts, strict=True):
        for op, place, order in update.reads:
            reads.setdefault((op, place), []).append(Made(tensor.shape, tensor.bytes, order))
        beside = [
            Made(other.shape, other.bytes, tuple(range(len(other.shape))))
            for other, theirs in zip(values, parts, strict=True)
            if other is not tensor and own & theirs and other.shape == tensor.shape
        ]
        if beside and not of_a_sum(own):
            ends[update.value] = Turning(tuple(beside), late=False)
    found = converted | {key: Turning(tuple(made), late=True) for key, made in reads.items()}
    for key, gathered in (gathers or {}).items():
        found[key] = found.get(key, Turning((), late=True))._replace(gathered=gathered)
    return found, ends


def together(turned: Iterable[Turning | None]) -> Turning | None:
    """What one move turns for several reads."""
    there = [one for one in turned if one is not None]
    found = dict.fromkeys(update for one in there for update in one.updates)
    converted = next((one.converted for one in there if one.converted is not None), None)
    gathered = None
    for one in there:
        gathered = gathered if one.gathered is None else one.gathered.beside(gathered)
    return Turning(tuple(found), late=True, converted=converted, gathered=gathered) if there else None


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
        sizes = local_sizes(tensor.shape, row[None], axes)[0]
        for op, place, order in update.reads:
            value = graph.ops[op].operands[place]
            made, wanted = values.get(value), reads.get((op, place))
            dim = None if made is None or wanted is None else _outermost(made, wanted, axes)
            if dim is not None:
                lies = [order[d] for d in (dim, *(d for d in range(len(order)) if d != dim))]
                lies = [d for d in lies if sizes[d] > 1]
                if lies != sorted(lies):
                    size = local_bytes(tensor, row, axes, "gpu")
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
