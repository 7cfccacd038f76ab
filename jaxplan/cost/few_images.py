"""Pixels that XLA for TPU moves into the batch where a device has few images.

A convolution of up to seven images runs on eight times as many: each is cut along its last dimension into eight pieces,
and what lies between convolutions stays so, a column wider for the neighbours' pixels (33 for 32 of 256).  It takes
memory:

- What is the same all over an image but differs between images (a group normalisation's mean and scale, a gate, an
  embedded time) is written out as a whole image and kept from its first use to its last one, for a broadcast does not
  go along with the pixels.
- What is whole between convolutions lies in the order of fewest bytes, but beside windows (`pieces.py`).
- Gradients of convolutions' weights wait for the end of the backward pass, and keep what they read (`moved_pixels.py`).
- What a normalisation over channels or groups reads is kept in f32 (`wide_images.py`).

The pass is xla/service/space_to_batch_converter.cc; batches of 1 to 16, images of 8 to 512 pixels a side, networks with
and without normalisation, compiled for v5e, v5p and v6e by jax 0.10.2, libtpu 0.0.42.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..ir import Graph, Value
from ..sharding import MeshAxes
from .images import Lanes
from .pieces import cut_dimension
from .tiles import Tiling, local_bytes, local_sizes

_FEW, PIECES = 7, 8
"""The most images of a device whose pixels are moved, and into how many pieces each is cut."""

HALO = 1
"""Columns of its neighbour beside each piece, of a kernel of three; wider kernels were not looked at."""


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
    columns = local[cut_dimension(len(tensor.shape), tiling)]
    if local[tiling[0]] > _FEW or columns <= PIECES:
        return 1.0
    return float(PIECES * (math.ceil(columns / PIECES) + HALO) / columns)


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


def few_images(
    graph: Graph, axes: MeshAxes, images: Mapping[int, Lanes], reads: Mapping[tuple[int, int], np.ndarray]
) -> bool:
    """Whether any convolution reads few images on a device."""
    return bool(images) and any(
        widened(graph.values[op.operands[0]], row, axes, images.get(op.operands[0], "any")) > 1
        for op in graph.ops
        if op.primitive == "conv_general_dilated" and (row := reads.get((op.index, 0))) is not None
    )
