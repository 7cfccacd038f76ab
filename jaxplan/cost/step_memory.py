"""Memory of one device for a whole step on a machine: what the live sets need to know, gathered in one place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from ..hardware import xla_times
from ..ir import Graph, lives_of
from ..sharding import UNREDUCED, MeshAxes
from .added_scores import kept_products
from .apart import apart_scratch, kept_for_parts, turned_copies
from .beside_gathers import late_lookups
from .bodies import Body
from .caches_on_gpu import turned_for_products
from .converted_weights import Converted, converted_weights
from .copied_back import BackAndForth, back_and_forth
from .crossing import Traffic
from .cut_products import kept_whole
from .decompositions import decomposition_scratch
from .deferred import Deferred, deferred
from .dilated import transposed_for_kernels
from .estimates import KernelTimes, kernel_times
from .few_images import few_images
from .fills import earlier
from .first_layers import turned_round
from .grouped_concats import written_in_groups
from .grouped_convolutions import copied_for_groups
from .heads import normed_twice
from .held_back import (
    PRODUCTS,
    behind_loops,
    combined_sums,
    held_back,
    put_off,
)
from .indices import prepared_indices, validity_masks
from .invariants import Invariant
from .kept_erfcs import kept_drops, kept_erfcs
from .kept_scores import kept_scores
from .kept_tanhs import kept_tanhs
from .latency_hiding import Ending, ending_of
from .memory import MemoryProfile, simulate_memory
from .merged_products import kept_slices
from .model import CostModel
from .moved_pixels import moved_pixels
from .padded_images import padded_images
from .pooling import places_of_poolings
from .product_slices import slice_scratch
from .product_times import moving_times
from .reversed_gradients import reversed_gradients
from .rings import ring_operands
from .row_sums import written_in_rows
from .scores_twice import kept_as_made, twice_in_memory
from .shared_operands import written_operands
from .sorting import sorting_scratch
from .split_k import split_scratch, workspace_bytes
from .tables import ListCopy, list_copies
from .tied_tables import after_lookups
from .tiles import Tiling, local_bytes
from .transforms import transform_scratch
from .turned import turned_updates
from .turned_caches import turned_for_loops
from .turned_gradients import turned_gradients
from .unaligned import copied_in_lanes
from .vector_memory import vector_memory
from .wide_images import Wide, kept_as_f32, widening
from .without_triton import without_triton


def step_memory(
    graph: Graph,
    axes: MeshAxes,
    model: CostModel,
    crossing: Traffic,
    kinds: Sequence[str],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    waited: Mapping[int, tuple[int, float]],
    outputs: Mapping[int, np.ndarray] | None = None,
    seconds: Mapping[int, float] | None = None,
) -> MemoryProfile:
    """`simulate_memory` of a step as the model's machine runs it; what it may run later, as much as there is room for.

    Args:
      axes: of the mesh that the layout rows are over; the model's may be coarser.
      seconds: of every operation, all its runs; None leaves nothing on the chip, and gradients of blocks that are
        computed again where they stand.
      crossing: see `traffic`; kinds, values, reads, waited, outputs: see `simulate_memory`.
    """
    late, lasting = Deferred(), None
    if model.profile.kind == "tpu":
        crossing = crossing if model.profile.late_stacks else crossing.stacked_as_made
        late = deferred(graph, axes, model, crossing.stored, values, reads, outputs, seconds)
        if seconds is not None:
            lasting = kernel_times(graph, axes, crossing, model.profile, values, reads, seconds)

    @cache
    def running(count: int) -> MemoryProfile:
        return _running(
            graph, axes, model, crossing, kinds, values, reads, waited, outputs, seconds, late.first(count), lasting
        )  # fmt: skip

    most, room = late.most, model.profile.usable_bytes
    if running(most).peak_bytes <= room or not most:
        return running(most)
    if running(0).peak_bytes > room:  # as most plans that don't fit
        return running(0)
    return running(_largest(lambda count: running(count).peak_bytes, most, room))


def _largest(peak_bytes: Callable[[int], int], most: int, room: float) -> int:
    """The largest count for which there is room, as there is for 0 and not for `most`; bytes grow with it.

    It is sought in turns where the bytes would be the room if they grew evenly, and in the middle.
    """
    fits, more = 0, most
    evenly = True
    while more - fits > 1:
        middle = (fits + more) // 2
        if evenly:
            least, largest = peak_bytes(fits), peak_bytes(more)
            middle = fits + int((room - least) / (largest - least) * (more - fits))
            middle = min(max(middle, fits + 1), more - 1)
        if peak_bytes(middle) <= room:
            fits = middle
        else:
            more = middle
        evenly = not evenly
    return fits


def _running(
    graph: Graph,
    axes: MeshAxes,
    model: CostModel,
    crossing: Traffic,
    kinds: Sequence[str],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    waited: Mapping[int, tuple[int, float]],
    outputs: Mapping[int, np.ndarray] | None,
    seconds: Mapping[int, float] | None,
    deferring: Deferred,
    lasting: KernelTimes | None,
) -> MemoryProfile:
    """`step_memory` with `deferring` run late; lasting: of `crossing` as it is, see `kernel_times`."""
    times, stored = crossing.times, crossing.stored
    ending: Ending | None = None
    tied: Sequence[int] = ()
    if (scheduled_by := xla_times(model.profile)) is not None:
        last = behind_loops(graph)
        if seconds is not None:
            moving = moving_times(last, axes, model, crossing, values, reads)
            ending = ending_of(graph, axes, last, stored, values, reads, moving, scheduled_by, times)
            times = tuple(ending.times.get(index, at) for index, at in enumerate(times))
        else:
            times = held_back(graph, axes, stored, times, values, reads, outputs)
    lists: Sequence[ListCopy] = ()
    if model.profile.kind == "tpu":
        before, times = times, after_lookups(graph, crossing.tied, times, values, reads)
        tied = [one.product for one in crossing.tied if times[one.product] != before[one.product]]
        lists = [*list_copies(graph, axes, crossing.lookups, values, reads, times, model.profile.on_chip_bytes or 0)]
        scattered = {one.value: one.stop - 1 for one in lists if one.size and one.given_up and one.in_rows}
        if model.profile.sparse_core_copies and scattered:
            times = put_off(graph, times, scattered, max(scattered.values()))
        times = deferring.times(graph, times)
    few = few_images(graph, axes, crossing.images, reads)
    pieces = crossing.pieces if few else ()
    moved, wide = None, list[Wide]()
    whole: dict[int, Tiling] = {}
    if few:
        wide = [*kept_as_f32(graph, pieces, crossing.beside_windows, stored)]
        least = crossing.images.keys() - pieces - crossing.beside_windows
        whole = dict.fromkeys([*least, *(one.value for one in wide if not one.windowed)], "any")
        moved = moved_pixels(graph, axes, crossing.images, stored, times, reads, values, crossing.spread, pieces)
    lives = crossing.lives if times is crossing.times else None
    if moved:
        times, reads = moved.times, moved.reads
        lives = lives_of(graph, moved.stored, times)
    all_cublas = without_triton(graph, axes, reads, model.profile)
    scratch = {} if all_cublas else split_scratch(graph, axes, reads, model.profile)
    scratch |= sorting_scratch(graph, axes, reads, model.profile.kind)
    scratch |= decomposition_scratch(graph, axes, reads, model.profile.kind)
    scratch |= transform_scratch(graph, axes, reads, model.profile)
    scratch |= {index: _peak_inside(body, model) for index, body in crossing.bodies.items()}
    turned = [t for t in turned_copies(graph, crossing.turned_results, stored, times) if t.result in values]
    beside_products = [apart_scratch(graph, axes, crossing, times, reads, turned)]
    if model.profile.kind == "gpu":
        beside_products.append(slice_scratch(graph, axes, stored, crossing.producers, values, reads))
    for op, size in (item for sizes in beside_products for item in sizes.items()):
        scratch[op] = scratch.get(op, 0) + size
    beside = [*(moved.copies if moved else ()), *_handed_over(graph, axes, crossing.invariants, values)]
    found_at = ending.found if ending else {}
    beside += places_of_poolings(graph, axes, times, reads, model.profile, found_at)
    beside += turned_updates(graph, axes, crossing.updates, times, values, reads)
    late: dict[int, int] = {}
    halved: Collection[int] = ()
    given_up = {one.value: one.stop - 1 for one in lists if one.given_up}
    vector = None
    settled: Sequence[BackAndForth] = ()
    converted: list[Converted] = []
    if model.profile.kind == "gpu":
        needed = (lives := lives or lives_of(graph, stored, times)).needed
        beside += padded_images(graph, axes, times, needed, reads)
        beside += kept_tanhs(graph, axes, crossing.tanhs, times, needed, values, reads)
        beside += validity_masks(graph, axes, crossing.indices, times, reads)
        beside += turned_for_products(graph, axes, crossing.read_caches, times, values)
        beside += turned_gradients(graph, axes, stored, times, values)
        beside += transposed_for_kernels(graph, axes, times, reads)
        beside += kept_for_parts(graph, axes, crossing, times, reads, model.profile)
        beside += kept_whole(graph, axes, crossing, lives, values, reads, all_cublas)
        if not all_cublas:
            beside += kept_slices(graph, axes, crossing.merged, lives, values, reads)
        else:
            products = {times[op.index] for op in graph.ops if op.primitive == "dot_general"}  # one after the other
            beside += [(at, at + 1, workspace_bytes(model.profile)) for at in products]
        given_up = {one.result: one.start + 1 for one in turned}
        for one in turned:
            layout, both = values[one.result], (graph.values[one.result], graph.values[one.turned])
            own, written = (local_bytes(tensor, layout, axes, "gpu") for tensor in both)
            beside += [(one.start, one.stop, written), (one.until, one.until + 1, own)]
        in_rows, late = written_in_rows(graph, axes, crossing.row_sums, times, needed, reads, values)
        beside += in_rows
        if ending is not None:
            beside += _awaiting(graph, axes, ending, times, values, reads)
        elif sum(times[op.index] != crossing.times[op.index] for op in graph.ops if op.primitive in PRODUCTS) <= 1:
            beside += combined_sums(graph, axes, crossing.times, values, reads)
    if model.profile.kind == "tpu":
        beside += ring_operands(graph, axes, stored, crossing.producers, times, values, reads)
        lives = lives or lives_of(graph, stored, times)
        for value, start, stop in kept_products(crossing.scores, lives.intervals):
            if (row := values.get(value)) is not None:
                beside.append((start, stop, local_bytes(graph.values[value], row, axes, "tpu")))
        written_out = model.profile.masked_tokens or 0
        scores, late = twice_in_memory(graph, axes, crossing.twice, times, reads, crossing.rows, written_out)
        halved = kept_as_made(graph, axes, crossing.twice, reads)
        beside += scores
        if model.profile.keeps_erfcs:
            beside += kept_erfcs(graph, axes, stored, times, lives, values)
        if model.profile.keeps_scores:
            beside += kept_scores(graph, axes, stored, times, lives, values, crossing.rows)
        if model.profile.turns_first_layers:
            beside += turned_round(graph, axes, crossing.firsts, model.profile.on_chip_bytes or 0, times, values)
        beside += prepared_indices(graph, axes, crossing.indices, times, reads)
        beside += written_operands(graph, axes, crossing.shared, model.profile, times, lives.needed, values, reads)
        beside += [(one.start, one.stop, one.size) for one in lists]
        beside += copied_for_groups(graph, axes, crossing.grouped_convolutions, times, values, reads)
        beside += copied_in_lanes(graph, axes, crossing.unaligned, times, values)
        if few:
            beside += widening(graph, axes, crossing.images, wide, lives.intervals, values)
        beside += normed_twice(graph, axes, crossing.halves, lives, values)
        beside += reversed_gradients(graph, axes, crossing.enlarging, times, reads, crossing.images)
        converted = [*converted_weights(graph, axes, stored, times, values, reads)]
        if model.profile.keeps_drops:
            converted += kept_drops(graph, axes, stored, times, reads)
        converted += turned_for_loops(graph, axes, crossing.caches, times, values)
        converted += written_in_groups(graph, axes, crossing.grouped, times, lives.needed, values)
        if seconds is not None:
            if moved or lasting is None:
                lasting = kernel_times(graph, axes, crossing, model.profile, values, reads, seconds)
            spread_out = crossing.images if few else ()
            vector = vector_memory(
                graph, times, lives.needed, lasting.at(times), model.profile, crossing.kernels, stored, spread_out
            )
        room = 0 if vector is not None else model.profile.on_chip_bytes or 0
        settled = [*back_and_forth(graph, axes, room, times, lives.needed, values)]
    looked_up = {}
    if deferring.gathers:
        looked_up = late_lookups(graph, model, deferring.gathers, tied, values, reads, outputs)
    read_wide = [(wide.gather, times[wide.made], times[wide.until]) for wide in crossing.wide]
    for gather in looked_up.keys() - {wide.gather for wide in crossing.wide}:
        value = graph.ops[gather].operands[0]
        if (maker := crossing.producers[value]) >= 0 and lives is not None:
            read_wide.append((gather, lives.intervals[value].stop if stored[value] else times[maker], 0))
    for gather, start, until in read_wide:
        if (row := reads.get((gather, 0))) is not None:
            tensor = graph.values[graph.ops[gather].operands[0]]
            size = local_bytes(tensor, row, axes, model.profile.kind)
            end = max(until, looked_up.get(gather, 0)) + 1
            converted.append(Converted(start, end, size, graph.ops[gather].operands[0]))
    found = simulate_memory(
        graph, axes, stored, kinds, values, reads,
        inside=crossing.inside, second_stacks=crossing.second_stacks,
        fills=earlier(crossing.fills, crossing.producers, found_at), times=times,
        op_scratch=scratch,
        images=crossing.images, lookups=crossing.lookups, rows={**whole, **crossing.rows}, over=crossing.over,
        waited=waited, outputs=outputs,
        copied_images=crossing.copied_images, tables=crossing.tables, spread=crossing.spread, squares=crossing.squares,
        platform=model.profile.kind, whole_sums=model.whole_sums,
        vector=vector, lives=lives, converted=converted,
        beside=beside, back_and_forth=settled, late=late, halved=halved, listed=given_up, sums_at=deferring.sums_at,
        result_tables=model.profile.result_tables or 0.0,
    )  # fmt: skip
    return replace(found, times=tuple(times) if ending else ())


def _awaiting(
    graph: Graph, axes: MeshAxes, ending: Ending, times: Sequence[int],
    values: Mapping[int, np.ndarray], reads: Mapping[tuple[int, int], np.ndarray],
) -> Iterator[tuple[int, int, int]]:  # fmt: skip
    """(start, stop, bytes) of gradients whose sum over devices starts later, and of what is written for late sums."""
    for index, at in sorted(ending.late.items()):
        if (row := reads.get((index, 0))) is not None:
            summed = graph.values[graph.ops[index].operands[0]]
            yield times[index], at + 1, local_bytes(summed, row, axes, "gpu")
    for index, until in ending.until.items():
        made = max(times[index], ending.late.get(index, 0)) + 1
        for value in graph.ops[index].results:
            if made < until and (row := values.get(value)) is not None:
                yield made, until, local_bytes(graph.values[value], row, axes, "gpu")


def _handed_over(
    graph: Graph, axes: MeshAxes, invariants: Sequence[Invariant], values: Mapping[int, np.ndarray]
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of what loops are handed that is made of nothing."""
    for one in invariants:
        if (row := values.get(one.like)) is not None and UNREDUCED not in row.tolist():
            yield one.start, one.stop, local_bytes(graph.values[one.value], row, axes, "gpu")


def _peak_inside(body: Body, model: CostModel) -> int:
    """The most that a `shard_map`'s body has in memory besides its operands and results, which count outside."""
    values, reads = body.rows
    kinds = ["operand"] * len(body.graph.inputs)
    found = step_memory(body.graph, (), replace(model, axes=(), links=()), body.crossing, kinds, values, reads, {})
    ends = sum(body.graph.values[v].bytes for v in {*body.graph.inputs, *body.graph.outputs})
    return max(found.peak_bytes - int(ends), 0)
