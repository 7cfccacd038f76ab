"""What sorting needs beside what is sorted: one place, an int32, for each element.

XLA sorts stably by comparing the places of what is equal (`StableSortExpander`), on all platforms: they are a further
tensor unless what is sorted has them already, as `argsort`'s has.  A `top_k` where XLA has no kernel for it sorts every
element, beside its place.

XLA for GPU has one for up to 16 of at least 1024 numbers in f32 or bf16, XLA for TPU for fewer than one in 64 of f32 or
bf16 (30 sizes compiled for H100 and v5e, jax 0.10.2, libtpu 0.0.42.1).  All else is sorted: the numbers in their own
buffer where nothing else wants them, else in a copy, and one 32-bit integer each for the places.  The 32 nearest of 4
million keys, f32[4096, 524288] a device, take 8 GiB more on H100 than the scores do.

The TPU's kernel computes what it selects from: the scores stay bf16 though they are compared in f32.  It goes along
columns, so arguments, which lie in rows, are copied for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..ir import Graph, Op
from ..sharding import MeshAxes
from .tiles import device_bytes, local_sizes

_MOST, _LEAST, _SHARE = 16, 1024, 64
"""How many, and of how many at least, the GPU's kernel finds; and of how many one the TPU's."""


def selected(graph: Graph, op: Op, platform: str, among: np.ndarray | float) -> np.ndarray:
    """`bool[n]`: whether a `top_k` is found without sorting, of so many elements of one device."""
    kernel = graph.values[op.operands[0]].dtype in ("float32", "bfloat16")
    if platform == "tpu":
        return np.asarray(kernel & (np.asarray(among) > _SHARE * op.params["k"]))
    return np.asarray(kernel & (op.params["k"] <= _MOST) & (np.asarray(among) >= _LEAST))


def selects(graph: Graph, op: Op, platform: str) -> bool:
    """Whether an operation is a `top_k` whose kernel computes what it selects from."""
    if op.primitive != "top_k" or platform != "tpu":
        return False
    return bool(selected(graph, op, platform, graph.values[op.operands[0]].shape[_along(graph, op)]))


def selected_from(
    graph: Graph, kinds: Sequence[str], producers: Sequence[int], source: Sequence[bool], value: int
) -> int:
    """What is in memory of a `value` that is selected from: what it is computed of, if that is one tensor of no more
    bytes and no product or sum is between them."""
    while (maker := producers[value]) >= 0 and kinds[maker] == "fused":
        read = [v for v in graph.ops[maker].operands if not source[v]]
        if len(read) != 1 or graph.values[read[0]].bytes > graph.values[value].bytes:
            break
        value = read[0]
    return value


def sorting_bytes(graph: Graph, op: Op, rows: np.ndarray, axes: MeshAxes, platform: str) -> np.ndarray | None:
    """`float64[n]`: bytes beside its operands that a `sort` or `top_k` needs while it runs, for each layout of the
    first of them; None: no such operation."""
    if op.primitive not in ("sort", "top_k") or platform == "cpu":
        return None
    value = op.operands[0]
    tensor = graph.values[value]
    places = replace(tensor, dtype="int32", item_bytes=4.0, narrowed=False)
    if op.primitive == "sort":
        beside = op.params["is_stable"] and not _has_places(graph, op)
        return device_bytes(places, rows, axes, platform).astype(float) if beside else None
    among = local_sizes(tensor.shape, rows, axes)[:, _along(graph, op)]
    whole, given = device_bytes(tensor, rows, axes, platform), value in graph.inputs
    wanted = given or value in graph.outputs or any(reader != op.index for reader, _ in graph.uses()[value])
    by_sorting = device_bytes(places, rows, axes, platform) + whole * wanted
    by_selecting = whole * (given and platform == "tpu")
    return np.where(selected(graph, op, platform, among), by_selecting, by_sorting).astype(float)


def sorting_scratch(
    graph: Graph, axes: MeshAxes, reads: Mapping[tuple[int, int], np.ndarray], platform: str
) -> dict[int, int]:
    """`sorting_bytes` by operation, in the layouts that are `reads`."""
    found: dict[int, int] = {}
    for op in graph.ops:
        row = reads.get((op.index, 0))
        size = None if row is None else sorting_bytes(graph, op, row[None], axes, platform)
        if size is not None and size[0]:
            found[op.index] = math.ceil(float(size[0]))
    return found


def _has_places(graph: Graph, op: Op) -> bool:
    """Whether one of the tensors that are sorted counts along what they are sorted in."""
    producers, along = graph.producers(), op.params["dimension"]
    for value in op.operands:
        place = along
        while (maker := producers[value]) >= 0:
            made = graph.ops[maker]
            if made.primitive == "iota" and made.params["dimension"] == place:
                return True
            if made.primitive != "broadcast_in_dim" or place not in made.params["broadcast_dimensions"]:
                break
            value, place = made.operands[0], made.params["broadcast_dimensions"].index(place)
    return False


def _along(graph: Graph, op: Op) -> int:
    return int(op.params.get("axis", -1)) % len(graph.values[op.operands[0]].shape)
