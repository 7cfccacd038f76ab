"""What is put together and normalised in groups of channels, which XLA for TPU writes out in f32.

A U-Net's decoder puts what came up beside what was skipped, and normalises both in groups:
`jnp.concatenate([h, skip], -1).astype(f32).reshape(b, h, w, groups, -1)`.  Where the parts are equal and each group is
of one, XLA makes the reshape before the concatenation, and writes that, converted, for the statistics and the
normalisation to read:

- in tiles of pixels by a group's channels, of which the longer is in lanes; where it is the pixels, the parts are
  copied turned round before, and what is normalised is written likewise before it is turned back;
- under a derivative, the f32 numbers are copied once more, back to where all channels are lanes, and kept for the
  backward pass, and with them the parts in the tiles of their groups.

Groups that straddle two parts, unequal parts, parts of f32, and statistics of channels (`nn.GroupNorm`) are read where
they lie.

Images of 32, 64 and 128 pixels, two parts of 256 or 512 channels in 16 and 32 groups, forward and with gradients, and a
diffusion model's sampling (jax 0.10.2, libtpu 0.0.42.1, v5e, 2026-11-27).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..ir import Graph, Op
from ..sharding import ELEMENTWISE, MeshAxes
from .converted_weights import Converted
from .tiles import local_sizes, padding


class Grouped(NamedTuple):
    """A concatenation along channels, the reshape that groups them, the one that ungroups what is normalised; `kept`:
    whether the backward pass reads the groups too."""

    concatenated: int
    grouped: int
    normalised: int
    kept: bool


def grouped_concats(graph: Graph) -> Iterator[Grouped]:
    """Those of equal parts that are converted to a wider type before they are grouped, no group of two parts."""
    uses = graph.uses()

    def readers(value: int, primitive: str) -> Iterator[Op]:
        return (graph.ops[reader] for reader, _ in uses[value] if graph.ops[reader].primitive == primitive)

    for op in graph.ops:
        whole = graph.values[op.results[0]] if op.primitive == "concatenate" else None
        if whole is None or len(whole.shape) < 3 or op.params["dimension"] != len(whole.shape) - 1:
            continue
        parts = [graph.values[part].shape[-1] for part in op.operands]
        for convert in readers(op.results[0], "convert_element_type"):
            wider = graph.values[convert.results[0]].item_bytes > whole.item_bytes
            for reshape in readers(convert.results[0], "reshape") if wider else ():
                shape = graph.values[reshape.results[0]].shape
                apart = shape[:-2] == whole.shape[:-1] and len({*parts}) == 1 and not parts[0] % shape[-1]
                if apart and (back := _ungrouped(graph, reshape, whole.shape)):
                    yield Grouped(op.index, reshape.index, back[0], len(back) > 1)


def _ungrouped(graph: Graph, grouping: Op, shape: tuple[int, ...]) -> list[int]:
    """The reshapes back to `shape` of what is computed of groups element by element; of those after the first one, they
    are a derivative's."""
    uses, grouped = graph.uses(), graph.values[grouping.results[0]].shape
    waiting, seen, found = [*grouping.results], {*grouping.results}, set[int]()
    while waiting:
        for reader, _ in uses[waiting.pop()]:
            op = graph.ops[reader]
            if op.primitive == "reshape" and graph.values[op.results[0]].shape == shape:
                found.add(reader)
            elif op.primitive in ELEMENTWISE:
                new = {v for v in op.results if graph.values[v].shape == grouped} - seen
                seen |= new
                waiting += new
    return sorted(found)


def written_in_groups(
    graph: Graph,
    axes: MeshAxes,
    found: Sequence[Grouped],
    times: Sequence[int],
    needed: Sequence[int],
    values: Mapping[int, np.ndarray],
) -> Iterator[Converted]:
    """What is written for them, see the module.

    Args:
      times, needed: when each operation runs, and until when it needs its operands.
      values: the layout row of every value where it is made.
    """
    for one in found:
        whole, value = graph.ops[one.concatenated].results[0], graph.ops[one.grouped].results[0]
        if (row := values.get(value)) is None:
            continue
        sizes = local_sizes(graph.values[value].shape, row[None], axes)
        pixels, groups, channels = range(sizes.shape[1] - 3, sizes.shape[1])
        turned = bool(sizes[0, pixels] > sizes[0, channels])
        lanes, rows = (pixels, channels) if turned else (channels, groups)
        plain = math.ceil(sizes.prod() * graph.values[value].item_bytes)
        wide, parts = (_in_tiles(sizes, graph.values[v].item_bytes, lanes, rows) for v in (value, whole))
        start, done, until = times[one.concatenated], times[one.normalised] + 1, needed[one.grouped]
        yield Converted(start, done, wide, value)
        if one.kept:
            yield Converted(done - 1, until, plain, value)
        if turned or one.kept:
            yield Converted(start, until if one.kept else times[one.grouped] + 1, parts, whole)
        if turned and not one.kept:
            yield Converted(done - 1, done + 1, parts, whole)


def _in_tiles(sizes: np.ndarray, item_bytes: float, lanes: int, rows: int) -> int:
    """Bytes of a part of these sizes with one dimension in lanes and another in rows."""
    return math.ceil(sizes.prod() * item_bytes * padding(sizes, item_bytes)[0, lanes, rows])
