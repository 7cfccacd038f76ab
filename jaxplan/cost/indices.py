"""Indices of gathers and scatters, as XLA for TPU prepares them: once for all that read them alike.

A gather's kernel reads indices that are clamped to what there is and padded, in a buffer of their own, whatever view of
an argument they are in the program (`senders[:, None]` is no array).  A scatter's reads them sorted, and beside them
the places that its updates come from, clamped and padded; the places themselves are made first.  Gathers by the same
indices share the first, scatters the two others, from the first of them to the last; single numbers are sorted with
their indices, for each scatter.  In a network on a graph of 79 million edges (GraphSAGE, ogbn-proteins) the senders are
clamped for the forward pass and sorted for the backward pass, the receivers the other way round (compiled for v6e, jax
0.10.2, libtpu 0.0.42.1).

Where vector memory holds the tables, a scatter's kernel gathers what it adds, and computes it elementwise: the messages
of a million edges among 24,576 nodes, f32[1048576, 128], are in no buffer (v5e; f32[28672, 128] is not held, nor is
[32768, 128] in bf16, which is added up in f32; v6e holds twice that, v5p no less than [16384, 128]).

XLA for GPU fuses gathers. Of one that fills what is out of bounds, as the gradient of a `segment_sum` does, it writes
which indices are inside, a byte each, once for all gathers by the same indices (GraphSAGE, H100).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.lax import GatherScatterMode

from ..ir import VIEWS, Graph, Op
from ..sharding import ELEMENTWISE, MeshAxes
from .residency import made_of
from .selections import is_selection
from .tiles import LANES, local_sizes

HELD = 3 << 22
"""Bytes in f32 of the largest table that a scatter's kernel gathers from or adds to, of two at most; see above."""


class Prepared(NamedTuple):
    """Indices that are prepared for operations of one kind.

    Attributes:
      ops: the gathers, or the scatters, in order; sorts: whether they are scatters.
    """

    ops: tuple[int, ...]
    sorts: bool


def unviewed(graph: Graph, producers: Sequence[int], value: int) -> int:
    """What a value shows all elements of, in their order."""
    count = math.prod(graph.values[value].shape)
    while (maker := producers[value]) >= 0 and graph.ops[maker].primitive in VIEWS | {"broadcast_in_dim"}:
        shown = graph.ops[maker].operands[0]
        if math.prod(graph.values[shown].shape) != count or graph.ops[maker].primitive == "transpose":
            break
        value = shown
    return value


def gathered_for_sums(graph: Graph, op: Op) -> bool:
    """Whether XLA for TPU gathers rows in the kernels of the scatters that add them up."""
    dims = op.params["dimension_numbers"]
    if dims.operand_batching_dims or not dims.offset_dims or _table_bytes(graph, op.operands[0]) > HELD:
        return False
    uses, around, producers = graph.uses(), graph.loops_around(), graph.producers()
    named = _named(graph, producers, op.operands[1])
    twins = [graph.ops[reader] for reader, place in uses[op.operands[0]] if place == 0]  # XLA gathers once for all
    twins = [o for o in twins if o.primitive == "gather" and _named(graph, producers, o.operands[1]) == named]
    left, seen = [twin.results[0] for twin in twins], set[int]()
    while left:
        value = left.pop()
        if not uses[value] or value in graph.outputs:
            return False
        for reader, place in uses[value]:
            other = graph.ops[reader]
            if around[reader] != around[op.index]:
                return False
            if other.primitive == "scatter-add" and place == 2 and _are_held(graph, producers, other):
                continue
            if other.primitive not in ELEMENTWISE or graph.values[other.results[0]].shape != graph.values[value].shape:
                return False
            if other.results[0] not in seen:
                seen.add(other.results[0])
                left.append(other.results[0])
    return True


def adds_gathered(graph: Graph, producers: Sequence[int], kinds: Sequence[str], op: Op) -> bool:
    """Whether a scatter's kernel gathers what it adds: among what that is made of is a gather that is fused."""
    return any(kinds[gather.index] == "fused" for gather in _gathers(graph, producers, op))


def _gathers(graph: Graph, producers: Sequence[int], scatter: Op) -> Iterator[Op]:
    """The gathers that a scatter's updates are elementwise made of."""
    for value in made_of(graph, producers, scatter.operands[2], lambda op: op.primitive in ELEMENTWISE):
        if producers[value] >= 0 and graph.ops[producers[value]].primitive == "gather":
            yield graph.ops[producers[value]]


def _are_held(graph: Graph, producers: Sequence[int], scatter: Op) -> bool:
    """Whether vector memory holds all tables that a scatter's kernel would gather from, and that which it adds to."""
    tables = {scatter.operands[0], *(gather.operands[0] for gather in _gathers(graph, producers, scatter))}
    sizes = [_table_bytes(graph, table) for table in tables]
    return max(sizes) <= HELD and sum(sizes) <= 2 * HELD


def same_indices(graph: Graph) -> dict[int, int]:
    """Indices of gathers and scatters that show another value as earlier ones do -> those: XLA for TPU brings both into
    another layout once."""
    found, first, producers = dict[int, int](), dict[Hashable, int](), graph.producers()
    for op in graph.lookups():
        value = op.operands[1]
        if producers[value] >= 0 and (shown := unviewed(graph, producers, value)) != value:
            key = shown, graph.values[value].shape, graph.loops_around()[producers[value]]
            found[value] = first.setdefault(key, value)
    return found


def prepared(graph: Graph, producers: Sequence[int]) -> Iterator[Prepared]:
    """Of all gathers and scatters by one index that are no selections, by what their indices show and the loop they are
    in; scatters of single numbers by themselves."""
    found: dict[tuple[int, bool, Hashable], list[int]] = {}
    around = graph.loops_around()
    for op in graph.lookups():
        scatters = op.primitive != "gather"
        if graph.values[op.operands[1]].shape[-1] == 1 and not is_selection(graph, op):
            alone = scatters and not op.params["dimension_numbers"].update_window_dims
            key = _named(graph, producers, op.operands[1]), scatters, (around[op.index], op.index if alone else -1)
            found.setdefault(key, []).append(op.index)
    for (_, scatters, _), ops in found.items():
        yield Prepared(tuple(ops), scatters)


def prepared_indices(
    graph: Graph,
    axes: MeshAxes,
    found: Sequence[Prepared],
    times: Sequence[int],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of indices, made before what reads them; those read in several layouts are there in each."""
    for one in found:
        for ops in _by_layout(one.ops, reads):
            item = graph.values[graph.ops[ops[0]].operands[1]].item_bytes
            size = math.ceil(_places(graph, axes, ops[0], reads) * item)
            first, last = min(times[op] for op in ops), max(times[op] for op in ops)
            if one.sorts:
                yield max(first - 2, 0), max(first, 1), size
            yield from [(max(first - 1, 0), last + 1, size)] * (1 + one.sorts)


def validity_masks(
    graph: Graph,
    axes: MeshAxes,
    found: Sequence[Prepared],
    times: Sequence[int],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of which indices are in bounds, GPU: until the last kernel that gathers by them."""
    uses = graph.uses()
    for one in found:
        filled = [op for op in one.ops if graph.ops[op].params.get("mode") == GatherScatterMode.FILL_OR_DROP]
        for ops in _by_layout(filled, reads) if not one.sorts else ():
            readers = [times[reader] for op in ops for reader, _ in uses[graph.ops[op].results[0]]]
            start, stop = min(times[op] for op in ops), max([*readers, *(times[op] for op in ops)]) + 1
            yield start, stop, _places(graph, axes, ops[0], reads)


def _by_layout(ops: Sequence[int], reads: Mapping[tuple[int, int], np.ndarray]) -> Iterable[list[int]]:
    """Gathers or scatters by the layout in which they read their indices."""
    found: dict[bytes, list[int]] = {}
    for op in ops:
        if (row := reads.get((op, 1))) is not None:
            found.setdefault(row.tobytes(), []).append(op)
    return found.values()


def _places(graph: Graph, axes: MeshAxes, op: int, reads: Mapping[tuple[int, int], np.ndarray]) -> int:
    """How many places the indices of an operation name on a device."""
    sizes = local_sizes(graph.values[graph.ops[op].operands[1]].shape, reads[op, 1][None], axes)[0, :-1]
    return math.ceil(float(np.prod(sizes)))


def _named(graph: Graph, producers: Sequence[int], value: int) -> int:
    """What indices show, before negative ones were counted from the end: equal operations are one to XLA."""
    while (maker := producers[value := unviewed(graph, producers, value)]) >= 0:
        if graph.ops[maker].primitive != "select_n":
            break
        value = graph.ops[maker].operands[1]
    return value


def _table_bytes(graph: Graph, value: int) -> int:
    *rows, columns = graph.values[value].shape or (1,)
    return math.prod(rows) * max(columns, LANES) * 4
