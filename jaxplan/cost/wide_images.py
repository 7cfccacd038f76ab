"""Images in pieces (`pieces.py`) that XLA for TPU keeps in f32, for whole ones are computed of them so."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..ir import Graph, Interval
from ..sharding import MeshAxes
from .images import Lanes
from .pieces import whole_images_of
from .tiles import Tiling, local_bytes


class Wide(NamedTuple):
    """An image in pieces of which whole ones are computed in f32, as in a normalisation over channels.

    It is converted once, and kept so, in the order of fewest bytes but beside windows.

    Attributes:
      value: the image; converted: what it is in f32; windowed: whether it lies as windows want it.
    """

    value: int
    converted: int
    windowed: bool


def kept_as_f32(
    graph: Graph, pieces: Collection[int], beside_windows: Collection[int], stored: Sequence[bool]
) -> Iterator[Wide]:
    """The images of which whole ones are computed in f32."""
    uses = graph.uses()
    for value in pieces:
        for op in (graph.ops[index] for index, _ in uses[value] if stored[value]):
            converted = op.results[0] if op.primitive == "convert_element_type" else value
            if graph.values[converted].item_bytes == 4 and op.primitive != "conv_general_dilated":
                if whole := {v for result in op.results for v in whole_images_of(graph, result, stored, pieces)}:
                    yield Wide(value, converted, not whole.isdisjoint(beside_windows))
                    break


def widening(
    graph: Graph, axes: MeshAxes, images: Mapping[int, Lanes], wide: Sequence[Wide], intervals: Sequence[Interval],
    values: Mapping[int, np.ndarray],
) -> Iterator[tuple[int, int, int]]:  # fmt: skip
    """(start, stop, bytes more) of such images that are of two bytes."""
    for one in wide:
        if one.value != one.converted and (row := values.get(one.value)) is not None:
            lanes: Tiling = images[one.value] if one.windowed else "any"
            tensors = graph.values[one.converted], graph.values[one.value]
            size, own = (float(local_bytes(tensor, row, axes, "tpu", lanes)) for tensor in tensors)
            yield intervals[one.value].start, intervals[one.value].stop, math.ceil(size - own)
