"""Pixels that XLA for TPU moves into the batch where a device has few images.

A convolution of up to seven images runs on eight times as many: each is cut along its last dimension into eight pieces,
and what lies between convolutions stays so, a column wider for the neighbours' pixels (33 for 32 of 256).  It takes
memory:

- What is the same all over an image but differs between images (a group normalisation's mean and scale, a gate, an
  embedded time) is written out as a whole image and kept from its first use to its last one, for a broadcast does not
  go along with the pixels.
- The gradient of a convolution's weights reads a copy of its image that is made where the image is, in two forms, or in
  one where a normalisation over channels has put the pixels back, and then as many of it as the kernel has columns.
- All of these gradients are computed after the backward pass, and keep what they read.

The pass is xla/service/space_to_batch_converter.cc; batches of 1 to 16, images of 8 to 512 pixels a side, networks with
and without normalisation, compiled for v5e, v5p and v6e by jax 0.10.2, libtpu 0.0.42.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..ir import Graph, Op, Value
from ..sharding import MeshAxes
from .images import Lanes
from .kinds import COMPUTED_AGAIN
from .tiles import Tiling, local_bytes, local_sizes, padding

_FEW, _PIECES = 7, 8
"""The most images of a device whose pixels are moved, and into how many pieces each is cut."""

_CONVERTED = 2
"""Bytes of an element that a convolution of f32 multiplies at the default precision."""

_HALO = 1
"""Columns of its neighbour beside each piece, of a kernel of three; wider kernels were not looked at."""

_FORMS = 2
"""In how many forms an image waits for the gradient of a kernel of several columns: all its pieces, and by image."""


class Spread(NamedTuple):
    """What an operation reads that is the same all over an image.

    Attributes:
      op, place: the operation and which operand it is; value: which of them all, see `spread_reads`.
      image: what of the image's shape it is read with, see `grouped`.
    """

    op: int
    place: int
    value: int
    image: int


def spread_reads(graph: Graph, images: Mapping[int, Lanes]) -> tuple[Spread, ...]:
    """The operands of elementwise work on images that are one number for each image and channel."""
    producers, found = graph.producers(), []
    groups = grouped(graph, images)
    for op in graph.ops:
        image = groups.get(op.results[0], op.results[0]) if op.results else -1
        lanes = images.get(image)
        if lanes is None or op.primitive == "conv_general_dilated":
            continue
        shape = graph.values[op.results[0]].shape
        space = [d for d in range(len(graph.values[image].shape)) if d not in lanes]
        if len(shape) < 3 or shape[lanes[0]] == 1 or all(shape[d] == 1 for d in space):
            continue
        for place, value in enumerate(op.operands):
            small = graph.values[value].shape
            alike = len(small) == len(shape) and small[lanes[0]] > 1 and all(small[d] == 1 for d in space)
            if alike or (small == shape and _broadcast(graph, producers, value, lanes[0], space)):
                found.append(Spread(op.index, place, value, image))
    return tuple(found)


def grouped(graph: Graph, images: Mapping[int, Lanes]) -> dict[int, int]:
    """For images whose channels, the last dimension, are in groups: an image of that content, channels undivided.

    A group normalisation is often computed so; XLA for TPU moves the reshape behind it.
    """
    found: dict[int, int] = {}
    for op in graph.ops:
        if not op.results:
            continue
        value, shape = op.results[0], graph.values[op.results[0]].shape
        if op.primitive == "reshape" and (source := op.operands[0]) in images:
            before = graph.values[source].shape
            whole = len(before) - 1
            if images[source][1] == whole and len(shape) == len(before) + 1 and shape[:whole] == before[:whole]:
                found[value] = source
        elif near := [v for v in op.operands if v in found and graph.values[v].shape == shape]:
            found[value] = found[near[0]]
    return found


def _broadcast(graph: Graph, producers: Sequence[int], value: int, batch: int, space: Sequence[int]) -> bool:
    """Whether `value` is what has a batch and no pixels, broadcast over them."""
    maker = producers[value]
    op = graph.ops[maker] if maker >= 0 else None
    if op is None or op.primitive != "broadcast_in_dim" or not op.operands:
        return False
    small, kept = graph.values[op.operands[0]].shape, op.params["broadcast_dimensions"]
    sizes = dict(zip(kept, small, strict=True))
    return sizes.get(batch, 1) > 1 and all(sizes.get(d, 1) == 1 for d in space)


def widened(tensor: Value, row: np.ndarray, axes: MeshAxes, tiling: Tiling) -> float:
    """How many times its columns a device's part of an image has once they are cut into pieces; 1: they are not."""
    if not isinstance(tiling, tuple) or len(tensor.shape) < 3 or tiling[0] == tiling[1]:
        return 1.0
    local = local_sizes(tensor.shape, row[None], axes)[0]
    columns = local[max(d for d in range(len(tensor.shape)) if d not in tiling)]
    if local[tiling[0]] > _FEW or columns <= _PIECES:
        return 1.0
    return float(_PIECES * (math.ceil(columns / _PIECES) + _HALO) / columns)


def spread_copies(
    graph: Graph,
    axes: MeshAxes,
    spread: Sequence[Spread],
    images: Mapping[int, Lanes],
    values: Mapping[int, np.ndarray],
    when: Sequence[int],
    needed: Sequence[int],
) -> Iterator[tuple[int, int, int]]:
    """(first reader, after the last reader, bytes) of what is written out as whole images."""
    found: dict[tuple[int, bytes], tuple[int, int, int]] = {}
    for read in spread:
        result = read.image
        row, tensor = values.get(result), graph.values[result]
        if row is None:
            continue
        wider = widened(tensor, row, axes, images[result])
        if wider > 1:
            size = float(local_bytes(tensor, row, axes, "tpu", images[result]))
            size *= wider * graph.values[graph.ops[read.op].operands[read.place]].item_bytes / tensor.item_bytes
            start, stop = when[read.op], needed[read.op]
            before = found.get((read.value, row.tobytes()), (start, stop, 0))
            found[read.value, row.tobytes()] = min(before[0], start), max(before[1], stop), math.ceil(size)
    yield from found.values()


class Moved(NamedTuple):
    """What a TPU does otherwise for convolutions of few images, see `moved_pixels`.

    Attributes:
      times: when each operation runs; stored: for every value whether it is in memory, if only as a copy.
      copies: (start, stop, bytes) of the images that weights' gradients read: one each from where the image is made,
        and as many as the kernel has columns while the gradient is computed.
      reads: without those of these copies.
    """

    times: tuple[int, ...]
    stored: Sequence[bool]
    copies: tuple[tuple[int, int, int], ...]
    reads: Mapping[tuple[int, int], np.ndarray]


def few_images(
    graph: Graph, axes: MeshAxes, images: Mapping[int, Lanes], reads: Mapping[tuple[int, int], np.ndarray]
) -> bool:
    """Whether any convolution reads few images on a device."""
    return any(
        widened(graph.values[op.operands[0]], row, axes, images.get(op.operands[0], "any")) > 1
        for op in graph.ops
        if op.primitive == "conv_general_dilated" and (row := reads.get((op.index, 0))) is not None
    )


def moved_pixels(
    graph: Graph,
    axes: MeshAxes,
    images: Mapping[int, Lanes],
    stored: Sequence[bool],
    times: Sequence[int],
    reads: Mapping[tuple[int, int], np.ndarray],
    spread: Sequence[Spread] = (),
) -> Moved | None:
    """A step on TPU with the gradients of such convolutions' weights after the last convolution, in the opposite order.

    None where no convolution has few images.

    Args:
      images: see `image_lanes`; stored, times, spread: see `fusion.Traffic`; reads: see `simulate_memory`.
    """
    written_out: dict[int, set[int]] = {}
    for read in spread:
        written_out.setdefault(read.op, set()).add(read.value)
    convolutions = [op for op in graph.ops if op.primitive == "conv_general_dilated"] if images else []
    wider = {
        op.index: widened(graph.values[op.operands[0]], row, axes, images[op.operands[0]])
        for op in convolutions
        if _of_weights(op, images) and not _stays(graph, op) and (row := reads.get((op.index, 0))) is not None
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
        made = [later[producers[v]] for v in op.operands if producers[v] >= 0]
        later[op.index] = max([later[op.index], *made])
    for op in waiting:
        at, (value, gradient) = later[op.index], op.operands[:2]
        size = _bytes(graph, axes, value, reads[op.index, 0], images[value])
        columns = graph.values[op.results[0]].shape[op.params["dimension_numbers"].out_spec[-1]]
        forms = 1 if _mixed(graph, producers, images, value) else min(columns, _FORMS)
        copies += [(later[producers[value]] + 1, at, forms * size), (at, at + 1, columns * size)]
        if not stored[value] and _dear(graph, producers, stored, value, written_out):
            whole = math.ceil(size * _elements(graph, value))
            copies.append((later[producers[value]] + 1, times[op.index] + 1, whole))
        if not kept[gradient]:
            size = _bytes(graph, axes, gradient, reads[op.index, 1], images.get(gradient, images[value]))
            copies.append((later[producers[gradient]], at + 1, size))
        kept[value] = kept[gradient] = True
    gone = {(op.index, 0) for op in waiting}
    return Moved(tuple(later), kept, tuple(copies), {k: row for k, row in reads.items() if k not in gone})


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


def _mixed(graph: Graph, producers: Sequence[int], images: Mapping[int, Lanes], value: int) -> bool:
    """Whether an image is computed, since the last convolution, from one number for all channels of each pixel."""
    waiting, seen = [value], {value}
    while waiting:
        made = waiting.pop()
        op = graph.ops[producers[made]] if producers[made] >= 0 else None
        if op is None or op.primitive == "conv_general_dilated" or made not in images:
            continue
        shape, channels = graph.values[made].shape, images[made][1]
        for operand in op.operands:
            small = graph.values[operand].shape
            if len(small) == len(shape) > channels and small[channels] == 1 < shape[channels]:
                if any(size > 1 for d, size in enumerate(small) if d not in images[made]):
                    return True
            elif operand not in seen:
                seen.add(operand)
                waiting.append(operand)
    return False


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
    pieces[0, lanes[0]] *= _PIECES
    waste = float(padding(pieces, item_bytes)[0, lanes[0], lanes[1]])
    return math.ceil(wider * min(whole, elements * waste * item_bytes))


def _stays(graph: Graph, op: Op) -> bool:
    """Whether XLA leaves the pixels of a weight's gradient where they are: of windows that lie side by side (a video
    transformer's pieces), and of each channel by itself (a convolution in time of a recurrent block)."""
    columns = graph.values[op.results[0]].shape[op.params["dimension_numbers"].out_spec[-1]]
    return op.params["batch_group_count"] > 1 or bool(op.params["rhs_dilation"][-1] >= columns > 1)


def _of_weights(op: Op, images: Mapping[int, Lanes]) -> bool:
    """Whether a convolution sums over the images: what other convolutions have as their batch it has as channels."""
    lanes = images.get(op.operands[0])
    return lanes is not None and op.params["dimension_numbers"].lhs_spec[1] == lanes[0]
