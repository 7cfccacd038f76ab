"""What XLA for GPU keeps of products that it makes one of.

Products that read one operand and don't depend on each other are merged where one of each pair has no more than 64 MiB
of operands and result (xla/service/dot_merger.cc: the others are concatenated; of [16384, 1024] by [1024, 1024] bf16
none are, of 15000 rows all, H100, jax 0.10.2).  The one result is in memory until the last of them is read.  What a
product with batch dimensions behind others takes first, attention's queries and values, is copied into its order at
once, and read from there afterwards; what it takes second, the keys, it reads as it lies, and the copy that the
gradient of the queries needs is made just before that, of the whole that was kept for it: bf16[12288, 3072] for a third
of that.  So is what kernels read element by element on the way back (normalised queries and keys), and nothing where
all is transposed by the program, biased, rotated or multiplied into f32, and so copied (projections of attention in ten
variants, on eight devices; on one, where copies are made early, nothing is kept, nor on eight by jax 0.12).
A product that is made again behind a barrier, as of `jax.checkpoint`, waits for the gradient and reads another operand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..ir import VIEWS, Graph, Lives, Op
from ..sharding import UNREDUCED, MeshAxes, Rule
from .residency import origin
from .tiles import local_bytes

MERGED_BYTES = 64 * 2**20
"""What at least one of two products may have of operands and result (`xla_gpu_dot_merger_threshold_mb`)."""


class Merging(NamedTuple):
    """Products that may be merged.

    Attributes:
      shared: the place of the operand that they share.
      products: operations, in order; copied: for each whether its result is copied before it is first read.
    """

    shared: int
    products: tuple[int, ...]
    copied: tuple[bool, ...]


def mergings(
    graph: Graph, rules: Sequence[Rule], producers: Sequence[int], loops: Sequence[int]
) -> tuple[Merging, ...]:
    """Those; of several ways to merge a product the first one of which something is kept.

    Args:
      rules: of every operation; producers: see `Traffic`; loops: for every operation the loop that it stands in.
    """
    alike: dict[tuple[int, tuple[object, ...]], list[Op]] = {}
    behind = graph.behind()
    for op in graph.ops:
        if op.primitive == "dot_general" and rules[op.index].matmul:
            types = tuple(graph.values[v].dtype for v in (*op.operands, *op.results))
            for place, value in enumerate(op.operands):
                read = origin(graph, producers, value), graph.values[value].shape
                how = read, str(op.params["dimension_numbers"]), types, loops[op.index], behind[op.index]
                alike.setdefault((place, how), []).append(op)
    uses = graph.uses()
    found, taken = [], set[int]()
    for (shared, _), products in alike.items():
        for group in _independent(graph, uses, [op for op in products if op.index not in taken]):
            copied = tuple(_is_copied(graph, uses, op.results[0]) for op in group)
            if len(group) > 1:
                found.append(Merging(shared, tuple(op.index for op in group), copied))
                taken.update(op.index for op in group if not all(copied))
    return tuple(found)


def _independent(graph: Graph, uses: Sequence[Sequence[tuple[int, int]]], products: Sequence[Op]) -> Iterator[list[Op]]:
    """Runs of products none of which is made of another."""
    group: list[Op] = []
    for op in products:
        if group and _depends(graph, uses, group, op):
            yield group
            group = []
        group.append(op)
    yield group


def _depends(graph: Graph, uses: Sequence[Sequence[tuple[int, int]]], before: Sequence[Op], op: Op) -> bool:
    waiting, seen = [v for other in before for v in other.results], set[int]()
    while waiting:
        for reader, _ in uses[waiting.pop()]:
            if reader == op.index:
                return True
            if reader < op.index and reader not in seen:
                seen.add(reader)
                waiting.extend(graph.ops[reader].results)
    return False


def _is_copied(graph: Graph, uses: Sequence[Sequence[tuple[int, int]]], value: int) -> bool:
    """Whether a copy of a product's result is made at once for all that read it."""
    waiting, readers = [value], list[tuple[Op, int]]()
    while waiting:
        for index, place in uses[waiting.pop()]:
            op = graph.ops[index]
            if op.primitive == "transpose":
                return True
            if op.primitive in VIEWS:
                waiting.extend(op.results)
            else:
                readers.append((op, place))
    if not readers or any(op.primitive != "dot_general" for op, _ in readers):
        return False
    op, place = min(readers, key=lambda reader: reader[0].index)
    _, batch = op.params["dimension_numbers"]
    if list(batch[place]) == [*range(len(batch[place]))]:
        return False
    return place == 0 or graph.values[op.results[0]].item_bytes > graph.values[op.operands[1]].item_bytes


def kept_slices(
    graph: Graph,
    axes: MeshAxes,
    groups: Sequence[Merging],
    lives: Lives,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of what is in memory beside the products' own results.

    Args:
      values, reads: see `simulate_memory`.
    """
    for merged in merged_results(graph, axes, groups, values, reads):
        for value, start, stop in kept_until(lives, merged):
            yield start, stop, _bytes(graph, axes, value, values[value])


def merged_results(
    graph: Graph,
    axes: MeshAxes,
    groups: Sequence[Merging],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> Iterator[list[tuple[int, bool]]]:
    """(result, whether it is copied) of products that become one.

    Args:
      values, reads: see `simulate_memory`.
    """
    for group in groups:
        results = [graph.ops[index].results[0] for index in group.products]
        if not any(v not in values or UNREDUCED in values[v].tolist() for v in results):
            yield from _merged(graph, axes, group, values, reads)


def kept_until(lives: Lives, merged: Iterable[tuple[int, bool]]) -> Iterator[tuple[int, int, int]]:
    """(result, start, stop) of the parts of a merged product's result that are kept beside copies of them, or longer
    than they are read.

    Args:
      merged: results, with whether they are copied.
    """
    intervals, merged = lives.intervals, list(merged)
    until = max((intervals[value].stop for value, copied in merged if not copied), default=0)
    for value, copied in merged:
        start = intervals[value].start if copied else intervals[value].stop
        if start < until:
            yield value, start, until


def _merged(
    graph: Graph, axes: MeshAxes, group: Merging, values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> Iterator[list[tuple[int, bool]]]:  # fmt: skip
    """(result, whether it is copied) of those that become one, as XLA pairs them."""
    waiting = []
    for index, copied in zip(group.products, group.copied, strict=True):
        op = graph.ops[index]
        rows = [reads.get((index, place), values.get(value)) for place, value in enumerate(op.operands)]
        if any(row is None for row in rows):
            return
        shared, other = rows[group.shared], rows[1 - group.shared]
        of_shared, of_other = op.operands[group.shared], op.operands[1 - group.shared]
        assert shared is not None and other is not None
        own = _bytes(graph, axes, of_other, other) + _bytes(graph, axes, op.results[0], values[op.results[0]])
        waiting.append((shared.tobytes(), _bytes(graph, axes, of_shared, shared), own, (op.results[0], copied)))
    while waiting:
        row, common, own, first = waiting.pop(0)
        merged, rest = [first], []
        for one in waiting:
            if one[0] == row and min(common + own, common + one[2]) <= MERGED_BYTES:
                merged.append(one[3])
                own += one[2]
            else:
                rest.append(one)
        waiting = rest
        yield merged


def _bytes(graph: Graph, axes: MeshAxes, value: int, row: np.ndarray) -> int:
    return local_bytes(graph.values[value], row, axes, "gpu")
