"""The halos of a partitioned program: Shardy leaves them to XLA's partitioner, which exchanges them without a word.

Where a convolution or a pool reads a tensor along a dimension that is cut, the collective_permutes follow from its
window (see `halo`); a value that is rolled around such a dimension sends its edge.  Where pieces don't line up devices
read unequally much; the padding is taken for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .halo import Window
from .mlir import Visit, axis_size, local_bytes, shape_of

_NUMBERS = re.compile(r"\[([^\]]*)\]x\[([^\]]*)\]->\[([^\]]*)\]")


def exchanges(visit: Visit, sizes: Mapping[str, int]) -> Iterator[tuple[int, tuple[str, ...], int]]:
    """(operand, axes, bytes that one device sends) of each collective_permute of one run of an operation."""
    if visit.op.name == "stablehlo.convolution":
        moved = [(0, *along) for along in _convolved(visit)]
    elif visit.op.name == "stablehlo.concatenate":
        yield from _rolled(visit, sizes)
        return
    elif visit.op.name == "stablehlo.reduce_window":
        moved = [(i, *along) for i in range(len(visit.results)) for along in _pooled(visit)]
    else:
        return
    for operand, dim, window, results, summed in moved:
        axes = visit.operand_layouts[operand][dim]
        value = visit.op.operands[operand]
        extent = shape_of(value)[0][dim]
        if not axes or window.is_point:
            continue
        lined_up = (window.summed_over if summed else window.moved_along)(extent, results)
        before, after = lined_up or (max(window.low, 0), max(window.high, 0))
        piece = extent
        for axis in axes:
            piece = -(-piece // axis_size(axis, sizes))
        for width in (before, after):
            if width:
                yield operand, axes, local_bytes(value, visit.operand_layouts[operand], sizes) * width // piece


def _rolled(visit: Visit, sizes: Mapping[str, int]) -> Iterator[tuple[int, tuple[str, ...], int]]:
    """Of one value whose end is put before its start: the fewer elements of the two go to the next device."""
    parts = [value.owner for value in visit.op.operands]
    dim, extents = int(visit.op.attributes["dimension"]), [shape_of(value)[0] for value in visit.op.operands]
    axes = visit.layouts[0][dim] if visit.layouts[0] else ()
    if len(parts) != 2 or not axes or any(getattr(part, "name", "") != "stablehlo.slice" for part in parts):
        return
    begins = [[int(n) for n in part.attributes["start_indices"]] for part in parts]
    whole = shape_of(parts[0].operands[0])[0] == shape_of(visit.op.results[0])[0]
    if parts[0].operands[0] != parts[1].operands[0] or not whole or any(begins[1]):
        return
    if begins[0][dim] == extents[1][dim] and sum(begins[0]) == begins[0][dim]:
        piece = extents[0][dim] + extents[1][dim]
        for axis in axes:
            piece = -(-piece // axis_size(axis, sizes))
        width = min(extents[0][dim], extents[1][dim])
        yield 0, axes, local_bytes(visit.op.results[0], visit.layouts[0], sizes) * width // piece


def _convolved(visit: Visit) -> Iterator[tuple[int, Window, int, bool]]:
    """(dimension of the image, window, extent of the results, whether the sum is cut) of every spatial dimension."""
    numbers = _NUMBERS.search(str(visit.op.attributes["dimension_numbers"]))
    assert numbers is not None
    image, kernel, made = ([name.strip() for name in part.split(",")] for part in numbers.groups())
    kernel_shape, made_shape = shape_of(visit.op.operands[1])[0], shape_of(visit.op.results[0])[0]
    count = len(image) - 2
    keys = ("window_strides", "lhs_dilation", "rhs_dilation")
    moves = zip(*(_numbers(visit, key, count) for key in keys), strict=True)
    for d, ((stride, base, dilation), (low, high)) in enumerate(zip(moves, _padding(visit, count), strict=True)):
        of_kernel = kernel.index(str(d))
        window = Window(
            size=kernel_shape[of_kernel], stride=stride, low=low, high=high, base=base, dilation=dilation
        )
        summed = bool(visit.operand_layouts[1][of_kernel])
        yield image.index(str(d)), window, made_shape[made.index(str(d))], summed


def _pooled(visit: Visit) -> Iterator[tuple[int, Window, int, bool]]:
    pooled = shape_of(visit.op.results[0])[0]
    keys = ("window_dimensions", "window_strides", "base_dilations", "window_dilations")
    moves = zip(*(_numbers(visit, key, len(pooled)) for key in keys), strict=True)
    for d, ((size, stride, base, dilation), (low, high)) in enumerate(
        zip(moves, _padding(visit, len(pooled)), strict=True)
    ):
        window = Window(size=size, stride=stride, low=low, high=high, base=base, dilation=dilation)
        yield d, window, pooled[d], False


def _numbers(visit: Visit, key: str, count: int) -> list[int]:
    attributes: Any = visit.op.attributes
    return [int(n) for n in attributes[key]] if key in attributes else [1] * count


def _padding(visit: Visit, count: int) -> list[tuple[int, int]]:
    attributes: Any = visit.op.attributes
    if "padding" not in attributes:
        return [(0, 0)] * count
    return [(int(low), int(high)) for low, high in np.array(attributes["padding"]).reshape(count, 2)]
