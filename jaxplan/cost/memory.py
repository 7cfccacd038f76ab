"""Memory of one device over the step: what is alive at every operation, at the layouts that were decided.

A tensor takes its padded tiles, see `tiles`.

Counted: arguments (to the end when the caller keeps them or gets their next value back in the same buffer),
captured constants, every materialised value from where it is made to its last use, residuals stacked by loops for
their whole loop, and resharded copies from their first to their last reader, or to the end where a TPU copies what
it gathered for the next step once more. Not counted: values inside one fused kernel.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence

import numpy as np

from ..ir import Graph, Interval, Lives, Value, lives_of, past_loops, settled_values, written_over
from ..sharding import NONE, UNREDUCED, MeshAxes, reshard_steps
from .converted_weights import Converted
from .copied_back import BackAndForth
from .few_images import Spread, spread_copies, widened
from .fills import Fill, filled_since
from .held_back import PRODUCTS, awaited_sums
from .images import lanes_read
from .indices import same_indices
from .ledger import TABLE_BYTES, Ledger, MemoryProfile
from .lookups import Lookups, lookups_of
from .residency import SecondStack
from .selections import is_selection
from .squares import Squares, whole_squares
from .tables import RowUpdate, table_copies, tiled_as_read, tiled_in_rows
from .tiles import Tiling, gathered_bytes, local_bytes
from .vector_memory import VectorMemory

_LOOP_BUFFERS = ("carry_init", "scan_stack")
"""What makes values that are there as long as their loop, sums that are pending too: of accumulated gradients."""


_Copy = tuple[int, bytes, tuple[int, int], tuple[int, ...]]
"""The value that is copied, into which layout, in which loop and behind which barriers."""


def simulate_memory(
    graph: Graph,
    axes: MeshAxes,
    stored: Sequence[bool],
    kinds: Sequence[str],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    *,
    inside: Sequence[bool] | None = None,
    second_stacks: Sequence[SecondStack] = (),
    fills: Sequence[Fill] = (),
    op_scratch: Mapping[int, int] | None = None,
    waited: Mapping[int, tuple[int, float]] | None = None,
    times: Sequence[int] | None = None,
    platform: str = "cpu",
    whole_sums: bool = False,
    images: Mapping[int, tuple[int, int]] | None = None,
    lookups: Lookups | None = None,
    rows: Mapping[int, Tiling] | None = None,
    over: Mapping[int, tuple[int, ...]] | None = None,
    lives: Lives | None = None,
    outputs: Mapping[int, np.ndarray] | None = None,
    copied_images: Sequence[tuple[int, int]] = (),
    tables: Sequence[RowUpdate] = (),
    spread: Sequence[Spread] = (),
    squares: Sequence[Squares] = (),
    beside: Sequence[tuple[int, int, int]] = (),
    back_and_forth: Sequence[BackAndForth] = (),
    converted: Sequence[Converted] = (),
    listed: Mapping[int, int] | None = None,
    late: Mapping[int, int] | None = None,
    halved: Collection[int] = (),
    vector: VectorMemory | None = None,
    result_tables: float = 1.0,
    sums_at: Mapping[int, int] | None = None,
) -> MemoryProfile:
    """The live sets of `graph`.

    Args:
      stored: for every value whether it is materialised; inside: whether only where it is read in another layout;
        second_stacks: loops' stacks that are there twice; fills: what is filled together; times: when each operation
        runs; see `Traffic`.
      op_scratch: bytes that operations need beside their results while they run, see `split_k` and `pooling`.
      beside: (start, stop, bytes) of what else is copied; back_and_forth, converted: see there; listed: values whose
        copies are read: from when on; late: values that are made when they are read alone: since when; halved: f32
        values in whose place bf16 ones are kept.
      result_tables: see `Profile`, TPU only; sums_at: see `beside_gathers`.
      waited: values that wait behind a loop: until when, and the share of their bytes that they wait in.
      platform: "tpu", "gpu" or "cpu", see `device_bytes`; whole_sums: see `CostModel.whole_sums`;
        images, over, copied_images, tables, spread, squares: see `Traffic`.
      lives: `lives_of(graph, stored, times)`, lookups: `lookups_of(graph)`, and rows: `tiled_in_rows(graph, lookups)`,
        where they are known.
      kinds: for every input position its kind ("parameter", "optimizer", ...).
      values, reads: the layout row of every value where it is made, and of every operand as it is read; values
        without a row are made where they are used and take no memory, unless they are results: outputs has their
        rows, by position.
    """
    ledger = Ledger(max(len(graph.ops), 1), vector)
    when = range(len(graph.ops)) if times is None else times
    needed, intervals = lives or lives_of(graph, stored, times)
    whole = len(graph.ops)
    aliased = {graph.inputs[i] for i, _ in graph.aliases}
    settled = settled_values(graph)
    inputs = {value: position for position, value in enumerate(graph.inputs)}

    known: dict[tuple[object, ...], int] = {}
    if lookups is None:
        lookups = lookups_of(graph) if platform == "tpu" else {}
    if rows is None:
        rows = tiled_in_rows(graph, lookups) if platform == "tpu" else {}
    tilings: dict[int, Tiling] = {**(images or {}), **rows, **tiled_as_read(graph, axes, lookups, rows, reads)}

    def local(value: int, row: np.ndarray, as_read: Value | None = None) -> int:
        tensor, tiling = as_read or graph.values[value], tilings.get(value, "any")
        tensor = tensor.narrow() if value in halved else tensor
        key = (tensor.shape, tensor.item_bytes, tensor.narrowed, tensor.host, row.tobytes(), tiling)
        if key not in known:
            size = local_bytes(tensor, row, axes, platform, tiling)
            known[key] = math.ceil(size * widened(tensor, row, axes, tiling))
        return known[key]

    copied: dict[tuple[object, ...], int] = {}

    def settled_copy(value: int, row: np.ndarray, kept: np.ndarray) -> int:
        tensor = graph.values[value]
        key = (tensor.shape, tensor.item_bytes, tensor.host, row.tobytes(), kept.tobytes())
        if key not in copied:
            copied[key] = int(gathered_bytes(tensor, row[None], kept[None], axes, platform)[0, 0])
        return copied[key]

    for value, position in inputs.items():
        stop = whole if value in aliased or position not in graph.donated else intervals[value].stop
        ledger.add(kinds[position], 0, stop, local(value, values[value]), given=True, value=value)
    for value in graph.constants:
        ledger.add("constants", 0, whole, int(graph.values[value].bytes), given=True)
    argument = {o: i for i, o in graph.aliases}
    for position, value in enumerate(graph.outputs):
        came = argument.get(position)
        if (value not in values or value in inputs) and came not in graph.donated:  # what is handed through is copied
            row = (outputs or {}).get(position) if came is None else values[graph.inputs[came]]
            if row is not None:
                ledger.add("results", 0, whole, local(value, row), given=True)

    for stack in second_stacks:
        if stack.value in values and not _resharded(graph, axes, values, reads, stack.sliced):
            ledger.add(
                "copies",
                stack.start,
                stack.stop,
                math.ceil(stack.trips * local(stack.value, values[stack.value])),
            )
    # a decision's rows are few arrays
    distinct = {id(row): row for row in values.values()}
    pending_rows = {known for known, row in distinct.items() if UNREDUCED in row.tolist()}
    placed = set[int]()  # sums that are finished in the caller's buffer; on GPU they are copied there
    for position, value in enumerate(graph.outputs):
        row = (outputs or {}).get(position)
        if row is not None and id(values.get(value)) in pending_rows and argument.get(position) not in graph.donated:
            ledger.add("results", 0, whole, local(value, row), given=True)
            if platform == "tpu":
                placed.add(value)
    if platform == "tpu" and vector is None:
        ledger.add("tables", 0, whole, int(result_tables * sum(stored)) * TABLE_BYTES, given=True)
    for op, size in (op_scratch or {}).items():
        ledger.add("scratch", when[op], when[op] + 1, size)

    def summed(value: int) -> int:
        return local(value, values[value]) if value in values and id(values[value]) in pending_rows else 0

    awaited = awaited_sums(graph, when, summed) if platform == "tpu" else {}
    late_sums = {value: at + 1 for value, at in (sums_at or {}).items() if summed(value)}
    awaited.update((value, max(awaited.get(value, 0), at)) for value, at in late_sums.items())
    alike = same_indices(graph) if platform == "tpu" else {}
    copies, own_reads = _copies(graph, axes, needed, values, reads, local, when, whole_sums, awaited, alike)
    for key, (start, stop, size) in copies.items():
        ledger.add("copies", start, stop, size, value=key[0])
    in_rows = [*table_copies(graph, axes, tables, lookups, rows, values, reads, local, when, needed)] if rows else []
    for table in in_rows:
        ledger.add("copies", table.start, table.stop, table.size, value=table.value if table.brief else None)
    for copy in _image_copies(graph, axes, copied_images, reads, when, needed):
        ledger.add("copies", *copy)
    for whole_image in spread_copies(graph, axes, spread, images or {}, values, when, needed):
        ledger.add("copies", *whole_image)
    for other in beside:
        ledger.add("copies", *other)
    for one in back_and_forth:
        if one.back is not None:
            ledger.add("copies", *one.back, value=one.value)
        if one.out is not None:
            ledger.copy_out(*one.out, one.value)
    for weights in converted:
        ledger.add("copies", weights.start, weights.stop, weights.size, value=weights.value)
    for value, stop in _taken_out(graph, inside or (False,) * len(graph.values), when, values, reads).items():
        ledger.add("activations", intervals[value].start, stop, local(value, values[value]))
    for value in whole_squares(squares, graph, values, reads):
        ledger.add("activations", intervals[value].start, intervals[value].start + 1, local(value, values[value]))
    for value, (stop, share) in (waited or {}).items():
        if value in values and not stored[value]:
            later = graph.ops[stop:]
            after = [reads[op.index, i] for op in later for i, v in enumerate(op.operands) if v == value]
            row = after[0] if after else values[value]
            ledger.add("activations", intervals[value].start, stop, math.ceil(share * local(value, row)))
    uses = graph.uses()

    def brought(value: int) -> bool:
        read = (reads[use] for use in uses[value] if use in reads)
        return id(values[value]) in pending_rows or any(not np.array_equal(row, values[value]) for row in read)

    since, beside = filled_since(fills, lambda v: _part(values[v]).tobytes() if v in values else None, brought)
    for value, first, last in beside:
        ledger.add("activations", first, last, local(value, _part(values[value])))
    producers = graph.producers()
    returned = set(graph.outputs)
    carried = {op.operands[0] for op in graph.ops if op.primitive == "carry_next"}
    products = sorted(when[op.index] for op in graph.ops if op.primitive in PRODUCTS)
    gathered = {op.results[0] for op in graph.lookups() if op.primitive == "gather"}
    given_up = {**_given_up(over or {}, gathered, intervals, values, local), **(listed or {})}
    given_up.update((table.value, table.instead) for table in in_rows if table.instead >= 0)
    for value, row in values.items():
        pending = id(row) in pending_rows
        if not (stored[value] or pending or value in since) or value in inputs or value in placed:
            continue
        start, stop = intervals[value]
        start = max(start, (late or {}).get(value, start))
        primitive = graph.ops[producers[value]].primitive
        if pending and primitive not in _LOOP_BUFFERS:
            if value in carried and not stored[value]:
                continue  # it is written into the carry
            # GPU: it is sent beside the next product, unless that waits for it
            sent_by = min(own_reads.get(value, ()), default=0) - 1
            following = bisect.bisect(products, start) if platform == "gpu" else len(products)
            stop = max(start + 1, awaited.get(value, 0))
            if following < len(products):
                stop = max(stop, min(products[following] + 1, sent_by))
        elif value in settled:
            kept = values[settled[value]]
            moved = not np.array_equal(row, kept)
            ledger.add("copies", start, whole, settled_copy(value, row, kept) if moved else 0)
            if local(value, row) == local(settled[value], row):  # else it lies in other tiles, and is copied at the end
                stop = start + 1 if moved else written_over(intervals, settled[value], start)
        elif value in returned:
            start = 0  # the caller's buffer, allocated before the step begins
        elif primitive not in _LOOP_BUFFERS:
            stop = min(stop, max([start + 1, *own_reads.get(value, ())]), given_up.get(value, stop))
        part = "residuals" if primitive == "scan_stack" else "results" if value in returned else "activations"
        began = min(start, since.get(value, start))
        ledger.add(part, began, stop, local(value, row), given=value in returned, value=value)
    return ledger.profile(platform)


def _resharded(
    graph: Graph,
    axes: MeshAxes,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    op: int,
) -> bool:
    """Whether what an operation reads first is brought into another layout for it; no for -1."""
    made = values.get(graph.ops[op].operands[0]) if op >= 0 else None
    return made is not None and (op, 0) in reads and bool(reshard_steps(made, reads[op, 0], 1.0, axes))


def _given_up(
    over: Mapping[int, tuple[int, ...]],
    gathered: Container[int],
    intervals: Sequence[Interval],
    values: Mapping[int, np.ndarray],
    local: Callable[..., int],
) -> dict[int, int]:
    """When values give their buffers to a result of the kernel that reads them last, in their layout.

    Args:
      gathered: what a kernel makes that nothing joins.
    """
    found: dict[int, int] = {}
    for value, candidates in over.items():
        start = intervals[value].start
        for other in candidates if value in values else ():
            began = intervals[other].start - (other in gathered)
            last = other not in found and began < start == intervals[other].stop - 1
            if last and other in values and np.array_equal(values[other], values[value]):
                if UNREDUCED not in values[value] and local(other, values[other]) == local(value, values[value]):
                    found[other] = start
                    break
    return found


def _image_copies(
    graph: Graph,
    axes: MeshAxes,
    copied: Sequence[tuple[int, int]],
    reads: Mapping[tuple[int, int], np.ndarray],
    when: Sequence[int],
    needed: Sequence[int],
) -> Iterable[tuple[int, int, int]]:
    """(first reader, after the last reader, bytes) of images in the layout of convolutions."""
    found: dict[tuple[int, bytes], tuple[int, int, int]] = {}
    for op, place in copied:
        value, row = graph.ops[op].operands[place], reads.get((op, place))
        if row is None:
            continue
        tensor = graph.taken(value, [(op, place)])
        least = local_bytes(tensor, row, axes, "tpu")
        size = local_bytes(tensor, row, axes, "tpu", lanes_read(graph.ops[op], place))
        if size > least:
            before = found.get((value, row.tobytes()), (when[op], needed[op], size))
            found[value, row.tobytes()] = min(before[0], when[op]), max(before[1], needed[op]), max(before[2], size)
    return found.values()


def _part(row: np.ndarray) -> np.ndarray:
    """The layout of each device's share of a sum that is pending, as of any tensor."""
    return np.maximum(row, NONE)


def _copies(
    graph: Graph,
    axes: MeshAxes,
    needed: Sequence[int],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    local: Callable[..., int],
    when: Sequence[int],
    whole_sums: bool,
    awaited: Mapping[int, int],
    alike: Mapping[int, int],
) -> tuple[dict[_Copy, tuple[int, int, int]], dict[int, list[int]]]:
    """Resharded copies, and until when the originals are read.

    The first maps copies to (first reader, after the last reader, bytes); the second values to
    the stops of those who read them as they are, and the starts of their copies.  `alike`: see `same_indices`.
    """
    around = graph.loops_around()
    copies: dict[_Copy, tuple[int, int, int]] = {}
    taken: dict[_Copy, list[tuple[int, int]]] = {}
    behind = graph.behind()
    own: dict[int, list[int]] = defaultdict(list)
    ops, producers = graph.ops, graph.producers()
    for (op, position), row in reads.items():
        value, start = ops[op].operands[position], when[op]
        made = values.get(value)
        if made is row or made is None or not reshard_steps(made, row, graph.values[value].bytes, axes):
            waits = ops[op].primitive == "ragged_dot_general" and when[op] > op  # see `chained_products`
            if not waits or made is None or np.array_equal(made, row):
                made_at = when[producers[value]] if producers[value] >= 0 else -1
                own[value].append(past_loops(needed[op], around[op], made_at))
                continue
            start = op  # the slice is cut before
        loop = around[op][-1] if around[op] else (0, len(graph.ops))
        stop = needed[op]
        if value in awaited and UNREDUCED in made:
            start = max(start, awaited[value] - 1)
            stop = max(stop, start + 1)
        if graph.ops[op].primitive == "scan_slice":
            # a whole stack is resharded before the first loop that goes along it, and stays until the last one ends
            start, stop = loop
            loop = around[op][-2] if len(around[op]) > 1 else (0, len(graph.ops))
        whole = whole_sums and all(
            a == UNREDUCED and b >= 0 for a, b, (_, n) in zip(made, row, axes, strict=True) if n > 1
        )
        key = (alike.get(value, value), row.tobytes(), loop, behind[op])
        taken.setdefault(key, []).append((op, position))
        tensor = graph.taken(value, taken[key])
        size = local(value, np.full_like(row, NONE) if whole else row, tensor)
        size *= 1 + (tensor.narrowed and UNREDUCED in made)  # what is exchanged for sums lies in its own type
        before = copies.get(key, (start, stop, size))
        copies[key] = (min(before[0], start), max(before[1], stop), max(before[2], size))
        own[value].append(copies[key][0] + 1)
    return copies, own


def _taken_out(
    graph: Graph,
    inside: Sequence[bool],
    when: Sequence[int],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> dict[int, int]:
    """Until when each value is in memory that a kernel makes for itself and another one reads in another layout.

    A kernel works on one layout: what it makes of a whole gradient can't be fused with what is made of its slice.  What
    is selected by index (see `selections`) is, for all that is read whole for it is indices.
    """
    stops: dict[int, int] = {}
    ops, producers = graph.ops, graph.producers()
    for (op, position), row in reads.items() if True in inside else ():
        value = ops[op].operands[position]
        made = values.get(value) if inside[value] and not is_selection(graph, ops[producers[value]]) else None
        if made is not None and made is not row and UNREDUCED not in made.tolist() and not np.array_equal(made, row):
            stops[value] = max(stops.get(value, 0), 1 + when[op])
    return stops
