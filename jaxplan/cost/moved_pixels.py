"""Gradients of weights of convolutions whose pixels XLA for TPU moves into the batch, and what waits for them.

They are computed after the backward pass, see `few_images.py`, and keep what they read:

- If the image or the gradient that comes back lies in pieces (`pieces.py`), both are read so: the image in pieces waits
  in the forms of `_SHIFTED`, a whole one shifted by each of the kernel's columns; all columns are joined while the
  gradient is computed.
- If both are whole they are, each as convolutions want it, batch and channels in rows and lanes: of a stem's
  bf16[4, 512, 512, 3] that is 268 MB, the four images in lanes.

Six convolutions on four images of bf16[256, 256, 96], with layer, batch, group normalisation or none, residuals, a
U-Net, kernels of 3 and 7, strided stems: v5e and v5p, jax 0.10.2, libtpu 0.0.42.1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..ir import Graph, Op
from ..sharding import MeshAxes
from .few_images import HALO, PIECES, Spread, widened
from .images import Lanes
from .kinds import COMPUTED_AGAIN
from .pieces import cut_dimension, sums_over_images, whole_images_of
from .tiles import local_bytes, local_sizes, padding

_CONVERTED = 2
"""Bytes of an element that a convolution of f32 multiplies at the default precision."""

_SHIFTED = 3
"""The most columns of a kernel for whose gradient an image in pieces waits as it is, by image, and as twice the columns
at the sides; for one of more (7) it waits shifted by each column."""


class Moved(NamedTuple):
    """What a TPU does otherwise for convolutions of few images, see `moved_pixels`.

    Attributes:
      times: when each operation runs; stored: for every value whether it is in memory, if only as a copy.
      copies: (start, stop, bytes) of what weights' gradients read, see the module, and of what convolutions have beside
        whole images.
      reads: without those of these copies.
    """

    times: tuple[int, ...]
    stored: Sequence[bool]
    copies: tuple[tuple[int, int, int], ...]
    reads: Mapping[tuple[int, int], np.ndarray]


def moved_pixels(
    graph: Graph,
    axes: MeshAxes,
    images: Mapping[int, Lanes],
    stored: Sequence[bool],
    times: Sequence[int],
    reads: Mapping[tuple[int, int], np.ndarray],
    values: Mapping[int, np.ndarray],
    spread: Sequence[Spread] = (),
    pieces: Collection[int] = (),
) -> Moved | None:
    """A step on TPU with the gradients of such convolutions' weights after the last convolution, in the opposite order.

    None where no convolution has few images.

    Args:
      images: see `image_lanes`; stored, times, spread: see `fusion.Traffic`; values, reads: see `simulate_memory`;
        pieces: see `in_pieces`.
    """
    written_out: dict[int, set[int]] = {}
    for read in spread:
        written_out.setdefault(read.op, set()).add(read.value)
    convolutions = [op for op in graph.ops if op.primitive == "conv_general_dilated"] if images else []
    wider = {
        op.index: widened(graph.values[op.operands[0]], row, axes, images[op.operands[0]])
        for op in convolutions
        if sums_over_images(op, images) and not _stays(graph, op) and (row := reads.get((op.index, 0))) is not None
    }
    waiting = [op for op in reversed(convolutions) if wider.get(op.index, 1.0) > 1]
    if not waiting:
        return None
    later, kept, producers = list(times), list(stored), graph.producers()
    around, copies = graph.loops_around(), list[tuple[int, int, int]]()
    last: dict[tuple[tuple[int, int], ...], int] = {}
    for op in convolutions:
        last[around[op.index]] = max(last.get(around[op.index], 0), times[op.index])
    for place, op in enumerate(waiting):
        end = around[op.index][-1][1] if around[op.index] else len(graph.ops)
        later[op.index] = max(later[op.index], min(last[around[op.index]] + place, end - 1))
    for op in graph.ops:
        later[op.index] = max([later[op.index], *(later[producers[v]] for v in op.operands if producers[v] >= 0)])
    for op in waiting:
        value, gradient = op.operands[:2]
        made, at = later[producers[value]] + 1, later[op.index]
        rows = reads[op.index, 0], reads.get((op.index, 1), reads[op.index, 0])
        lanes = images[value], images.get(gradient, images[value])
        if value in pieces or gradient in pieces:
            size = _bytes(graph, axes, value, rows[0], lanes[0])
            columns = graph.values[op.results[0]].shape[op.params["dimension_numbers"].out_spec[-1]]
            if value in pieces and 1 < columns <= _SHIFTED:
                edge = _edge(graph, axes, value, rows[0], lanes[0], size)
                copies += [(made, at + 1, size), (made, at, size), (made, at, edge), (made, at, edge)]
            else:
                copies += [(made, at + 1, size), *[(made, at, size)] * (columns - 1)]
            copies.append((at, at + 1, columns * size))
            if not stored[value] and _dear(graph, producers, stored, value, written_out):
                copies.append((made, times[op.index] + 1, math.ceil(size * _elements(graph, value))))
            if not kept[gradient]:
                size = _bytes(graph, axes, gradient, rows[1], lanes[1])
                copies.append((later[producers[gradient]], at + 1, size))
        else:
            copies.append((made, at + 1, _whole(graph, axes, value, rows[0], lanes[0], stored[value])))
            size = _whole(graph, axes, gradient, rows[1], lanes[1], stored[gradient])
            copies.append((later[producers[gradient]] + 1, at + 1, size))
        kept[value] = kept[gradient] = True
    copies += _cut_and_joined(graph, axes, images, stored, later, values, reads, pieces)
    gone = {(op.index, 0) for op in waiting}
    return Moved(tuple(later), kept, tuple(copies), {k: row for k, row in reads.items() if k not in gone})


def _cut_and_joined(
    graph: Graph,
    axes: MeshAxes,
    images: Mapping[int, Lanes],
    stored: Sequence[bool],
    times: Sequence[int],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    pieces: Collection[int],
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of what convolutions have beside whole images.

    The pieces of one that is read; those that are made, where whole ones are computed of them in the kernel that would
    write these; and the parts of a concatenation's gradient, which one kernel writes.
    """
    uses = graph.uses()
    for op in graph.ops:
        row = reads.get((op.index, 0)) if op.primitive == "conv_general_dilated" else None
        if row is None or sums_over_images(op, images):
            continue
        value, result = op.operands[0], op.results[0]
        if result not in images or widened(graph.values[value], row, axes, images.get(value, "any")) == 1:
            continue
        made = _bytes(graph, axes, result, values.get(result, row), images[result])
        whole = next(whole_images_of(graph, result, stored, pieces), None) is not None
        parts = any(graph.ops[index].primitive == "split" for index, _ in uses[result])
        cut = 0 if value in pieces else _bytes(graph, axes, value, row, images[value])
        yield times[op.index], times[op.index] + 1, (made if whole else 0) + max(cut, made if parts else 0)


def _dear(
    graph: Graph, producers: Sequence[int], stored: Sequence[bool], value: int, spread: Mapping[int, set[int]]
) -> bool:
    """Whether an image is computed, since the last convolution, from so many whole images that it is kept instead.

    What a normalisation hands to an activation is: its own image, and a mean and a scale that are written out.

    Args:
      spread: by operation, what it reads that is written out.
    """
    shape, waiting, seen, leaves = math.prod(graph.values[value].shape), [value], {value}, set[int]()
    while waiting:
        current = waiting.pop()
        made = producers[current]
        if made < 0 or stored[current] or graph.ops[made].primitive == "conv_general_dilated":
            leaves.add(current)
            continue
        leaves |= spread.get(made, set())
        near = {v for v in graph.ops[made].operands if math.prod(graph.values[v].shape) == shape} - seen - leaves
        seen |= near
        waiting += near
    read = sum(graph.values[leaf].item_bytes for leaf in leaves)
    return read > COMPUTED_AGAIN * graph.values[value].item_bytes


def _elements(graph: Graph, value: int) -> float:
    """How many times the bytes of the pieces that a convolution reads an image has."""
    return max(graph.values[value].item_bytes / _CONVERTED, 1.0)


def _bytes(graph: Graph, axes: MeshAxes, value: int, row: np.ndarray, lanes: Lanes) -> int:
    """Of the pieces of an image that a convolution reads: f32 is converted before it waits.

    Images of few channels lie with their pieces in lanes, of which there are more (a stem of 7 x 7 on four images of
    bf16[512, 512, 3] keeps bf16[512, 32, 66, 3, 7], the 32 in lanes and the 3 in four rows, 242 MB).
    """
    tensor = graph.values[value]
    item_bytes, wider = min(_CONVERTED, tensor.item_bytes), widened(tensor, row, axes, lanes)
    whole = item_bytes / tensor.item_bytes * float(local_bytes(tensor, row, axes, "tpu", lanes))
    if wider == 1:
        return math.ceil(whole)
    pieces = local_sizes(tensor.shape, row[None], axes)
    elements = float(pieces.prod())
    pieces[0, lanes[0]] *= PIECES
    waste = float(padding(pieces, item_bytes)[0, lanes[0], lanes[1]])
    return math.ceil(wider * min(whole, elements * waste * item_bytes))


def _edge(graph: Graph, axes: MeshAxes, value: int, row: np.ndarray, lanes: Lanes, size: int) -> int:
    """Of the bytes of an image's pieces, those of the columns at one side."""
    shape = graph.values[value].shape
    columns = local_sizes(shape, row[None], axes)[0, cut_dimension(len(shape), lanes)]
    return math.ceil(size * HALO / (math.ceil(columns / PIECES) + HALO))


def _whole(graph: Graph, axes: MeshAxes, value: int, row: np.ndarray, lanes: Lanes, stored: bool) -> int:
    """Bytes of an image with its batch and channels in rows and lanes, in the type that convolutions multiply.

    Of one that is stored, how much more that is: it lies in the order of fewest bytes, until its last reader.
    """
    tensor = graph.values[value]
    item_bytes = min(_CONVERTED, tensor.item_bytes)
    local = local_sizes(tensor.shape, row[None], axes)
    wastes = padding(local, item_bytes)[0]
    size = float(local.prod()) * item_bytes * float(min(wastes[lanes], wastes[lanes[::-1]]))
    return math.ceil(max(size - stored * float(local_bytes(tensor, row, axes, "tpu")), 0.0))


def _stays(graph: Graph, op: Op) -> bool:
    """Whether XLA leaves the pixels of a weight's gradient where they are: of windows that lie side by side (a video
    transformer's pieces), and of each channel by itself (a convolution in time of a recurrent block)."""
    columns = graph.values[op.results[0]].shape[op.params["dimension_numbers"].out_spec[-1]]
    return op.params["batch_group_count"] > 1 or bool(op.params["rhs_dilation"][-1] >= columns > 1)
