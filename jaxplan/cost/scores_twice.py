"""Scores that XLA for TPU makes in one kernel and their softmax in the next one: twice in memory for a moment.

The product, its mask, the maximum, the argument of the exponential and its sum are one kernel, which writes the
argument alone, as long as the kernel can hold what it needs of all keys.  Else the product writes the scores, and the
next kernel reads them and writes the argument beside them:

- where each key has its own query head, from a mebibyte of one head's keys on, as wide as the kernel makes them (f32
  where it turns or scales them itself, bf16 where they are copied or repeated before);
- where a key has several query heads, a dimension of its own, if the kernel turns the keys (rotary positions put halves
  beside each other), of 128 columns or more; under scores that are converted from bf16 only from 768 KiB of one head's
  keys on, for fewer are turned in a kernel of their own.

- where queries and keys are slices of one array as they are, `qkv[:, :, 0]` and `qkv[:, :, 1]` or parts of its heads,
  and the scores are scaled or masked: with any number of keys, as wide as the product makes them (not so what
  `jnp.split` cuts a product's columns into, what is scaled, normalised or turned round before, nor scores to which
  something is added, or nothing done, or of which a dimension of one query head a key is moved; sixteen ways to write
  attention of 1024 tokens, `jax.nn.dot_product_attention` among them, for v5e and v6e, 2026-11-29).

Where a device has one sequence, or one head of each, they are one kernel: of the product's batch dimensions, of which
the program has two, one is left.  Of scores that are converted from bf16 that kernel writes these and the maxima, and
whoever reads the argument computes it of them: half as much (40 layers of 2048 to 8192 tokens, with gradients and
without, computed again and not, compiled for v5e, v5p and v6e).  120 layers of attention without gradients, 512 to 8192
tokens, heads of 64 to 256 columns, scanned and not, compiled for v5e, eight of them for v5p; 60 more, trained and not,
of one sequence or one head a device, up to 16384 tokens, for v5e and v6e (jax 0.10.2, libtpu 0.0.42.1).  Batch and
number of heads change nothing else.

On v6e, where a device has several of both, neither is so.  There masked scores of some 3000 keys on are read by their
softmax's kernel as the product makes them, and so are the mask, what it is filled with and what the scores are scaled
by, each written out in full: four arrays of f32[2, 8, 4, 4096, 4096] of 4.3 GB each and the mask's 1.1 GB, in a Llama's
forward pass (25.5 GB).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..ir import VIEWS, Graph
from ..sharding import ELEMENTWISE, MeshAxes
from .residency import Flow
from .scores import is_batched
from .tiles import Tiling, local_bytes, local_sizes

_HELD, _TURNED_APART, _COLUMNS = 1 << 20, 3 << 18, 128
"""See above: bytes, bytes and columns from which on scores lie apart."""

_WIDE = 4
"""Bytes of an element of f32, in which softmaxes are computed."""

_MADE_INSIDE = ELEMENTWISE | VIEWS | {"broadcast_in_dim", "concatenate", "convert_element_type", "slice", "split"}


class Twice(NamedTuple):
    """Scores that may be in memory beside what is exponentiated.

    Attributes:
      scores: the value, of which the largest is taken; views: others of the same; taken, subtracted: the operations
        that take the largest and subtract it.
      product: what makes the scores; place: of its operand, the keys.
      grouped: whether a key has several queries' heads; narrow: whether the product's own result is narrower.
      scalars: how many single numbers, of masks and of scales, are between the product and them; masks: what masks are
        made of, each a value, or -1 if it is computed of nothing.
      shared: whether queries and keys are slices of one array.
      scaled, turned: whether the kernel makes the keys itself, in f32, and of parts put beside each other.
    """

    scores: int
    views: tuple[int, ...]
    taken: int
    subtracted: int
    product: int
    place: int
    grouped: bool
    narrow: bool
    scalars: int
    masks: tuple[int, ...]
    shared: bool
    scaled: bool
    turned: bool


def scores_twice(flow: Flow) -> Iterator[Twice]:
    """All softmaxes, forward, of products with batch dimensions."""
    graph, uses = flow.graph, flow.graph.uses()
    for op in graph.ops:
        if op.primitive != "reduce_max" or len(op.params["axes"]) != 1:
            continue
        value = op.operands[0]
        views = _views(graph, uses, value)
        subtracted = [
            r for v in (value, *views) for r, place in uses[v] if graph.ops[r].primitive == "sub" and place == 0
        ]
        product, between = _product(flow, value)
        keys = graph.values[value].shape[op.params["axes"][0]]
        if not subtracted or product is None or graph.values[value].item_bytes != _WIDE:
            continue
        free = [_free(graph, product, place) for place in (0, 1)]
        sides = [place for place in (0, 1) if free[place] == [keys]]
        if not sides:
            continue
        place = sides[-1]
        grouped = len(free[1 - place]) > 1
        narrow = graph.values[graph.ops[product].results[0]].item_bytes < _WIDE
        scaled, turned = _made_inside(flow, graph.ops[product].operands[place])
        masks = tuple(_origin(flow, graph.ops[o].operands[0]) for o in between if graph.ops[o].primitive == "select_n")
        parts = {_sliced_of(flow, v) for v in graph.ops[product].operands}
        shared = len(parts) == 1 and None not in parts
        has_one = not grouped and any(len(_free_dims(graph, product, side)) > 1 for side in (0, 1))
        in_order = graph.values[value].shape == graph.values[graph.ops[product].results[0]].shape
        if has_one and not (shared and between and in_order):
            continue
        yield Twice(
            value, views, op.index, subtracted[0], product, place, grouped, narrow, len(between), masks, shared, scaled,
            turned,
        )


def twice_in_memory(
    graph: Graph,
    axes: MeshAxes,
    found: Sequence[Twice],
    times: Sequence[int],
    reads: Mapping[tuple[int, int], np.ndarray],
    rows: Mapping[int, Tiling],
    written_out: int,
) -> tuple[list[tuple[int, int, int]], dict[int, int]]:
    """(start, stop, bytes) of the scores that lie beside the argument of their exponential, while made into it, and
    of what is read with them; and since when the arguments are there.

    Args:
      written_out: from how many keys on what masks scores is written out, see `Profile.masked_tokens`; 0: never.
      times, rows: see `Traffic`; reads: see `simulate_memory`.
    """
    around = graph.loops_around()
    scores: list[tuple[int, int, int]] = []
    beside: dict[Hashable, tuple[int, int, int]] = {}
    late: dict[int, int] = {}
    for one in found:
        keys, read = reads.get((one.product, one.place)), reads.get((one.taken, 0))
        if keys is None or read is None or not _lies_apart(graph, axes, one, keys, written_out):
            continue
        tiling = rows.get(one.scores, "any")
        size = float(local_bytes(graph.values[one.scores], read, axes, "tpu", tiling))
        made, softmax = times[one.product], times[one.subtracted]
        narrow = one.shared and one.narrow and not written_out
        scores.append((made, softmax + 1, math.ceil(size / 2 if narrow else size)))
        late |= dict.fromkeys((one.scores, *one.views, *graph.ops[one.subtracted].results), softmax)
        read_with = [("numbers", one.scalars * size), *((mask, size / _WIDE) for mask in one.masks)]
        for what, bytes_ in read_with if _is_written_out(graph, axes, one, keys, written_out) else ():
            key = (around[one.product], what, size)
            start, stop, most = beside.get(key, (made + 1, softmax + 1, 0))
            beside[key] = min(start, made + 1), max(stop, softmax + 1), max(most, math.ceil(bytes_))
    return [*scores, *beside.values()], late


def kept_as_made(
    graph: Graph, axes: MeshAxes, found: Sequence[Twice], reads: Mapping[tuple[int, int], np.ndarray]
) -> frozenset[int]:
    """The arguments of exponentials in whose place the narrower scores that they are computed of are kept.

    Args:
      reads: see `simulate_memory`.
    """
    return frozenset(
        value for one in found if one.narrow and (keys := reads.get((one.product, one.place))) is not None
        if _one_kernel(graph, axes, one, keys) for value in graph.ops[one.subtracted].results
    )  # fmt: skip


def _one_kernel(graph: Graph, axes: MeshAxes, one: Twice, keys: np.ndarray) -> bool:
    """Whether a device has one place of all but one of a product's batch dimensions; `keys`: the keys' layout."""
    op = graph.ops[one.product]
    shape, (_, batched) = graph.values[op.operands[one.place]].shape, op.params["dimension_numbers"]
    sizes = local_sizes(shape, keys[None], axes)[0]
    batches = [d for d in batched[one.place] if shape[d] > 1]
    return len(batches) > 1 and sum(sizes[d] > 1 for d in batches) < 2


def _lies_apart(graph: Graph, axes: MeshAxes, one: Twice, keys: np.ndarray, written_out: int) -> bool:
    """Whether these scores are made in one kernel and read by the next; `keys`: the layout of the product's keys."""
    if _one_kernel(graph, axes, one, keys):
        return False
    op = graph.ops[one.product]
    tensor, (contracted, _) = graph.values[op.operands[one.place]], op.params["dimension_numbers"]
    columns = _elements(graph, axes, one, keys, contracted[one.place])
    tokens = _elements(graph, axes, one, keys, _free_dims(graph, one.product, one.place))
    held = tokens * columns * (_WIDE if one.scaled else tensor.item_bytes)
    shared = one.shared and one.scalars > 0
    if written_out:
        return shared or _is_written_out(graph, axes, one, keys, written_out)
    if one.grouped:
        return one.turned and columns >= _COLUMNS and (not one.narrow or held >= _TURNED_APART)
    return held >= _HELD or shared


def _is_written_out(graph: Graph, axes: MeshAxes, one: Twice, keys: np.ndarray, written_out: int) -> bool:
    """Whether what masks and scales scores is in memory in full, see the module."""
    tokens = _elements(graph, axes, one, keys, _free_dims(graph, one.product, one.place))
    return bool(one.masks) and 0 < written_out <= tokens


def _elements(graph: Graph, axes: MeshAxes, one: Twice, keys: np.ndarray, dims: Sequence[int]) -> float:
    """How many a device has along dimensions of the keys."""
    shape = graph.values[graph.ops[one.product].operands[one.place]].shape
    sizes = local_sizes(shape, keys[None], axes)[0]
    return float(np.prod([sizes[d] for d in dims]))


def _product(flow: Flow, value: int) -> tuple[int | None, list[int]]:
    """The product with batch dimensions that scores are made of elementwise, if one, and the operations between that
    read a single number too."""
    graph, size, between = flow.graph, math.prod(flow.graph.values[value].shape), list[int]()
    while (maker := flow.producers[value]) >= 0:
        op = graph.ops[maker]
        if is_batched(op):
            return maker, between
        if op.primitive not in ELEMENTWISE | VIEWS | {"convert_element_type"}:
            return None, []
        alike = [v for v in op.operands if math.prod(graph.values[v].shape) == size and not flow.source[v]]
        near = [v for v in alike if graph.values[v].dtype != "bool"]
        if not near:
            return None, []
        if any(flow.source[v] and graph.values[v].dtype != "bool" for v in op.operands):
            between.append(maker)
        value = near[0]
    return None, []


def _views(graph: Graph, uses: Sequence[Sequence[tuple[int, int]]], value: int) -> tuple[int, ...]:
    """What shows a value in other orders and shapes."""
    found = [value]
    for one in found:
        found += [v for r, _ in uses[one] if graph.ops[r].primitive in VIEWS for v in graph.ops[r].results]
    return tuple(found[1:])


def _origin(flow: Flow, value: int) -> int:
    """The value that this one shows, repeated or not; -1 where it is computed of nothing."""
    while not flow.source[value] and (maker := flow.producers[value]) >= 0:
        op = flow.graph.ops[maker]
        if op.primitive not in VIEWS | {"broadcast_in_dim"}:
            break
        value = op.operands[0]
    return -1 if flow.source[value] else value


def _sliced_of(flow: Flow, value: int) -> int | None:
    """The value of which this one is a slice as it lies, of another dimension than the last; None of anything else."""
    graph, sliced = flow.graph, False
    while (maker := flow.producers[value]) >= 0:
        op = graph.ops[maker]
        if op.primitive in ("slice", "split"):
            whole, part = (graph.values[v].shape for v in (op.operands[0], value))
            sliced |= whole[:-1] != part[:-1]
            if not sliced:
                return None
        elif op.primitive not in ("squeeze", "reshape"):
            break
        value = op.operands[0]
    return value if sliced else None


def _free_dims(graph: Graph, product: int, place: int) -> list[int]:
    op = graph.ops[product]
    contracted, batched = (sides[place] for sides in op.params["dimension_numbers"])
    return [d for d in range(len(graph.values[op.operands[place]].shape)) if d not in {*contracted, *batched}]


def _free(graph: Graph, product: int, place: int) -> list[int]:
    """The sizes of the dimensions of an operand that are neither summed over nor batches, but for ones."""
    shape = graph.values[graph.ops[product].operands[place]].shape
    return [shape[d] for d in _free_dims(graph, product, place) if shape[d] > 1]


def _made_inside(flow: Flow, value: int) -> tuple[bool, bool]:
    """Whether the product's kernel computes an operand in f32, and whether of parts that it puts beside each other."""
    graph, scaled, turned, waiting = flow.graph, False, False, [value]
    seen = set(waiting)
    while waiting:
        maker = flow.producers[value := waiting.pop()]
        op = graph.ops[maker] if maker >= 0 else None
        if op is None or op.primitive not in _MADE_INSIDE:
            continue
        moved = op.primitive == "transpose" or (op.primitive == "broadcast_in_dim" and not flow.source[value])
        if moved and not scaled:
            return False, False
        turned |= op.primitive == "concatenate"
        scaled |= op.primitive in ELEMENTWISE and graph.values[value].item_bytes == _WIDE
        near = {v for v in op.operands if not flow.source[v]} - seen
        seen |= near
        waiting += near
    return scaled, turned
