"""What of a step crosses memory, as `fusion.traffic` finds it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..ir import Graph, Lives, Op, lives_of
from ..sharding import Rule, graph_rules
from .added_scores import AddedScores
from .apart import TurnedResult
from .bodies import Body
from .caches_on_gpu import ReadCache, read_caches
from .conversions import Conversion
from .few_images import Spread, grouped
from .fills import Fill
from .first_layers import first_layers
from .gathered_orders import GatheredOrder, gathered_orders
from .grouped_concats import Grouped, grouped_concats
from .grouped_convolutions import grouped_convolutions
from .heads import Halves, halves_in_lanes
from .images import Lanes
from .indices import Prepared, prepared
from .invariants import Invariant
from .kept_tanhs import BiasedTanh
from .lookups import Lookups
from .merged_products import Merging
from .on_chip import Resident
from .pieces import beside_windows, in_pieces
from .product_windows import Windowed
from .residency import SecondStack
from .reversed_gradients import of_enlarging_kernels
from .row_sums import RowSum
from .scores_twice import Twice
from .selections import WideCopy
from .shared_operands import SharedOperand
from .squares import Squares
from .tables import RowUpdate
from .tied_tables import Tied, tied_tables
from .tiles import Tiling
from .turned import Update
from .turned_caches import TurnedCache, turned_caches
from .unaligned import copying
from .vector_kernels import VectorKernel


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Memory traffic of the unpartitioned step, one run of each operation.

    Attributes:
      stored: for every value whether it exists in memory between the kernels that make it and read it.
      inside: for every value whether it exists in the kernel of a contraction alone, not to be computed elsewhere.
      reads: for every operation, for each operand the bytes that it reads because of it.
      writes: for every operation, for each result the bytes that it writes.
      second_stacks: loops' stacks that are in memory twice.
      fills: buffers that one kernel fills, see there; invariants: GPU: see `loop_invariants`.
      over: for values those whose buffers they may take, see `overwritable`.
      images: TPU: values in the layout of convolutions, see `image_lanes`.
      lookups: TPU: see there; rows: TPU: see `sliced`, `written`, `tiled_in_rows`; copied_images: see `copied_reads`;
        tables: see `row_updates`;
        spread: see `spread_reads`; squares: TPU: see `shared_squares`; apart: GPU: see `made_apart` and `reordered`;
        reordered: GPU: the latter's value by (product, place), where a kernel more copies it; turned_results: GPU;
        wide: TPU: see `wide_copies`; scores, twice: TPU: see `added_scores`, `scores_twice`; shared: TPU: see
        `shared_operands`; updates, row_sums, merged: GPU; windows, conversions: TPU.
      kernels: TPU: for every operation the kernel of the vector unit that it is part of; else None throughout.
      starts: GPU: see `kernel_starts`; sums: TPU: see `products_with_sums`; parted: GPU: see `parted_rows`;
      tanhs: GPU: see `kept_tanhs`; stacked: TPU: see `stacked_at_once`.
      producers: for every value the operation that makes it, or -1.
      times: when each operation runs, as the index of one.  TPU: what is fused runs as soon as its last operand is
        there, however late it is written (a weight's gradient with the optimizer); GPU: products in loops run late.
      bodies: by operation, what runs inside the `shard_map`s that the user wrote; resident: TPU: see `residents`.
    """

    stored: tuple[bool, ...]
    inside: tuple[bool, ...]
    reads: tuple[tuple[float, ...], ...]
    writes: tuple[tuple[float, ...], ...]
    second_stacks: tuple[SecondStack, ...]
    fills: tuple[Fill, ...]
    invariants: tuple[Invariant, ...]
    over: Mapping[int, tuple[int, ...]]
    images: Mapping[int, Lanes]
    lookups: Lookups
    rows: Mapping[int, Tiling]
    copied_images: tuple[tuple[int, int], ...]
    tables: tuple[RowUpdate, ...]
    spread: tuple[Spread, ...]
    squares: tuple[Squares, ...]
    wide: tuple[WideCopy, ...]
    scores: tuple[AddedScores, ...]
    twice: tuple[Twice, ...]
    shared: tuple[SharedOperand, ...]
    row_sums: tuple[RowSum, ...]
    apart: Mapping[int, tuple[tuple[int, int], ...]]
    updates: tuple[Update, ...]
    windows: Mapping[int, Windowed]
    conversions: Mapping[tuple[int, int], Conversion]
    reordered: Mapping[tuple[int, int], int]
    turned_results: Mapping[int, TurnedResult]
    merged: tuple[Merging, ...]
    kernels: tuple[VectorKernel | None, ...]
    starts: tuple[float, ...]
    sums: frozenset[int]
    tanhs: tuple[BiasedTanh, ...]
    stacked: Mapping[int, int]
    parted: frozenset[int]
    producers: tuple[int, ...]
    times: tuple[int, ...]
    bodies: Mapping[int, Body] = field(default_factory=dict, repr=False)
    resident: Mapping[tuple[int, int], Resident] = field(default_factory=dict, repr=False)
    graph: Graph = field(repr=False, compare=False)

    @functools.cached_property
    def lives(self) -> Lives:
        """See `lives_of`."""
        return lives_of(self.graph, self.stored, self.times)

    @functools.cached_property
    def pieces(self) -> frozenset[int]:
        """TPU: see `in_pieces`."""
        return in_pieces(self.graph, self._rules, self.images, grouped(self.graph, self.images))

    @functools.cached_property
    def beside_windows(self) -> frozenset[int]:
        """TPU: see there."""
        return beside_windows(self.graph, self._rules, self.images, self.pieces)

    @functools.cached_property
    def _rules(self) -> Sequence[Rule]:
        return graph_rules(self.graph)

    @functools.cached_property
    def gathers(self) -> Mapping[tuple[int, int], GatheredOrder]:
        """GPU: see `gathered_orders`."""
        return dict(gathered_orders(self.graph, self.producers)) if self.starts else {}

    @functools.cached_property
    def grouped(self) -> tuple[Grouped, ...]:
        """See `grouped_concats`."""
        return tuple(grouped_concats(self.graph))

    @functools.cached_property
    def indices(self) -> tuple[Prepared, ...]:
        """See `indices.prepared`."""
        return tuple(prepared(self.graph, self.producers))

    @functools.cached_property
    def firsts(self) -> tuple[tuple[int, ...], ...]:
        """See `first_layers`."""
        return tuple(first_layers(self.graph, self.producers))

    @functools.cached_property
    def stacked_as_made(self) -> Traffic:
        """The same, with what loops stack written as soon as it is there; see `stacked_at_once`."""
        times = tuple(self.times[self.stacked.get(op, op)] for op in range(len(self.times)))
        return replace(self, times=times) if self.stacked else self

    @functools.cached_property
    def tied(self) -> tuple[Tied, ...]:
        """See `tied_tables`."""
        return tuple(tied_tables(self.graph))

    @functools.cached_property
    def caches(self) -> tuple[TurnedCache, ...]:
        """See `turned_caches`."""
        return tuple(turned_caches(self.graph))

    @functools.cached_property
    def read_caches(self) -> tuple[ReadCache, ...]:
        """See `caches_on_gpu`."""
        return tuple(read_caches(self.graph))

    @functools.cached_property
    def unaligned(self) -> tuple[int, ...]:
        """See `unaligned.copying`."""
        return tuple(copying(self.graph))

    @functools.cached_property
    def grouped_convolutions(self) -> tuple[Op, ...]:
        """See `grouped_convolutions`."""
        return tuple(grouped_convolutions(self.graph))

    @functools.cached_property
    def halves(self) -> tuple[Halves, ...]:
        """See `halves_in_lanes`."""
        return tuple(halves_in_lanes(self.graph, self.producers))

    @functools.cached_property
    def enlarging(self) -> tuple[Op, ...]:
        """See `of_enlarging_kernels`."""
        return tuple(of_enlarging_kernels(self.graph))

    def kept(self, op: Op) -> tuple[Resident | None, ...]:
        """What of an operation's operands and results may stay on the chip; () where nothing of the program may."""
        places = range(len(op.operands) + len(op.results)) if self.resident else ()
        return tuple([self.resident.get((op.index, place)) for place in places])

    def tiling(self, value: int) -> Tiling:
        """Which dimensions of a value lie in tiles, see `device_bytes`."""
        return self.rows[value] if value in self.rows else self.images.get(value, "any")
