"""The price of an operation under each of its strategies, and of a collective on each mesh axis.

Compute is a roofline at local shapes, so replicated work is never free.  Elementwise work is fused into its
neighbours: only what crosses a kernel's edge (`fusion.traffic`) is read and written.  Collectives are alpha-beta on
the link that their mesh axis runs on.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..hardware import AxisLink, Profile, sums_are_whole
from ..ir import LOOP_EDGES, Graph, Op, Value
from ..sharding import NONE, UNREDUCED, MeshAxes, Rule, Strategies, pieces, strategies
from .bodies import Body
from .collectives import collective_terms, combined_share, most_combined_bytes
from .compute import roofline_seconds
from .copied_back import copied_back
from .crossing import Traffic
from .gathered_orders import copied_bytes
from .gpu_kernels import operation_seconds
from .kinds import fused
from .local_dims import local_dims
from .on_chip import Resident
from .product_sums import SUM_BYTES
from .product_windows import window_seconds
from .selections import is_selection
from .split_k import Product, local_product, padded_bytes, part_bytes
from .tables import table_bytes
from .tiles import gathered_bytes, tiles_of_rows
from .tree_sums import further_kernels
from .turned import Turning, turned_bytes
from .vector_kernels import VectorKernel, vector_product

_PACKING_KERNELS = {"all_gather": 0.6, "reduce_scatter": 0.1, "all_to_all": 1.1, "collective_permute": 0.6}
"""Kernels next to a collective, for each that was planned: transpositions counted beside 501 in twenty compiled plans
of the GPT of experiments/quality (H100, jax 0.10.2).  Those of `gathered_orders` were among them and are priced beside
these since, which stand for what else is computed for gathers, as conversions of biases, which are lacking without."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Prices on one machine and mesh: seconds, for one run of the operation (not times its trips).

    Attributes:
      exposed: share of a collective that computation doesn't hide; the search pays only that.
    """

    profile: Profile
    axes: MeshAxes
    links: tuple[AxisLink, ...]
    exposed: float = 1.0

    def collective(
        self, kind: str, size_bytes: np.ndarray, axes: tuple[int, ...], *, start_share: float = 1.0,
        beside: float | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Exposed seconds of a collective over these mesh axes; see `collectives.collective_seconds`.

        Args:
          start_share: of its start that is its own, where XLA starts it together with others (`ir.start_shares`).
          beside: see `packing_seconds`.
        """
        key = kind, axes
        if key not in self._terms:
            names = tuple(self.axes[i][0] for i in axes)
            self._terms[key] = self.compiled_kind(kind, names), tuple(map(self.link, names)), names
        compiled, links, names = self._terms[key]
        sent_s = self._seconds(compiled, size_bytes, links, start_share)
        packing_s = self.packing_seconds(kind, size_bytes, names, start_share=start_share, beside=beside)
        return self.exposed * (sent_s + packing_s)

    @functools.cached_property
    def _terms(self) -> dict[tuple[str, tuple[int, ...]], tuple[str, tuple[AxisLink, ...], tuple[str, ...]]]:
        """Of what `collective` was asked: what it is compiled to, over which links and axes."""
        return {}

    def packing_seconds(
        self, kind: str, size_bytes: npt.ArrayLike, names: Sequence[str], *, start_share: float = 1.0,
        beside: float | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Seconds of the kernels that XLA for GPU runs beside a collective, of the shape of its bytes.

        All_reduces that start together are put into one buffer by one kernel, and taken out of it by one each; one that
        starts alone needs none.  For the others pieces are brought into the order that they are sent in or wanted in,
        see `_PACKING_KERNELS`: kernels that read and write all that is exchanged.  What is gathered is large where
        whoever makes it writes it in that order; the kernels beside it are as short as kernels get.  XLA for TPU brings
        pieces that are exchanged into order in one copy, before or after.

        Args:
          beside: kernels that a gather takes, see `kernels_beside`; by default as `_PACKING_KERNELS` has it.
        """
        size = np.asarray(size_bytes, np.float64)
        if self.profile.kind == "tpu" and kind == "all_to_all" and self.size_of(names) > 1:
            return self.copy_seconds(2 * size)
        if self.profile.kind != "gpu" or self.size_of(names) == 1:
            return np.zeros(size.shape)
        start_s = self.profile.op_overhead_s
        if kind == "all_reduce":
            share = np.maximum(combined_share(kind, size, self.profile.kind), start_share)
            moved_s = self.memory_seconds(2 * size)
            return np.where(share < 1, np.maximum(moved_s, start_s) + np.maximum(moved_s, share * start_s), 0.0)
        exchanged = size * (kind in ("all_to_all", "collective_permute"))
        kernels = _PACKING_KERNELS.get(kind, 0.0)
        if beside is not None and kind in ("all_gather", "reduce_scatter"):
            kernels = beside * (kind == "all_gather")
        return kernels * np.maximum(self.memory_seconds(2 * exchanged), start_s)

    def combined_bytes(self, kind: str) -> int:
        """Up to which size of all results collectives of a kind are compiled into one; 0: they are not."""
        return most_combined_bytes(kind, self.profile.kind)

    def compiled_kind(self, kind: str, names: Sequence[str]) -> str:
        """What a collective over these mesh axes is compiled as: `kind`, but for sums that stay whole."""
        scattered = kind == "reduce_scatter" and self.whole_sums
        return "all_reduce" if scattered and self.size_of(names) == self.size_of(n for n, _ in self.axes) else kind

    @property
    def whole_sums(self) -> bool:
        """Whether sums over all devices are compiled whole and sliced; see `hardware.sums_are_whole`."""
        return sums_are_whole(self.profile, self.size_of(name for name, _ in self.axes))

    def size_of(self, names: Iterable[str]) -> int:
        """The devices of one group of a collective over these mesh axes (or parts of axes)."""
        return math.prod(self.link(name).size for name in names)

    def collective_over(self, kind: str, size_bytes: float, names: Sequence[str], *, start_share: float = 1.0) -> float:
        """Seconds, hidden or not, of one collective over several named mesh axes (or parts of axes, see `link`)."""
        compiled = self.compiled_kind(kind, names)
        return float(self._seconds(compiled, np.asarray(size_bytes, float), tuple(map(self.link, names)), start_share))

    def _seconds(
        self, kind: str, size_bytes: np.ndarray, links: tuple[AxisLink, ...], start_share: float
    ) -> np.ndarray:
        start_s, s_per_byte = collective_terms(kind, links)
        own = np.maximum(combined_share(kind, size_bytes, self.profile.kind), start_share) if start_share < 1 else 1.0
        return np.asarray(own * start_s + size_bytes * s_per_byte)

    def link(self, name: str) -> AxisLink:
        """The link of a mesh axis, or of a part of one: "model:(2)4" is four devices of `model`, two apart."""
        whole, _, part = name.partition(":")
        link = self.links[[n for n, _ in self.axes].index(whole)]
        return replace(link, size=int(part.partition(")")[2])) if part else link

    def streams_of(self, names: Sequence[str]) -> tuple[str, ...]:
        """The links that a collective over these mesh axes (or parts of axes) holds while it runs, by name.

        A device has one port to a switch, so all axes on it queue for it; on a torus every axis has a dimension of its
        own (see hardware.topology), and collectives over different ones run side by side.
        """
        links = {name.partition(":")[0]: self.link(name) for name in names}
        return tuple(
            sorted(
                {
                    x.link if x.kind == "switch" else f"{x.link} {axis}"
                    for axis, x in links.items()
                    if x.size > 1
                }
            )
        )

    def settling_seconds(self, tail: np.ndarray, head: np.ndarray, tensor: Value) -> np.ndarray:
        """`float64[a, b]`: what it costs to copy an all_gather's result to where the tensor lies, see `gathered_bytes`
        and, for TPU, `copied_back`.

        The next step's parameters, updated in pieces and gathered, are copied into the donated ones' buffers (compiled
        for v5e and H100, jax 0.10.2).
        """
        twice = 2 * gathered_bytes(tensor, tail, head, self.axes, self.profile.kind)
        seconds = self.copy_seconds(twice)
        if self.profile.kind != "tpu":
            return seconds
        if self.profile.tile_s is not None:
            seconds = np.maximum(seconds, twice / 2 / tensor.item_bytes / _TILE * self.profile.tile_s)
        both_ways = copied_back(tensor, tail, head, self.axes, self.profile.on_chip_bytes or 0)
        return np.where(both_ways > 0, 2 * self.copy_seconds(2 * both_ways), seconds)

    def turned_seconds(self, turning: Turning, tail: np.ndarray, head: np.ndarray) -> np.ndarray:
        """`float64[a, b]`: what it costs to copy new values into place that a move had made in another order, to bring
        what is gathered into order, and to convert what is moved; in one run."""
        every = turned_bytes(turning, tail, head, self.axes)
        seconds = np.zeros((len(tail), len(head))) + sum(self.copy_seconds(2 * one) for one in every)
        if turning.gathered is not None:
            for one, each in copied_bytes(turning.gathered, tail, head, self.axes):
                seconds = seconds + (self.copy_seconds(2 * one) if each else self.memory_seconds(2 * one))
        if turning.converted is None:
            return np.asarray(seconds)
        parts = pieces(tail, self.axes)
        kernel_s = self.copy_seconds(turning.converted.bytes / parts)
        kernel_s = np.maximum(kernel_s, turning.converted.elements / parts / _TILE * (self.profile.tile_s or 0.0))
        moved = ((tail[:, None, :] != head[None, :, :]) & (np.array([n for _, n in self.axes]) > 1)).any(axis=2)
        return np.asarray(seconds + moved * kernel_s[:, None])

    def op_seconds(
        self, op: Op, rule: Rule, options: Strategies, graph: Graph, crossing: Traffic
    ) -> np.ndarray:
        """`float64[n]`: compute seconds of one run of `op` under every strategy.

        Args:
          crossing: what each operation reads from memory and writes to it.
        """
        if any(graph.values[v].host for v in (*op.operands, *op.results)):
            return self.transfer_seconds(op, options, graph)
        local_bytes = np.zeros(len(options))
        sizes = (*crossing.reads[op.index], *crossing.writes[op.index])
        moved = zip((*op.operands, *op.results), sizes, (*options.operands, *options.results), strict=True)
        for place, (value, size, places) in enumerate(moved):
            if size:
                resident = crossing.resident.get((op.index, place))
                local_bytes += self._streamed_bytes(
                    graph.values[value], size, places, crossing.kernels[op.index], resident
                )
        for halo in rule.halos:  # the piece and its edges are joined in a buffer of their own
            cut = (options.factors == halo.factor).any(axis=1) & bool(halo.widths)
            size = graph.values[op.operands[halo.operand]].bytes
            local_bytes += np.where(cut, 2 * size / pieces(options.operands[halo.operand], self.axes), 0.0)
        start_s = self.profile.op_overhead_s * (crossing.starts[op.index] if crossing.starts else 0.0)
        kernel = crossing.kernels[op.index]
        if kernel is not None and kernel.places:  # kernels of their own bring it into rows, and back
            for value, places in zip(op.results, options.results, strict=True):
                local_bytes += table_bytes(graph.values[value], places, self.axes, kernel.updates, kernel.tiling)[1]
        if op.primitive in LOOP_EDGES:
            return np.maximum(self.memory_seconds(local_bytes), start_s)
        selects = self.profile.kind == "tpu" and is_selection(graph, op)
        if selects or fused(op, rule):
            # a fused operation has its share of traffic, arithmetic and, on GPU, of its kernel's start; what selects
            # compares every element of its result
            selected = math.prod(graph.values[op.results[0]].shape) if selects else 0
            flops = rule.flops * options.shares + selected / pieces(options.results[0], self.axes)
            vector_s = flops / self.profile.vector_flops_per_s
            return np.maximum(np.maximum(self.memory_seconds(local_bytes), vector_s), start_s)
        product = self._product(op, options, graph, crossing)
        parts = np.zeros(len(options)) if product is None else part_bytes(product, self.profile)
        whole = parts == 0
        local_bytes += parts
        for place, value in enumerate(op.operands):
            if (op.index, place) in crossing.reordered:  # a kernel of its own reads it and writes it as is wanted
                parts = parts + 2 * graph.values[value].bytes / pieces(options.operands[place], self.axes)
        if op.index in crossing.turned_results:
            result, turned, _ = crossing.turned_results[op.index]
            read_and_written = graph.values[result].bytes + graph.values[turned].bytes
            parts = parts + read_and_written / pieces(options.results[0], self.axes)
        flops = rule.flops * options.shares
        dtype = graph.values[op.operands[0]].dtype if op.operands else "float32"
        dims = None
        if rule.matmul and len(rule.operands) > 1:
            dims = local_dims(rule, self.axes, options, math.prod(graph.values[op.results[0]].shape))
        if op.index in crossing.bodies:
            return np.full(len(options), self._body_seconds(crossing.bodies[op.index]))
        if op.index in crossing.sums:
            elements = math.prod(graph.values[op.results[0]].shape)
            local_bytes += SUM_BYTES * elements / pieces(options.results[0], self.axes)
        made_s = roofline_seconds(flops, local_bytes, dtype, self.profile, matmul=rule.matmul, dims=dims)
        if op.index in crossing.windows and dims is not None:
            alone = ~((options.results[0] == UNREDUCED) & (np.array([size for _, size in self.axes]) > 1)).any(axis=1)
            made_s = np.maximum(made_s, window_seconds(crossing.windows[op.index], dims, alone, self.profile))
        if self.profile.tile_s is not None and op.primitive == "dot_general" and vector_product(rule):
            # the vector unit's, with dimensions that both operands have too, of which a tile is the least
            made_s = np.maximum(made_s, self._tiles(op, options, graph) * self.profile.tile_s)
        if self.profile.kind == "gpu":
            work = flops, local_bytes, made_s
            made_s = operation_seconds(op, graph, options, self.axes, work, whole, self.profile)
        if self.profile.kind == "gpu" and not rule.matmul:
            made_s = made_s + further_kernels(op, graph, options.operands, self.axes) * self.profile.op_overhead_s
        for padded in padded_bytes(product, self.profile) if product is not None else ():
            padding_s = np.maximum(self.memory_seconds(2 * padded), self.profile.op_overhead_s)
            made_s = made_s + np.where(padded > 0, padding_s, 0.0)
        return np.asarray(made_s + self.memory_seconds(parts))

    def transfer_seconds(self, op: Op, options: Strategies, graph: Graph) -> np.ndarray:
        """`float64[n]`: what `op` takes to bring its operands from the host's memory to the device's, or back; nothing
        where it moves nothing: a loop takes slices of its host's stacks where they lie."""
        moved = np.zeros(len(options))
        if op.primitive == "device_put":
            for operand, result, places in zip(op.operands, op.results, options.operands, strict=True):
                if graph.values[operand].host != graph.values[result].host:
                    moved += graph.values[operand].bytes / pieces(places, self.axes)
        return moved / self.profile.host_bytes_per_s

    def _body_seconds(self, body: Body) -> float:
        """Compute seconds of one device's program, without what it sends."""
        alone = replace(self, axes=(), links=())
        ops = [body.graph.ops[index] for index in body.priced]
        rules = [body.rules[op.index] for op in ops]
        return sum(
            float(alone.op_seconds(op, rule, strategies(rule, ()), body.graph, body.crossing)[0]) * op.trips
            for op, rule in zip(ops, rules, strict=True)
        )

    def _tiles(self, op: Op, options: Strategies, graph: Graph) -> np.ndarray:
        """`float64[n]`: local tiles of the larger operand."""
        sizes = [
            math.prod(graph.values[v].shape) / pieces(places, self.axes)
            for v, places in zip(op.operands, options.operands, strict=True)
        ]
        return np.asarray(np.maximum.reduce(sizes) / _TILE)

    def _streamed_bytes(
        self,
        tensor: Value,
        size_bytes: float,
        places: np.ndarray,
        kernel: VectorKernel | None,
        resident: Resident | None,
    ) -> np.ndarray:
        """`float64[n]`: what a kernel moves of a tensor's `size_bytes`, or what would take as long as its tiles do."""
        parts = pieces(places, self.axes)
        local = np.asarray(size_bytes / parts)
        if resident is not None:
            local = resident.transferred(local, parts, self.profile.on_chip_bytes)
        if kernel is None or self.profile.tile_s is None:
            return local
        if kernel.updates and len(tensor.shape) > 1:
            local = local * table_bytes(tensor, places, self.axes, kernel.updates, kernel.tiling)[0]
        # what is computed of a narrower type is read in that one, element by element
        tiles = min(size_bytes, tensor.bytes / tensor.item_bytes) / parts / _TILE
        if kernel.in_rows:
            rows = tiles_of_rows(tensor, places, self.axes, kernel.item_bytes)
            # only what is no whole tile takes the vector unit longer to fill than memory
            tiles = tiles * (rows * (rows > 1) if kernel.fills else rows)
        return np.maximum(local, tiles * self.profile.tile_s / kernel.arrays / self.memory_seconds(np.ones(())))

    def part_bytes(self, op: Op, options: Strategies, graph: Graph, crossing: Traffic) -> np.ndarray:
        """Of a product that is split, bytes of the parts that it writes and a second kernel reads; see `split_k`."""
        product = self._product(op, options, graph, crossing)
        return np.zeros(len(options)) if product is None else part_bytes(product, self.profile)

    def _product(self, op: Op, options: Strategies, graph: Graph, crossing: Traffic) -> Product | None:
        if self.profile.core_count is None or op.primitive != "dot_general":
            return None
        lhs, rhs = options.operands[:2]
        return local_product(graph, op, crossing.producers, lhs, rhs, self.axes)

    def halo_seconds(self, op: Op, rule: Rule, options: Strategies, graph: Graph) -> np.ndarray:
        """`float64[n]`: exposed seconds in which devices exchange edges in one run; see `sharding.Halo`."""
        seconds = np.zeros(len(options))
        sizes = np.array([size for _, size in self.axes])
        for halo in rule.halos:
            cut = (options.factors == halo.factor) & (sizes > 1)
            tensor = graph.taken(op.operands[halo.operand], [(op.index, halo.operand)])
            local = tensor.bytes / pieces(options.operands[halo.operand], self.axes)
            element = local * np.where(cut, sizes, 1).prod(axis=1) / halo.extent
            for row in np.unique(cut, axis=0):
                over = tuple(int(i) for i in np.flatnonzero(row))
                if over:
                    rows = (cut == row).all(axis=1)
                    for width in halo.widths:
                        seconds += rows * self.collective("collective_permute", element * width, over)
        return seconds

    def merge_seconds(self, op: Op, rule: Rule, options: Strategies, graph: Graph) -> np.ndarray:
        """`float64[n]`: exposed seconds in which devices gather what they merge in one run; see `sharding.Merge`."""
        seconds = np.zeros(len(options))
        sizes = np.array([size for _, size in self.axes])
        for merge in rule.merges:
            cut = (options.factors == merge.factor) & (sizes > 1)
            count = np.where(cut, sizes, 1).prod(axis=1)
            for row in np.unique(cut, axis=0):
                over = tuple(int(i) for i in np.flatnonzero(row))
                rows = (cut == row).all(axis=1)
                for position, share in merge.results if over else ():
                    places = np.where(row, NONE, options.results[position])  # what other factors cut
                    size = graph.values[op.results[position]].bytes * share / pieces(places, self.axes)
                    seconds += rows * self.collective("all_gather", size * count, over)
        return seconds

    def exchange_seconds(self, op: Op, rule: Rule, options: Strategies, graph: Graph) -> np.ndarray:
        """`float64[n]`: exposed seconds of what devices exchange while `op` runs once: halos and merges."""
        return self.halo_seconds(op, rule, options, graph) + self.merge_seconds(op, rule, options, graph)

    def memory_seconds(self, local_bytes: np.ndarray) -> np.ndarray:
        """Seconds to read or write that much of one device's memory, of its shape."""
        return np.asarray(local_bytes / (self.profile.hbm_bytes_per_s * self.profile.hbm_efficiency))

    def copy_seconds(self, local_bytes: np.ndarray) -> np.ndarray:
        """Seconds of a kernel that reads and writes that much in all, of its shape; nothing where there is nothing."""
        return np.where(local_bytes > 0, np.maximum(self.memory_seconds(local_bytes), self.profile.op_overhead_s), 0.0)


_TILE = 8 * 128
"""Elements side by side in a TPU's vector register and memory tile, and all of one, on every generation so far
(jax.experimental.pallas.tpu, "tiling")."""
