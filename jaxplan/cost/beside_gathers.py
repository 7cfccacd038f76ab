"""Products that XLA for TPU v5e runs late: beside the gathers of what a step returns.

Where updated weights are gathered at the end of a step, as under ZeRO-1, that chip's gathers are asynchronous, each
within the kernels of products.  XLA's latency-hiding scheduler, which works from the last operation to the first (see
`scheduler`), takes them one at a time and to each what lasts about as long, of what is ready by then: weights'
gradients, for their own updates and gathers have been taken before.  So these run behind the backward pass, one behind
the other, and keep what they read, of every layer.  Sums over devices are kernels; all_reduces, and the sums of biases'
and scales' gradients, are one: where sums that are scattered are made whole first (`hardware.sums_are_whole`), no
weight's gradient is free to wait.  Where the updates of these biases and scales are gathered, what lasts no time but
has its turn behind the weights' gathers, all weights' gradients run behind the backward pass, for that goes on with
what their one sum adds up: plain layers of 1024 and 4096 with RMS norms, 6 of them, take 758 MB where 493 would do.

Where gradients are clipped, all of their sums are ready to run before the norm is taken, each of which makes its
gradient ready, and run behind the backward pass, which runs where it stands: the gradients lie there whole until then
(`Late.sums`; 200 MB of a Whisper's 3.5 GB, which is computed again).

What only such a gather waits for, a product that is computed again for the sum that is a gate's gradient, whose rows
are gathered for the weights that make gates, runs just before it, if its kernel alone reads a bias that is converted:
the scheduler prefers what makes more operations ready.  So the gates' products of a diffusion transformer with biases
all run behind its backward pass, and keep what the layers hide, those of one without where they stand (six plans of
both, and SD3's, whose compiled step takes 5.3 GB for 3.7).

How long a product lasts is XLA's estimate of before it has chosen any windows: some two to three times as long as the
product takes, a weight's gradient four times, that of a weight of several dimensions behind the ones that are summed
(heads of queries, keys and values) 46 times, of several before them 1.4 times: as the scheduler itself logs them for
GPTs of 16 x 2048 tokens, width 1024, and for others within a factor of two, a few within four.  With them six steps of
such GPTs, recomputed, under ZeRO-1 and cut as this package plans, have nearly all of the late gradients that XLA has
there (15 to 29, of 127 and 251 products), but for some that it swaps with their neighbours.  One of four layers takes
1222 MB for 813.  Of networks with many small weights, and of some others, the order is not found as well: of layers
with neither biases nor scales it is not, whose gathers XLA takes in another order (522 MB for 778), and of a ResNet
with batch normalisations more of them are taken to wait than do (MoCo, 19 % over).

Where the gradient of the weight that makes the logits runs late, so do the loss' lookups in logits that are cut over
the words, and keep these in f32 (not in whole rows of them, which one kernel reads and adds up): their sum over devices
is one with other small ones.  Those may wait for gathers in their turn, as of scales under ZeRO-1; then a backward pass
that scatters a sum goes first, for its pieces are rounded up and moved on asynchronously (`scattered_sums`).

v5p and v6e gather in kernels of their own, and run all products where they stand (compiled for all three, jax 0.10.2,
libtpu 0.0.42.1, 2026-11-28; the order, XLA: xla/service/latency_hiding_scheduler.cc).
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..hardware import XlaTimes
from ..ir import VIEWS, Graph, Op, settled_values
from ..sharding import UNREDUCED, Step, reshard_steps
from .held_back import COMBINED_ON_TPU, PRODUCTS, behind_loops, last_products, summed_over_devices
from .latency_hiding import Kernels
from .model import CostModel
from .scheduler import Node, scheduled

_BACKWARD, _GRADIENT, _HEADS_AFTER, _HEADS_BEFORE = 2.3, 3.8, 46.0, 1.4
"""How many times longer than they last XLA takes products to last: a weight's gradient and others, see the module."""

_BYTES_PER_CYCLE = 62.2
"""At which XLA takes collectives to send their larger buffer, over 8 chips and 16: logged for 4 KB to 262 MB."""

_SMALL, _SCALAR = 2**16, 8
"""Bytes of a bias or a scale: its gradient is made whole, whether or not it is scattered, and it is gathered by itself;
of a norm's square."""

_LAST = 0.1
"""Of the backward pass: what of it is its end."""


class Late(NamedTuple):
    """What runs late, with when: as the index of an operation.

    Attributes:
      products: weights' gradients, in the order in which they run.
      sums: of weights' gradients, by what they add up.
    """

    products: dict[int, int]
    sums: dict[int, int]


def beside_gathers(
    graph: Graph,
    model: CostModel,
    stored: Sequence[bool],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    outputs: Mapping[int, np.ndarray] | None,
    seconds: Mapping[int, float],
) -> Late:
    """See the module.

    Args:
      stored: see `fusion.Traffic`.
      values, reads: the layout row of every value where it is made, and of every operand as it is read; outputs: of
        results, by position.
      seconds: of every operation.
    """
    last = behind_loops(graph)
    if not last:
        return Late({}, {})
    kernels = _OnTpu(graph, model, last, stored, values, reads, seconds)
    kernels.gather(_gathered(graph, model, last, values, outputs))
    if all(node.latency_s is None for node in kernels.others):
        return Late({}, {})  # nothing is gathered
    order = scheduled(kernels.nodes(), apart_s=0.0, starts_wait=False)
    waiting = kernels.waiting(order)
    until: dict[int, int] = {}
    behind = 0
    for node in sorted(waiting, key=waiting.__getitem__):
        held = kernels.is_held(node)
        if node.op < behind and (held or node in kernels.aside):
            behind = min(behind + 1, len(graph.ops) - 1)
            until[node.op] = behind
        elif not held:
            behind = max(behind, node.op)
    return Late(until, kernels.summed_at(order, until))


def late_lookups(
    graph: Graph,
    model: CostModel,
    until: Mapping[int, int],
    tied: Iterable[int],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    outputs: Mapping[int, np.ndarray] | None,
) -> dict[int, int]:
    """The loss' lookups that run late, see the module, with the time until which they wait.

    Args:
      until: see `beside_gathers`; tied: products that wait for lookups' gradients; others: see `beside_gathers`.
    """
    last = behind_loops(graph)
    held, needed = last_products(last, ())
    end = max((op.index for op in last if op.primitive in PRODUCTS and not needed.isdisjoint(op.results)), default=0)
    late = [*tied, *(product for product, at in until.items() if at > end - _LAST * (end - product))]
    read = {math.prod(graph.values[value].shape) for index in late for value in graph.ops[index].operands}

    def cut(op: Op) -> bool:
        found = values.get(op.results[0])
        return found is not None and UNREDUCED in found.tolist() and needed.isdisjoint(op.results)

    lookups = [op for op in graph.lookups() if op.primitive == "gather" and last and op.index >= last[0].index]
    lookups = [op for op in lookups if cut(op) and math.prod(graph.values[op.operands[0]].shape) in read]
    found = dict.fromkeys((op.index for op in lookups), max(until.values()))
    if not found:
        return found
    behind = _made_of(last, held, found)
    sums = summed_over_devices(graph, model.axes, behind, values, reads)
    reduced = {value for value, _, step in sums if step.kind == "all_reduce"}
    returned = (_made_of(last, reduced, found) - reduced) & set(graph.outputs)
    if not returned <= _gathered(graph, model, last, values, outputs).keys():
        return found
    sums = summed_over_devices(graph, model.axes, needed, values, reads)
    return {} if any(step.kind == "reduce_scatter" for _, _, step in sums) else found


def _made_of(last: Sequence[Op], values: Iterable[int], without: Container[int]) -> set[int]:
    """`values`, and what is made of them but by the operations `without`."""
    found = set(values)
    for op in last:
        if op.index not in without and not found.isdisjoint(op.operands):
            found.update(op.results)
    return found


def _gathered(
    graph: Graph, model: CostModel, last: Sequence[Op],
    values: Mapping[int, np.ndarray], outputs: Mapping[int, np.ndarray] | None,
) -> dict[int, tuple[Step, ...]]:  # fmt: skip
    """What the step gathers to return it."""
    rows = {value: values[argument] for value, argument in settled_values(graph).items() if argument in values}
    rows |= {graph.outputs[position]: row for position, row in (outputs or {}).items()}
    found: dict[int, tuple[Step, ...]] = {}
    producers = graph.producers()
    for value, row in rows.items():
        made = values.get(value)
        if made is None or producers[value] < last[0].index or UNREDUCED in made.tolist():
            continue
        steps = reshard_steps(made, row, graph.values[value].bytes, model.axes)
        if steps and all(step.kind == "all_gather" for step in steps):
            found[value] = tuple(steps)
    return found


class _OnTpu(Kernels):
    """Kernels and collectives as XLA for TPU schedules them: gathers alone are asynchronous."""

    def __init__(
        self, graph: Graph, model: CostModel, last: Sequence[Op], stored: Sequence[bool],
        values: Mapping[int, np.ndarray], reads: Mapping[tuple[int, int], np.ndarray], seconds: Mapping[int, float],
    ) -> None:  # fmt: skip
        self.model = model
        self.summed: dict[tuple[object, ...], Node] = {}
        self.reduced: dict[tuple[object, ...], int] = {}
        self.aside: set[Node] = set()
        super().__init__(graph, model.axes, last, stored, values, reads, seconds, XlaTimes({}, {}))

    def gather(self, gathered: Mapping[int, Sequence[Step]]) -> None:
        """Gathers what the step returns, at its end, in the order of the gradients that it is made of.

        Small gathers count where kernels alone lead there from a sum over devices that is made in one with others.
        """
        latest: dict[int, int] = {}
        for op in self.walked:
            own = op.index if not self.held.isdisjoint(op.results) else 0
            latest.update(dict.fromkeys(op.results, max([own, *(latest.get(value, 0) for value in op.operands)])))
        in_one = {*self.summed.values()}
        sums = (key[0] for key, node in self.sent.items() if node in in_one)
        behind_sums = _made_of(self.walked, sums, {op.index for op in self.walked if op.primitive in PRODUCTS})
        for value in sorted(gathered, key=lambda value: latest.get(value, 0)):
            sources = self.made_of.get(value, ())
            if sources and (value in behind_sums or all(step.bytes > _SMALL for step in gathered[value])):
                self._collective(gathered[value], sources, len(self.graph.ops) + latest.get(value, 0))

    def _is_product(self, node: Node) -> bool:
        return node.op >= 0 and self.graph.ops[node.op].primitive in PRODUCTS

    def is_held(self, product: Node) -> bool:
        """Whether only the end wants what a product makes."""
        return not self.held.isdisjoint(self.graph.ops[product.op].results)

    def summed_at(self, order: Sequence[Node], until: Mapping[int, int]) -> dict[int, int]:
        """When sums of what only the end wants run that wait for other products, `until` which the late ones do."""
        values: dict[Node, list[int]] = {}
        for (value, *_), node in self.sent.items():
            if value not in self.needed and UNREDUCED in self.values[value].tolist():
                values.setdefault(node, []).append(value)
        found: dict[int, int] = {}
        ran = 0
        for node in order:
            if self._is_product(node):
                ran = max(ran, until.get(node.op, node.op))
            found.update(dict.fromkeys(values.get(node, ()), ran))
        return found

    def waiting(self, order: Sequence[Node]) -> dict[Node, float]:
        """Where in `order` each product runs: what only a gather waits for just before that."""
        place = {node: float(at) for at, node in enumerate(order)}
        starts: dict[Node, float] = {}  # of what nothing but gathers waits for, of the first of them
        readers: dict[Node, list[Node]] = {}
        products = {*filter(self._is_product, order)}
        for node in reversed(order):
            after = readers.get(node, [])
            if node.latency_s is not None:
                starts[node] = place[node]
            elif after and all(one in starts for one in after):
                first = min(starts[one] for one in after)
                if node not in products:
                    starts[node] = first
                elif not self.is_held(node) and self._converts(node.op):
                    self.aside.add(node)
                    place[node] = first - 0.5
            for before in node.reads:
                readers.setdefault(before, []).append(node)
        return {node: place[node] for node in order if node in products}

    def _converts(self, product: int) -> bool:
        """Whether the kernel of a product alone reads what is converted for it, as a bias: the scheduler prefers it."""
        ops, uses = self.graph.ops, self.graph.uses()
        op = ops[product]
        while len(op.results) == 1 and len(uses[op.results[0]]) == 1:
            (reader, place), = uses[op.results[0]]
            op = ops[reader]
            if op.primitive in PRODUCTS:
                break
            for value in (v for at, v in enumerate(op.operands) if at != place):
                while (maker := self.producers[value]) >= 0 and len(uses[value]) == 1:
                    if ops[maker].primitive == "convert_element_type":
                        return True
                    if ops[maker].primitive not in VIEWS | {"broadcast_in_dim"}:
                        break
                    value = ops[maker].operands[0]
        return False

    def _collective(self, steps: Sequence[Step], sources: Sequence[Node], place: int) -> Node:
        took = sum(step.bytes for step in steps) / (_BYTES_PER_CYCLE * (self.model.profile.clock_hz or 1e9))
        if all(step.kind == "all_gather" for step in steps):
            end = self._pair(took, sources, place)[1]
            copied = Node(place - 0.1, reads=[end], is_view=True)
            self.others.append(copied)
            return copied
        key = self._made_in_one(steps, place)
        if key is not None and (node := self.summed.get(key)) is not None:
            node.reads += sources
            return node
        node = Node(place - 0.3, seconds=took, reads=list(dict.fromkeys(sources)))
        if key is not None:
            self.summed[key] = node
        self.others.append(node)
        return node

    def _made_in_one(self, steps: Sequence[Step], place: int) -> tuple[object, ...] | None:
        """What a sum has in common with those that XLA makes in one with it; None: it is made by itself."""
        compiled = (self.model.compiled_kind(step.kind, step.axes) for step in steps if step.bytes > _SMALL)
        if self._leads(self.graph.ops[place]) or any(kind != "all_reduce" for kind in compiled):
            return None
        size = int(sum(step.bytes for step in steps))
        axes = tuple(step.axes for step in steps)
        self.reduced[axes] = self.reduced.get(axes, 0) + size
        return axes, size <= _SCALAR, self.reduced[axes] // COMBINED_ON_TPU

    def _lasts(self, op: Op) -> float:
        took = self.seconds.get(op.index, 0.0)
        if op.primitive not in PRODUCTS:
            return took
        if self.held.isdisjoint(op.results):
            return _BACKWARD * took
        before, after = (_free_dims(self.graph, op, place) for place in (0, 1))
        return took * (_HEADS_AFTER if after > 1 else _HEADS_BEFORE if before > 1 else _GRADIENT)

    def _fold(self, value: int, turned: bool, source: Node) -> Node:
        return source

    def _find_places(self, op: Op, node: Node) -> None:
        """One kernel does it all."""

    def _is_part(self, op: Op, value: int) -> bool:
        return value in self.beside

    def _sum(self) -> None:
        """Each sum is sent by itself, where it is read."""


def _free_dims(graph: Graph, op: Op, place: int) -> int:
    """How many dimensions of an operand a matrix product's result has; 1 of a convolution's."""
    if op.primitive != "dot_general":
        return 1
    summed, batch = op.params["dimension_numbers"]
    return len(graph.values[op.operands[place]].shape) - len(summed[place]) - len(batch[place])
