"""Which images lie in pieces between convolutions that XLA for TPU runs with their pixels in the batch.

Where a device has few images (`few_images.py`) what a convolution makes is in pieces.  Elementwise work keeps them if
all that it reads of an image is in pieces, or says nothing of the dimension that was cut: a weight of each channel, a
statistic of each image.  What a normalisation over channels subtracts is another number at each pixel, so its result,
and all that it is added to, is whole again; the next convolution cuts it anew.  What products make is whole.

Source: xla/service/space_to_batch_converter.cc (SupportedOpForPropagation, IsBroadcastPropagatable).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from ..ir import Graph, Op
from ..sharding import Rule
from .images import Lanes

_WINDOWS = ("reduce_window", "select_and")
"""Primitives of windows, by how their names begin."""

_HANDING = frozenset({"broadcast_in_dim", "concatenate", "pad", "reduce_max", "reduce_sum", "split"})
"""What else keeps the order of its operands' dimensions."""


def in_pieces(
    graph: Graph, rules: Sequence[Rule], images: Mapping[int, Lanes], grouped: Mapping[int, int]
) -> frozenset[int]:
    """The values that lie in pieces where every convolution cuts its image.

    Args:
      images: see `image_lanes`; grouped: see `few_images.grouped`.
    """
    found, alike = set[int](), set[int]()
    for op in graph.ops:
        if not op.results or (lanes := images.get(grouped.get(op.results[0], op.results[0]))) is None:
            continue
        shape = graph.values[op.results[0]].shape
        rank = len(shape) - (op.results[0] in grouped)
        if rank < 3 or lanes[0] == lanes[1]:
            continue
        cut = cut_dimension(rank, lanes)
        if op.primitive == "broadcast_in_dim":
            if not _says(graph, op, cut):
                alike.update(op.results)
        elif op.primitive == "conv_general_dilated":
            if not sums_over_images(op, images):
                found.update(op.results)
        elif op.primitive == "reshape":
            source = op.operands[0]
            if source in found and (op.results[0] in grouped or source in grouped):
                found.update(op.results)
        elif rules[op.index].follows or op.primitive == "pad" or op.primitive.startswith(_WINDOWS):
            large = [v for v in op.operands if len(s := graph.values[v].shape) == len(shape) and s[cut] > 1]
            others = [v for v in large if v not in alike]
            if others and found.issuperset(others) and not _pads(op, cut):
                found.update(op.results)
            elif not others:
                alike.update(op.results)
    return frozenset(found)


def beside_windows(
    graph: Graph, rules: Sequence[Rule], images: Mapping[int, Lanes], pieces: Collection[int]
) -> frozenset[int]:
    """The whole images that lie as windows (of a pooling) want them, channels in lanes, and what is summed of them.

    Other whole images lie in the order of fewest bytes.
    """
    found = set[int]()
    ways = [[v for v in (*op.operands, *op.results) if v in images and v not in pieces] for op in graph.ops]
    for op in graph.ops:
        if op.primitive.startswith(_WINDOWS):
            found.update(ways[op.index])
    known = -1 if found else 0
    while known < len(found):
        known = len(found)
        for op in (*graph.ops, *reversed(graph.ops)):
            if (rules[op.index].follows or op.primitive in _HANDING) and not found.isdisjoint(ways[op.index]):
                found.update(ways[op.index])
    return frozenset(found)


def whole_images_of(graph: Graph, value: int, stored: Sequence[bool], pieces: Collection[int]) -> Iterator[int]:
    """Of `value`, if it lies in pieces, the whole images that are computed of it before anything is stored, and the
    statistics of more than channels."""
    waiting, seen, uses = [value], {value}, graph.uses()
    while waiting:
        current = waiting.pop()
        if current not in pieces:
            if len(graph.values[current].shape) > 1:
                yield current
        elif not stored[current]:
            near = (graph.ops[index] for index, _ in uses[current])
            made = {v for op in near if op.primitive != "conv_general_dilated" for v in op.results} - seen
            seen |= made
            waiting += made


def cut_dimension(rank: int, lanes: Lanes) -> int:
    """Which dimension of an image is cut into pieces: its last one of pixels."""
    return max(d for d in range(rank) if d not in lanes)


def sums_over_images(op: Op, images: Mapping[int, Lanes]) -> bool:
    """Whether a convolution sums over the images: what other convolutions have as their batch it has as channels."""
    lanes = images.get(op.operands[0])
    return lanes is not None and op.params["dimension_numbers"].lhs_spec[1] == lanes[0]


def _says(graph: Graph, op: Op, cut: int) -> bool:
    """Whether what is broadcast has several numbers along the dimension that is cut."""
    sizes = dict(zip(op.params["broadcast_dimensions"], graph.values[op.operands[0]].shape, strict=True))
    return sizes.get(cut, 1) > 1


def _pads(op: Op, cut: int) -> bool:
    """Whether an operation pads that dimension, windows before the first column."""
    if op.primitive == "pad":
        return any(op.params["padding_config"][cut])
    return "padding" in op.params and op.params["padding"][cut][0] > 0
