"""Tables whose rows are gathered and added to, on TPU: what is copied because rows lie in rows and arguments do not.

An argument lies as its shape alone says, in the order that pads least; f32[200000, 64] by columns.  XLA for TPU copies
it into rows to gather from it, or from a slice of it.  Its gradient, rows that are scattered into zeros, lies in rows
too, and the optimizer's elementwise work is done in the gradient's order: the table's copy then stays from the first
gather to the update, and what else the update reads and writes of that shape is copied into rows and back; which of
several tables is updated last is the compiler's choice (of DLRM's, the largest before the small ones; SGD, Adagrad and
Adam on tables of 32 to 650 columns; DLRM, T5 and an LSTM's vocabulary).  Where rows pad a lot and that is more than
two tensors, the gradient is copied into columns instead (Adam on 64 and 160 columns, but not on 96, 100, 200 and 650;
Adagrad on 32; compiled for v5e, jax 0.10.2, libtpu 0.0.42.1).

Several tables in one tensor, [tables, rows, columns], are scattered into as one of all their rows.  Where it lies in
columns its gradient is brought into the tables' shape after that, with tables and rows in tiles: five tables take eight
tables' bytes.  Padded so the update of several tensors is made there too, a buffer for each, and copied to where they
lie (Adagrad and Adam on 5 tables of 32 columns); where that pads little there are two for each but the gradient's own
(26 tables of 32, 64 and 128 columns over eight v5e: one with SGD, three with optax' Adagrad, five with its Adam, but
four with those written by hand).  Else it is written there at once (3, 4 and 8 tables of 32 columns).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..ir import Graph, Op, Value, settled_values
from ..sharding import ELEMENTWISE, MeshAxes, Rule, pieces
from .lookups import Lookups, table_tiling
from .row_layouts import cut_to_columns, stays_in_rows
from .tiles import RowsOf, Tiling, device_bytes, lies_in_rows, local_bytes, local_sizes

_PADDED, _FEW = 1.5, 2
"""From which waste on rows pad a lot, and how many tensors are updated in rows all the same, see the module."""


class RowUpdate(NamedTuple):
    """A table's gradient, scattered in rows, and what is updated with it.

    Attributes:
      gradient: what the scatter makes.
      updated: (donated argument of its shape, next value) of the table, its moments and whatever else.
      tiling: of the gradient, see `lookups`.
    """

    gradient: int
    updated: tuple[tuple[int, int], ...]
    tiling: Tiling = "table"


def row_updates(graph: Graph, rules: Sequence[Rule], lookups: Lookups) -> tuple[RowUpdate, ...]:
    """The tables of a step that are updated with rows scattered into zeros."""
    settled, found = settled_values(graph), []
    for op in graph.lookups():
        if op.primitive == "gather" or not lookups[op.index]:
            continue
        gradient = op.results[0]
        shape, made = graph.values[gradient].shape, {gradient}
        for later in graph.ops[op.index + 1 :]:
            if rules[later.index].follows and not made.isdisjoint(later.operands):
                made.update(v for v in later.results if graph.values[v].shape == shape)
        updated = tuple((settled[v], v) for v in sorted(made) if v in settled)
        if updated:
            found.append(RowUpdate(gradient, updated, table_tiling(lookups, op)))
    return tuple(found)


def table_bytes(
    tensor: Value, places: np.ndarray, axes: MeshAxes, updates: int, tiling: Tiling = "table"
) -> tuple[np.ndarray, np.ndarray]:
    """`float64[n]` twice: how many times a tensor's bytes the kernel moves that updates it, and the bytes, as they lie,
    that are copied into rows and back for it, or a gradient into columns, for each of the `updates` of one table.

    Args:
      tiling: see `RowUpdate`.

    See the module for when which is done; of what needs no copy nothing.
    """
    whole = np.maximum(tensor.bytes / pieces(places, axes), 1.0)
    padded = device_bytes(tensor, places, axes, "tpu", tiling)
    waste = padded / np.maximum(device_bytes(tensor, places, axes, "tpu"), 1.0)
    in_columns = (waste > _PADDED) & (updates > _FEW)
    copied = np.where(waste > 1, padded + whole, 0.0)
    return np.where(in_columns, 1.0, waste), np.where(in_columns, copied / updates, 2 * copied)


class TableCopy(NamedTuple):
    """Bytes of a copy of `value` while operations `start` to `stop` run.

    Attributes:
      brief: vector memory may hold it; instead: from when on it is what is left of the value; -1: never.
    """

    value: int
    start: int
    stop: int
    size: int
    brief: bool = False
    instead: int = -1


def table_copies(
    graph: Graph,
    axes: MeshAxes,
    updates: Sequence[RowUpdate],
    lookups: Lookups,
    rows: Mapping[int, Tiling],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    local: Callable[[int, np.ndarray], int],
    when: Sequence[int],
    needed: Sequence[int],
) -> Iterator[TableCopy]:
    """What a TPU copies into rows, and gradients into columns.

    Args:
      lookups: see `lookups_of`; rows: see `tiled_in_rows`; values, reads: see `simulate_memory`; local: a value's
        bytes.
      when: when each operation runs; needed: until when its operands are.
    """

    def in_rows(value: int, row: np.ndarray, tiling: Tiling = "table") -> int:
        size = local_bytes(graph.values[value], row, axes, "tpu", tiling)
        return size if size > local(value, row) else 0

    producers = graph.producers()
    yield from _returned_rows(graph, axes, lookups, values, reads, local, when)
    yield from _brief_rows(graph, axes, lookups, rows, values, reads, local, when, needed)
    for value in _sums(graph, lookups) if rows else ():
        tiling = table_tiling(lookups, graph.ops[producers[value]])
        if (made := values.get(value)) is not None and (size := in_rows(value, made, tiling)):
            yield TableCopy(value, when[producers[value]], when[producers[value]] + 1, size, brief=True)
    copies: dict[tuple[int, bytes], TableCopy] = {}
    for op, value, row in _gathered(graph, lookups, reads, rows, producers):
        if size := in_rows(value, row):
            key = value, row.tobytes()
            before = copies.get(key, TableCopy(value, when[op], needed[op], size))
            copies[key] = before._replace(start=min(before.start, when[op]), stop=max(before.stop, needed[op]))
    last = max((when[producers[v]] for update in updates for _, v in update.updated), default=0)
    for update in updates:
        known = [(a, v) for a, v in update.updated if a in values and v in values]
        yield from _in_their_shape(graph, axes, update, known, values, local, when, producers)
        of_whole = cut_to_columns(graph, axes, update.gradient, update.updated, values, update.tiling)
        padded = {a: of_whole.get(a) or in_rows(a, values[v], update.tiling) for a, v in known}
        pairs = [(a, v) for a, v in known if padded[a]]
        if not pairs:
            continue
        wasted = padded[pairs[0][0]] / local(pairs[0][0], values[pairs[0][1]])
        if wasted > _PADDED and len(pairs) > _FEW:
            row, at = values[pairs[0][1]], when[producers[pairs[0][1]]]
            yield TableCopy(update.gradient, at, at + 1, local(pairs[0][0], row))
            continue
        for argument, value in pairs:
            row, at = values[value], when[producers[value]]
            first = min((copy.start for copy in copies.values() if copy.value == argument), default=at)
            kept = copies.pop((argument, row.tobytes()), TableCopy(argument, first, at + 1, padded[argument]))
            yield kept._replace(start=min(kept.start, first), stop=max(kept.stop, last + 1))
    yield from copies.values()


def _in_their_shape(
    graph: Graph,
    axes: MeshAxes,
    update: RowUpdate,
    updated: Sequence[tuple[int, int]],
    values: Mapping[int, np.ndarray],
    local: Callable[[int, np.ndarray], int],
    when: Sequence[int],
    producers: Sequence[int],
) -> Iterator[TableCopy]:
    """Gradients of several tables in one tensor that lies in columns, and what is updated in their order."""
    gradient = update.gradient
    op, row = graph.ops[producers[gradient]], values.get(gradient)
    numbers = op.params["dimension_numbers"]
    tables, places = numbers.operand_batching_dims, numbers.scatter_dims_to_operand_dims
    if not tables:  # which table is one of the indices
        tables, places = places[:-1], places[-1:]
    if row is None or not updated or not (tables and places):
        return
    tensor = graph.values[gradient]
    sizes = local_sizes(tensor.shape, row[None], axes)[0]
    if sizes[list(tables)].max() > 1 and not lies_in_rows(tensor, row, axes, update.tiling):
        size = local_bytes(tensor, row, axes, "tpu", frozenset((tables[-1], places[0])))
        at, waste = when[producers[updated[0][1]]], size / max(local(gradient, row), 1)
        buffers = len(updated) if waste > _PADDED else 2 * len(updated) - 1
        yield TableCopy(gradient, at, at + 1, size * (buffers if waste > 1 else 1))


def tiled_in_rows(graph: Graph, lookups: Lookups) -> dict[int, Tiling]:
    """The values that gathers and scatters of whole rows read and make, but for the step's arguments and results, and
    what is made of these in rows."""
    found: dict[int, Tiling] = {}
    ends, kept = {*graph.inputs, *graph.outputs, *_sums(graph, lookups)}, stays_in_rows(graph)
    for moved in lookups.values():
        for value, tiling in moved:
            before = found.get(value)
            if value in ends or (before is not None and not isinstance(tiling, RowsOf)):
                continue
            if isinstance(tiling, RowsOf):
                tables, listed = (before.tables, before.listed) if isinstance(before, RowsOf) else ((), False)
                listed = listed or tiling.listed
                tiling = RowsOf((*tables, *tiling.tables), listed, not listed and value not in kept)
            found[value] = tiling
    for op, value in _made_in_rows(graph, kept):
        if value not in ends and isinstance(of := found.get(op.operands[0]), RowsOf) and not of.brief:
            found[value] = of
    return found


def _sums(graph: Graph, lookups: Lookups) -> Iterator[int]:
    """Rows that are added up in a table which is no gradient of an argument and that nothing is gathered from: they are
    copied out of rows at once (graph networks' nodes; GraphSAGE on v6e and graph convolutions on v5e)."""
    tables, uses = {graph.values[v].shape for v in settled_values(graph)}, graph.uses()
    for op in graph.lookups():
        if op.primitive != "gather" and any(isinstance(tiling, RowsOf) for _, tiling in lookups[op.index]):
            looked_up = any(reader in lookups for reader, _ in uses[op.results[0]])
            if graph.values[op.results[0]].shape not in tables and not looked_up:
                yield op.results[0]


def _made_in_rows(graph: Graph, kept: Collection[int]) -> Iterator[tuple[Op, int]]:
    """What is elementwise made of rows and stays in rows, with what makes it."""
    producers = graph.producers()
    for value in sorted(kept):
        op = graph.ops[producers[value]]
        if op.primitive in ELEMENTWISE and op.operands[0] in kept:
            yield op, value


def tiled_as_read(
    graph: Graph,
    axes: MeshAxes,
    lookups: Lookups,
    rows: Mapping[int, Tiling],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> dict[int, Tiling]:
    """`tiled_in_rows` where it is decided in which layouts the tables are read, of all rows."""
    found: dict[int, Tiling] = {}
    for op in graph.lookups() if rows else ():
        for value, tiling in lookups[op.index]:
            row = reads.get((op.index, 0))
            if isinstance(tiling, RowsOf) and isinstance(of := rows.get(value), RowsOf) and row is not None:
                table = table_tiling(lookups, op)
                kept = not of.brief and lies_in_rows(graph.values[op.operands[0]], row, axes, table)
                rank = len(graph.values[value].shape)
                otherwise: Tiling = frozenset((rank - 2, rank - 1)) if tiling.listed else "any"
                found[value] = "rows" if kept or found.get(value) == "rows" else otherwise
    for op, value in _made_in_rows(graph, [v for v, of in rows.items() if isinstance(of, RowsOf)]):
        if value not in found and op.operands[0] in found:
            found[value] = found[op.operands[0]]
    return found


def _brief_rows(
    graph: Graph,
    axes: MeshAxes,
    lookups: Lookups,
    rows: Mapping[int, Tiling],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    local: Callable[[int, np.ndarray], int],
    when: Sequence[int],
    needed: Sequence[int],
) -> Iterator[TableCopy]:
    """Rows that are in rows while they are gathered, and for products, and what is copied into rows to be added (see
    `row_layouts`)."""
    uses = graph.uses()
    for op in graph.lookups():
        for value, _ in lookups[op.index][:1]:
            row = values.get(value) if op.primitive == "gather" else reads.get((op.index, 2))
            of, table = rows.get(value), reads.get((op.index, 0))
            if row is None or table is None or not (isinstance(of, RowsOf) and of.brief):
                continue
            size = local_bytes(graph.values[value], row, axes, "tpu", "rows")
            looked_in = graph.values[op.operands[0]]
            if size > local(value, row) and lies_in_rows(looked_in, table, axes, table_tiling(lookups, op)):
                start, ends = when[op.index], dict[bool, list[int]]({True: [], False: []})
                for reader, _ in uses[value] if op.primitive == "gather" else ():
                    ends[graph.ops[reader].primitive == "dot_general"].append(needed[reader])
                instead = max([start + 1, *ends[False]]) if ends[True] else -1
                yield TableCopy(value, start, max([start + 1, *ends[True]]), size, brief=True, instead=instead)


def _returned_rows(
    graph: Graph,
    axes: MeshAxes,
    lookups: Lookups,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    local: Callable[[int, np.ndarray], int],
    when: Sequence[int],
) -> Iterator[TableCopy]:
    """Gathers that are returned: their rows are copied into results, which lie as results do."""
    returned = set(graph.outputs)
    for op in graph.lookups():
        if op.primitive != "gather" or op.results[0] not in returned or not lookups[op.index]:
            continue
        value, table = op.results[0], reads.get((op.index, 0))
        if value in values and table is not None and lies_in_rows(graph.values[op.operands[0]], table, axes):
            size = local_bytes(graph.values[value], values[value], axes, "tpu", "rows")
            if size > local(value, values[value]):
                yield TableCopy(value, when[op.index], when[op.index] + 1, size)


def _gathered(
    graph: Graph,
    lookups: Lookups,
    reads: Mapping[tuple[int, int], np.ndarray],
    rows: Mapping[int, Tiling],
    producers: Sequence[int],
) -> Iterator[tuple[int, int, np.ndarray]]:
    """(operation, argument, its layout there) of every gather from an argument, which lies as arguments do.

    An argument that is converted first is copied as it is: XLA converts what was gathered.
    """
    arguments = set(graph.inputs)
    for op in graph.lookups() if rows else ():
        if op.operands[:1] not in [(table,) for table, _ in lookups[op.index]] or (op.index, 0) not in reads:
            continue
        argument = op.operands[0]
        while argument >= 0 and producers[argument] >= 0:
            maker = graph.ops[producers[argument]]
            argument = maker.operands[0] if maker.primitive == "convert_element_type" else -1
        if argument in arguments:
            yield op.index, argument, reads[op.index, 0]


class ListCopy(NamedTuple):
    """Rows of several dimensions that are copied into one list of them, or out of it, in `size` bytes.

    Attributes:
      value: the rows; start, stop: when the list is there; given_up: what was copied is not needed from `stop` - 1 on.
      in_rows: what was copied has the elements of a row side by side, not the rows that are added up.
    """

    value: int
    start: int
    stop: int
    size: int
    given_up: bool
    in_rows: bool


def list_copies(
    graph: Graph,
    axes: MeshAxes,
    lookups: Lookups,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    when: Sequence[int],
    room: int,
) -> Iterator[ListCopy]:
    """The lists whose table does not lie in rows: they lie as it does, what is read of them in rows.

    Args:
      room: bytes of the vector memory; smaller lists are in there.
    """
    uses, producers = graph.uses(), graph.producers()
    for op in graph.lookups():
        for value, tiling in lookups[op.index][:1]:
            gathered = op.primitive == "gather"
            row, table = values.get(value) if gathered else reads.get((op.index, 2)), reads.get((op.index, 0))
            if not (isinstance(tiling, RowsOf) and tiling.listed) or row is None or table is None:
                continue
            if lies_in_rows(graph.values[op.operands[0]], table, axes, table_tiling(lookups, op)):
                continue
            tensor, dims = graph.values[value], frozenset(len(graph.values[value].shape) - d for d in (1, 2))
            size = local_bytes(tensor, row, axes, "gpu")
            if size < local_bytes(tensor, row, axes, "tpu", dims):
                start, alone = when[op.index] - (not gathered), not gathered and len(uses[value]) == 1
                rows, least = (
                    local_bytes(tensor, row, axes, "tpu", d) for d in (frozenset({min(dims) + 1}), dims)
                )
                whole = size * (size > room)
                yield ListCopy(value, max(start, 0), when[op.index] + 1, whole, alone, rows == least)
                maker = graph.ops[producers[value]]
                spread = reads.get((maker.index, 0)) if alone and maker.primitive == "broadcast_in_dim" else None
                if spread is not None and rows == least:  # what is spread over rows is brought into such before
                    one, first = graph.values[maker.operands[0]], max(when[maker.index] - 1, 0)
                    size = local_bytes(one, spread, axes, "tpu", frozenset({len(one.shape) - 1}))
                    yield ListCopy(
                        maker.operands[0], first, when[maker.index] + 1, size * (size > room), False, True
                    )
