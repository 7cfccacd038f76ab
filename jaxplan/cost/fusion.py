"""What stays in memory and what crosses it, when XLA fuses a step into kernels.

A kernel is one contraction, or none, with the elementwise work and data movement before and after it.  It is
found by levels: an operation runs at the level of its latest operand; what a reduction makes, and what a contraction
or an operation that can't be fused reads, is a level later.  Values live in registers inside a level.  A cheap value
that a later level needs again is computed there again from what is in memory, as XLA's fusion duplicates cheap
producers, unless that would read more than storing it writes and reads.  Each level reads a tensor once, however many
of its operations use it: XLA fuses siblings that share an operand (xla/service/instruction_fusion.h,
multi_output_fusion.h).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ..ir import LOOP_EDGES, SUMS, VIEWS, Graph, Op
from ..sharding import Rule
from .added_scores import added_scores
from .apart import made_apart, reordered, turned_results
from .awaited_addends import Awaited, awaited_addends
from .bodies import bodies
from .carries import stacked_at_once
from .conversions import conversions
from .converted_weights import table_traffic
from .crossing import Traffic
from .cudnn_sums import cudnn_sums, in_memory, summed_traffic
from .few_images import spread_reads
from .fills import early_stacks, filled_traffic, fills, written_with_zeros
from .images import copied_reads, image_lanes, written_for_products
from .in_place import overwritable
from .invariants import loop_invariants
from .joined import joined
from .joined_images import whole_gradients
from .kept_tanhs import biased_tanhs
from .kernel_starts import kernel_starts
from .kinds import COMPUTED_AGAIN, SMALL, kinds_of, source_values
from .levels import convolutions_reading, costs_more_again, kernels_reading, levels_of, run_at_level
from .lookups import Lookups, lookups_of
from .masks import (
    COMPARISONS,
    CURVES,
    DEAR,
    MANY_READERS,
    is_dear,
    is_mask,
    moved_on_tpu,
    read_at,
    read_by_expansions,
    read_whole,
    scales_logistic,
    selected_once,
)
from .memory_orders import NO_ORDERS, orders_of
from .merged_products import mergings
from .on_chip import residents
from .outermost import outside_tiles
from .parted import parted_rows
from .product_sums import products_with_sums
from .product_windows import windowed
from .residency import Flow, second_stacks, stack_traffic, taken_in, unmoved, unwidened, written_again
from .reversed_gradients import read_reversed
from .row_sums import row_sums
from .run_at import run_at
from .scores import exponentiated, made_at_once, makes_scores, masks_capped
from .scores_twice import scores_twice
from .selections import added_onto, wide_copies
from .shared_gathers import added_in_memory
from .shared_operands import shared_operands
from .sliced import lanes_left
from .sliced_lists import read_of_sliced_lists
from .squares import shared_squares
from .tables import row_updates, tiled_in_rows
from .turned import updates_of
from .vector_kernels import vector_kernels
from .without_triton import may_be_without_triton
from .written import most_read, written_by, written_in_loops


def traffic(graph: Graph, rules: Sequence[Rule], platform: str, usable_bytes: int = 0) -> Traffic:
    """What crosses memory in `graph` when XLA compiles it for `platform` ("tpu", "gpu" or "cpu"), whose devices have
    `usable_bytes` (0: see `lookups_of`); see the module."""
    lookups = lookups_of(graph, usable_bytes) if platform == "tpu" else {}
    found = _Kernels(graph, rules, platform, lookups).traffic()
    kept = residents(graph, rules, found.reads, found.writes) if platform == "tpu" and graph.loops else {}
    return replace(found, bodies=bodies(graph, platform, partial(traffic, usable_bytes=usable_bytes)), resident=kept)


class _Kernels:
    def __init__(self, graph: Graph, rules: Sequence[Rule], platform: str, lookups: Lookups) -> None:
        self.graph, self.rules, self.platform, self.lookups = graph, rules, platform, lookups
        self.source = source_values(graph, rules)
        # kernels are made of the program's own types: what they read and write is narrowed afterwards
        self.share = [0.5 if tensor.narrowed else 1.0 for tensor in graph.values]
        self.bytes = [v.bytes / share * (not v.host) for v, share in zip(graph.values, self.share, strict=True)]
        self.producers, self.uses = graph.producers(), graph.uses()
        self.mask = [platform == "tpu" and is_mask(tensor) for tensor in graph.values]
        self.kinds = kinds_of(graph, rules, self.source, platform)
        self.loop_of = [-1] * len(graph.ops)
        for position, loop in enumerate(graph.loops):  # inner loops stand after outer ones
            self.loop_of[loop.start : loop.stop] = [position] * (loop.stop - loop.start)
        read = (v for op in graph.ops if rules[op.index].matmul for v in op.operands)
        self.product_operands = Counter(unmoved(graph, self.producers, v) for v in read)
        self.images = image_lanes(graph, rules) if platform == "tpu" else {}
        self.by_triton = platform == "gpu" and not may_be_without_triton(graph)
        self.laid = written_for_products(graph, self.images) | read_of_sliced_lists(graph)
        self.flow = Flow(graph=graph, rules=rules, kinds=self.kinds, source=self.source, producers=self.producers,
                         loop_of=self.loop_of)  # fmt: skip
        self.op_level, self.value_level = levels_of(self.flow, self._here, self._open)
        tpu = platform == "tpu"
        self.awaited = awaited_addends(self.flow, self.op_level, self.value_level, self._here) if tpu else Awaited()
        self.onto = dict(added_onto(graph, self.producers)) if platform == "gpu" else {}
        self.cudnn = cudnn_sums(graph, self.producers) if platform == "gpu" else ()
        self.scores = tuple(added_scores(graph, self.kinds, self.producers) if platform == "tpu" else ())
        forced = self._forced()
        self.stored, self.cheap, self.again = list(forced), set[int](), frozenset[int]()
        self.leaves: list[Mapping[int, float] | None] = [None] * len(graph.values)
        self.far: dict[int, Mapping[int, float]] = {}  # leaves on TPU, however many
        kept = self.laid.union(v for v, there in enumerate(forced) if there)
        self.readers = kernels_reading(graph, rules, self.kinds, self.value_level, self.op_level, platform, kept)
        self.bent = set[int]()  # on GPU, what a kernel has computed of a curve of something normalised, see `masks`
        summed = {v for op in graph.ops if self.kinds[op.index] == "reduction" for v in op.operands}
        self.reduced = summed.union(unwidened(graph, self.producers, v) for v in summed)
        self.convolved = convolutions_reading(graph, self.kinds, kept, self.reduced) if tpu else {}
        smaller, converted = self._find_leaves()
        if smaller or converted:
            self.again = frozenset(v for scores in converted for v in made_at_once(graph, self.producers, scores))
            kept = smaller.union(*converted.values())
            self.stored = [there or value in kept for value, there in enumerate(forced)]
            self._find_leaves()
        self.written = written_in_loops(graph, self.stored)

    def _open(self, op: Op) -> bool:
        """Whether what reads `op` may join its kernel, as it does with contractions of XLA for TPU but ragged ones."""
        return self.platform == "tpu" and self.rules[op.index].matmul and op.primitive != "ragged_dot_general"

    def _here(self, value: int, op: Op) -> bool:
        """Whether `value` is made in the loop body that `op` stands in; else it is in memory before the body starts."""
        return self.producers[value] >= 0 and self.loop_of[self.producers[value]] == self.loop_of[op.index]

    def _forced(self) -> list[bool]:
        """Values in memory whatever is computed again."""
        stored, tpu = [False] * len(self.graph.values), self.platform == "tpu"
        moved = moved_on_tpu(self.graph, self.rules, self.producers, self.source) if tpu else set()
        moved |= whole_gradients(self.graph, self.producers) if tpu else set()
        moved.update(read_reversed(self.graph, self.producers) if tpu else ())
        ends = (*self.graph.inputs, *self.graph.outputs, *self.graph.constants)
        expanded = read_by_expansions(self.graph) if self.platform == "gpu" else ()
        added = added_in_memory(self.graph, self.kinds) if self.platform == "gpu" else ()
        scores = [v for one in self.scores for v in (*one.products, one.total)]
        zeros = written_with_zeros(self.graph, self.onto) if self.platform == "gpu" else ()
        sums = in_memory(self.graph, self.producers, self.cudnn)
        written = (*self.onto.values(), *expanded, *added, *scores, *zeros, *sums, *self.awaited.written)
        for value in (*ends, *moved, *written):
            stored[value] = True
        for op in self.graph.ops:
            if self.rules[op.index].source:
                continue
            kind = self.kinds[op.index]
            closed = kind == "heavy" and not self._open(op)
            whole: list[int] = []
            gathers = op.primitive == "gather" and (kind == "heavy" or tpu)
            if gathers or (closed and op.primitive != "dot_general") or op.primitive == "scan_slice":
                whole += read_whole(self.platform, self.graph, self.kinds, self.producers, self.source, op)
            if closed or kind == "reduction" or op.primitive in ("scan_stack", "carry_init", "cond_join"):
                whole += op.results
            if op.primitive == "scan_slice" and self.platform == "gpu":  # a copy for several products
                whole += [v for v in op.results if self.product_operands[v] > 1]
            whole += [v for v in op.operands if not self._here(v, op)]
            for value in whole:
                stored[value] = True
        return [kept and not source for kept, source in zip(stored, self.source, strict=True)]

    def _find_leaves(self) -> tuple[set[int], Mapping[int, set[int]]]:
        """From which stored values a kernel computes each value again; stores what it can't and a later level reads.

        Returns values that are smaller than what is made of them and read later: XLA stores those, and computes the
        rest again where it is read (of an activation what goes in, for the function and its derivative; of softmax's
        derivative the bf16 product that is converted to f32 twice); and scores with what is stored for them instead.
        """
        self.bent.clear()
        made_of: dict[int, list[int]] = {}
        crosses = [False] * len(self.graph.values)
        contracted, roots = [False] * len(self.graph.values), ("rsqrt",) if self.platform == "tpu" else ()
        for op in self.graph.ops:
            product = self.rules[op.index].matmul
            for value in op.operands:
                crosses[value] |= self.value_level[value] < self.op_level[op.index]
                read = value
                if op.primitive == "dot_general" and product and self.platform == "gpu":
                    read = taken_in(self.graph, self.producers, self.kinds, self.source, value, self.by_triton)
                crosses[read] |= crosses[value]
                contracted[read] |= product
        for value in (*self.graph.inputs, *self.graph.constants):
            self.leaves[value] = {value: self.bytes[value]}
        for op in self.graph.ops:
            if self.platform == "gpu" and self._curved(op):  # whether or not it was found to be in memory before
                self.bent.update(op.results)
            for value in op.results:
                if not self.stored[value]:
                    self.leaves[value] = self._from_operands(op, value)
                    leaves = self.leaves[value]
                    dear = leaves is None or (contracted[value] and self._kept(value)) or self._curved(op, roots)
                    if self.readers and leaves is not None and value not in self.awaited.values:
                        kernels = self.convolved.get(value, self.readers[value])
                        dear |= costs_more_again(kernels, self.bytes[value], leaves)
                    if (crosses[value] or value in self.convolved) and dear and not self.source[value]:
                        self.stored[value] = True
                        if self.leaves[value] is not None:
                            self.cheap.add(value)
                        for origin in self._origins(op) if self.leaves[value] is None else ():
                            made_of.setdefault(origin, []).append(value)
                if self.stored[value]:
                    self.leaves[value] = {value: self.bytes[value]}
                    if op.primitive not in CURVES:
                        self.bent.discard(value)
        exponents = exponentiated(self.graph, self.kinds, self.producers) if self.platform == "tpu" else {}
        converted, best = dict[int, set[int]](), dict[int, int]()
        # of equals in f32 what most are made of (an exact gelu's argument, not what is scaled of it), then the latest
        least = {v: (self.bytes[v], -len(made) * (self.graph.values[v].item_bytes > 2)) for v, made in made_of.items()}
        for origin, made in sorted(made_of.items(), reverse=True):
            dear = self.bytes[origin] < sum(self.bytes[v] for v in made) or any(self.mask[v] for v in made)
            arguments = [exponents[v] for v in made if v in exponents]
            if dear and arguments and makes_scores(self.graph, self.producers, self.graph.ops[self.producers[origin]]):
                converted[origin] = set().union(*arguments)
            elif dear and not self.mask[origin]:
                best.update((value, min(best.get(value, origin), origin, key=least.__getitem__)) for value in made)
        return set(best.values()), converted

    def _origins(self, op: Op) -> Iterator[int]:
        """The values that fused `op` is computed from, one after the other, latest first, beside what is in memory."""
        while self.kinds[op.index] == "fused":
            fresh = {v for v in op.operands if self.leaves[v] is None and not self.source[v]}
            if len(fresh) != 1:
                return
            value = fresh.pop()
            op = self.graph.ops[self.producers[value]]
            yield from () if op.primitive in VIEWS else (value,)  # what that is a view of is as good

    def _from_operands(self, op: Op, value: int) -> Mapping[int, float] | None:
        cut = self.platform == "tpu" and op.primitive in ("slice", "split") and self.stored[op.operands[0]]
        if op.primitive == "scan_slice" or cut:  # no more is read than that
            return {value: self.bytes[value]}
        alone = self.kinds[op.index] != "fused" and value not in self.again
        if alone or (self.platform == "gpu" and self._dear(op, value)):
            return None
        leaves, far = dict[int, float](), False
        self.far.pop(value, None)
        for operand in op.operands:
            if not self.source[operand]:
                if (found := self.leaves[operand]) is None:
                    if (found := self.far.get(operand)) is None:
                        return None
                    far |= self.bytes[operand] * SMALL > self.bytes[value]
                leaves.update(found)
        if self.platform == "tpu":
            self.far[value] = leaves
        if far:
            return None
        if op.primitive == "gather" and op.operands[0] in leaves:  # no more of a table is read than is gathered
            leaves[op.operands[0]] = min(leaves[op.operands[0]], self.bytes[value])
        read = [v for v, size in leaves.items() if self.producers[v] >= 0 or size > self.bytes[value]]  # but a bias
        made = all(self.producers[v] >= 0 and self.rules[self.producers[v]].matmul for v in read)
        compared = self.platform == "gpu" and op.primitive in COMPARISONS and made
        least = max(leaves.values(), default=0.0) if compared else self.bytes[value]  # what is compared is kept
        near = sum(leaves.values()) <= COMPUTED_AGAIN * least or self._added_later(op, value)
        if self.platform == "gpu" and op.primitive in COMPARISONS:
            given = all(self.producers[v] < 0 for v in leaves)
            near |= given or selected_once(self.graph, self.kinds, self.op_level, value)
        if any(v in self.bent for v in op.operands):
            self.bent.add(value)
            near &= sum(size >= self.bytes[value] / 2 for size in leaves.values()) < 2 and value not in self.reduced
        return leaves if near or self.mask[value] else None

    def _dear(self, op: Op, value: int) -> bool:
        """Whether `op` takes long, and is half precision, of what is normalised, or read by many, or masks such."""
        alone = scales_logistic(self.graph, self.producers, op)
        if not alone and (op.primitive not in DEAR or is_dear(self.graph, op, value in self.bent)):
            return op.primitive in DEAR or masks_capped(self.graph, self.producers, op)
        return len(read_at(self.graph, self.kinds, self.op_level, value, alone=alone)) >= MANY_READERS

    def _added_later(self, op: Op, value: int) -> bool:
        """Whether a sum is read by another sum alone, in whose kernel XLA for GPU adds all of it up, or is awaited."""
        if value in self.awaited.values:
            return True
        readers = self.uses[value]
        if self.platform != "gpu" or op.primitive not in SUMS or len(readers) != 1:
            return False
        reader = self.graph.ops[readers[0][0]]
        return reader.primitive in SUMS and self._here(value, reader)

    def _curved(self, op: Op, curves: Collection[str] = CURVES) -> bool:
        """Whether `op` is a function that takes long of statistics, or of what is normalised by them."""
        makers = [self.producers[leaf] for leaf in self.leaves[op.operands[0]] or ()] if op.primitive in curves else []
        return any(maker >= 0 and self.kinds[maker] == "reduction" for maker in makers)

    def _kept(self, value: int) -> bool:
        """Whether a contraction wants `value` in memory, though it could compute it again: on TPU a slice of a loop's
        stack of weights, which is converted once, before the loop (the scanned Llama's program); else everything."""
        leaves = self.leaves[value] or {}
        if self.platform == "tpu":
            return value in self.laid or any(not self.stored[leaf] and self._buffer(leaf) for leaf in leaves)
        return unmoved(self.graph, self.producers, value) not in leaves

    def traffic(self) -> Traffic:
        """See `Traffic`."""
        # a loop's next carry is written into the carry's buffer
        carried = {op.operands[0] for op in self.graph.ops if op.primitive == "carry_next"}
        runs = run_at_level(self.graph, self.kinds, self.stored, carried, self.op_level)
        seen = set[tuple[int, int, int]]()
        reads, writes = list[tuple[float, ...]](), list[tuple[float, ...]]()
        flow = self.flow
        times = run_at(flow, self.platform, self.stored, self.leaves, self.op_level)
        tpu, gpu, lookups = self.platform == "tpu", self.platform == "gpu", self.lookups
        in_rows, again = tiled_in_rows(self.graph, lookups) if tpu else {}, written_again(flow) if gpu else set()
        tables = row_updates(self.graph, self.rules, lookups) if tpu else ()
        for op in self.graph.ops:
            if op.primitive in ("scan_slice", "scan_stack"):
                moved = stack_traffic(flow, op, self.platform, self.leaves, self.product_operands.keys(), again)
                reads.append(moved[:1])
                writes.append(moved[1:])
                continue
            reads.append(tuple([self._read(op, v, seen) if runs[op.index] else 0.0 for v in op.operands]))
            kept = [self.kinds[op.index] != "edge" and (self.stored[v] or v in carried) for v in op.results]
            made = [written_by(op, v, self.written) for v in op.results]
            writes.append(tuple([self.bytes[v] * self.share[v] * w for v, w in zip(made, kept, strict=True)]))
        summed_traffic(self.graph, self.cudnn, reads, writes)
        filled = fills(flow, times, self.onto) if gpu else early_stacks(flow, times) if tpu else ()
        filled_traffic(flow, filled, self.bytes, reads, writes)
        if tpu:
            table_traffic(flow, self.bytes, reads)
        kernels = joined(flow, self._at_hand, self.op_level, self.platform)
        vector = vector_kernels(flow, reads, writes, kernels, tables) if tpu else ()
        orders = orders_of(flow) if gpu else NO_ORDERS
        apart = made_apart(flow, self.cheap, orders, self.by_triton) if gpu else {}
        # the first copy of what is made apart is what its kernel writes
        turned = {v: products[v in apart :] for v, products in reordered(flow, orders).items()} if gpu else {}
        apart = {**turned, **apart}
        elsewhere, spanned = {*apart, *self.written.shared, *self.onto}, self.written.spanned
        stored = tuple(s and v not in elsewhere for v, s in enumerate(self.stored))
        every = zip(self.producers, self.stored, self.source, self.leaves, strict=True)
        return Traffic(
            stored=stored,
            inside=tuple(m >= 0 and not kept and not source and leaves is None for m, kept, source, leaves in every),
            reads=tuple(reads), writes=tuple(writes), fills=filled,
            second_stacks=second_stacks(flow, self.platform),
            invariants=loop_invariants(flow) if gpu else (),
            over=overwritable(flow, self.stored, times if gpu else None, self.onto.values()) if tpu or gpu else {},
            images=self.images, scores=self.scores, lookups=lookups,
            rows={**outside_tiles(flow), **spanned, **in_rows, **lanes_left(flow)} if tpu else {},
            copied_images=copied_reads(self.graph, self.stored, self.producers) if tpu else (),
            tables=tables, spread=spread_reads(self.graph, self.images) if self.images else (),
            squares=shared_squares(flow, self.stored) if tpu else (),
            wide=wide_copies(self.graph, stored, self.producers) if tpu else (),
            shared=shared_operands(flow, self.stored, self.leaves, self.bytes, self.scores) if tpu else (),
            row_sums=row_sums(flow, self.stored) if gpu else (),
            apart=apart, updates=updates_of(flow) if gpu else (),
            windows=windowed(flow, reads, updates_of(flow), self.op_level) if tpu else {},
            conversions=conversions(flow, self.stored) if tpu else {},
            reordered={product: value for value, products in turned.items() for product in products},
            turned_results=turned_results(flow, orders) if gpu else {},
            merged=mergings(self.graph, self.rules, self.producers, self.loop_of) if gpu else (),
            kernels=vector or (None,) * len(reads),
            parted=parted_rows(self.graph, stored) if gpu else frozenset(),
            starts=kernel_starts(flow, writes, kernels) if gpu else (),
            sums=products_with_sums(flow, writes, kernels, vector) if tpu else frozenset(),
            twice=tuple(scores_twice(flow)) if tpu else (),
            tanhs=biased_tanhs(flow, stored) if gpu else (),
            stacked=stacked_at_once(flow, self.stored) if tpu else {},
            producers=tuple(self.producers), times=times, graph=self.graph,
        )

    def _read(self, op: Op, value: int, seen: set[tuple[int, int, int]]) -> float:
        """Bytes that `op` reads for `value`, less what its kernel has at hand or has read already."""
        if self.source[value]:
            return 0.0
        most = most_read(self.graph, op, value, self.written)
        if self.kinds[op.index] == "heavy":
            leaves = self.leaves[value] or {value: self.bytes[value]}
            return sum(min(size, most) * self.share[v] for v, size in leaves.items())
        if self._at_hand(value, op):
            return 0.0
        total = 0.0
        for leaf, size in (self.leaves[value] or {}).items():
            key = (leaf, self.loop_of[op.index], self.op_level[op.index])
            if key not in seen and not self._at_hand(leaf, op):
                total += min(size, most) * self.share[leaf]
            if size <= most:
                seen.add(key)
        return total

    def _at_hand(self, value: int, op: Op) -> bool:
        """Whether the kernel that `op` is part of makes `value` itself."""
        here = self._here(value, op) and not self._buffer(value)
        return here and self.op_level[self.producers[value]] == self.op_level[op.index]

    def _buffer(self, value: int) -> bool:
        return (made := self.producers[value]) >= 0 and self.graph.ops[made].primitive in LOOP_EDGES
