"""Which dimensions of images XLA for TPU puts into lanes: the channels, or the batch where that pads less.

Convolutions take and make tensors whose lanes are channels and whose rows are the batch or a row of pixels, or whose
lanes are a batch that fills them and whose rows are channels, never pixels in lanes; what is computed elementwise
between them, and windows, keep that layout.  f32[8, 224, 224, 64] takes 206 MB of VGG's memory so, not the 117 that
pixels in lanes would (25 convolutions of 3 to 512 channels and batches of 2 to 128, compiled for v5e, jax 0.10.2,
libtpu 0.0.42.1).  What is summed of an image keeps the order of the dimensions that are left: a mean over channels has
the batch in lanes.

A step's own images lie as callers see them, where pixels may be in lanes.  A convolution then reads a copy, which stays
until the last one that reads it, for the gradient of its weights: bf16[16, 224, 224, 3] takes 51 MB so, ten times its
bytes (a ConvNeXt and a ResNet on v5e).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from ..ir import Graph, Op
from ..sharding import Rule

Lanes = tuple[int, int]
"""The two dimensions that may lie in lanes, the batch and the channels."""

_ROWS = 8
"""Rows of a tile (jax.experimental.pallas.tpu, "tiling")."""

_WINDOWS = ("reduce_window", "select_and_scatter", "select_and_gather", "pad", "concatenate")
"""Primitives, by how their names begin, whose operands and results have the same dimensions in the same places."""


def image_lanes(graph: Graph, rules: Sequence[Rule]) -> Mapping[int, Lanes]:
    """For values in the layout of convolutions which dimensions may lie in lanes; the step's own arguments and results
    have the layouts that callers see."""
    found: dict[int, Lanes] = {}
    fixed = {*graph.inputs, *graph.outputs}
    for op in graph.ops:
        if op.primitive == "conv_general_dilated":
            numbers = op.params["dimension_numbers"]
            specs = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
            for value, spec in zip((*op.operands, *op.results), specs, strict=True):
                if value not in fixed:
                    found.setdefault(value, (min(spec[:2]), max(spec[:2])))
    if not found:
        return found
    handing = list(_handing(graph, rules, fixed))
    known = 0
    while known < len(found):
        known = len(found)
        for beside, taking in (*handing, *reversed(handing)):
            lanes = next((found[v] for v in beside if v in found), None)
            if lanes is not None:
                for value in taking:
                    found.setdefault(value, lanes)
        for op in graph.ops:
            if op.primitive.startswith("reduce_") and "axes" in op.params:
                _hand_down(graph, op, found, fixed)
    return found


def copied_reads(
    graph: Graph, stored: Sequence[bool], producers: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """(operation, operand) of convolutions that read a step's argument, or what is computed of it where it is read: in
    another type, turned round, with what is smaller."""

    @functools.cache
    def given(value: int) -> bool | None:
        """None: of what is smaller alone."""
        maker, size = producers[value], math.prod(graph.values[value].shape)
        if maker < 0 or stored[value]:
            return maker < 0
        large = {given(v) for v in graph.ops[maker].operands if math.prod(graph.values[v].shape) >= size}
        return None if large <= {None} else False not in large

    found = []
    for op in graph.ops:
        if op.primitive == "conv_general_dilated":
            found += [(op.index, place) for place, value in enumerate(op.operands) if given(value)]
    return tuple(found)


def lanes_read(op: Op, place: int) -> Lanes:
    """Which dimensions of a convolution's operand may lie in lanes."""
    numbers = op.params["dimension_numbers"]
    spec = (numbers.lhs_spec, numbers.rhs_spec)[place]
    return min(spec[:2]), max(spec[:2])


def written_for_products(graph: Graph, lanes: Mapping[int, Lanes]) -> set[int]:
    """What products of matrices read that lies as convolutions want it: it is written for them.

    A product makes an image in the order of its dimensions where its rows of pixels fill their tiles; what is computed
    elementwise in the layout of convolutions is not fused into it (a ConvNeXt's normalised images of 56 pixels a side;
    those of 28, 14 and 7 pixels are normalised in the product; v5e and v5p, jax 0.10.2, libtpu 0.0.42.1).
    """
    found = set[int]()
    for op in graph.ops:
        if op.primitive == "dot_general":
            for value in op.operands:
                shape = graph.values[value].shape
                if value in lanes and len(shape) > 3:
                    pixels = [size for d, size in enumerate(shape) if d not in lanes[value]]
                    if pixels[-1] % _ROWS == 0 and pixels[-1] > 1:
                        found.add(value)
    return found


def _handing(
    graph: Graph, rules: Sequence[Rule], fixed: Collection[int]
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Of each operation whose operands and results have one layout: those of its results' rank, and which of these
    take the layout of the others."""
    for op in graph.ops:
        whole = op.primitive.startswith(_WINDOWS)
        if op.results and (whole or rules[op.index].follows):
            shape = graph.values[op.results[0]].shape
            rank = max(len(graph.values[v].shape) for v in op.results)
            beside = [v for v in (*op.operands, *op.results) if len(graph.values[v].shape) == rank]
            yield beside, [v for v in beside if v not in fixed and (whole or graph.values[v].shape == shape)]


def _hand_down(graph: Graph, op: Op, found: dict[int, Lanes], fixed: set[int]) -> None:
    """Let what is reduced keep the order of its operand's dimensions."""
    operand, result = op.operands[0], op.results[0]
    if operand not in found or result in found or result in fixed or len(graph.values[result].shape) < 2:
        return
    kept = [d for d in range(len(graph.values[operand].shape)) if d not in op.params["axes"]]
    lanes = [kept.index(d) for d in found[operand] if d in kept]
    if lanes:
        found[result] = lanes[0], lanes[-1]
