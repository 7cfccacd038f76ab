"""Graph -> StrategyProblem: the decisions, their prices, and what they keep in memory."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ..cost import CostModel, Traffic, narrowed, source_values, together, traffic, turnings
from ..ir import SUMS, Graph, Op, Value, accumulating_ops, settled_values, spreads
from ..sharding import UNREDUCED, Rule, Strategies, all_places, busiest, graph_rules, pieces, strategies
from .parts import parts_taken
from .passing import How, Passing
from .problem import Edge, Node, StrategyProblem
from .sharing import Sharing
from .space import Allowed, Passage, Port, Settling, Space
from .totals import totals
from .usages import Usages


def build(
    graph: Graph,
    model: CostModel,
    *,
    input_pins: Mapping[int, Allowed] | None = None,
    output_pins: Mapping[int, Allowed] | None = None,
    limit_bytes: int | None = None,
    max_strategies: int = 512,
    rules: tuple[Rule, ...] | None = None,
    crossing: Traffic | None = None,
    waited: Collection[int] = (),
) -> Space:
    """The StrategyProblem of `graph` on `model`'s mesh.

    Args:
      input_pins, output_pins: by position, which layouts a constraint leaves to an argument or result leaf.
      limit_bytes: memory of one device.
      rules: of every operation, where `graph_rules` has been asked already; crossing: what crosses memory, likewise.
      waited: values that are finished before a loop (see `parts_taken`).
      max_strategies: of one operation; beyond it those with the least chance are not generated (see `busiest`), and the
        space is not `complete`. Operations of up to seven factors on three axes stay within the default.
    """
    rules = graph_rules(graph) if rules is None else rules
    graph = graph if graph.narrow_reads else narrowed(graph, rules, model.profile.kind)
    crossing = crossing or traffic(graph, rules, model.profile.kind, model.profile.usable_bytes)
    builder = _Builder(graph, model, rules, crossing, input_pins or {}, output_pins or {}, max_strategies, waited)
    return builder.build(limit_bytes)


class _Builder:
    def __init__(
        self, graph: Graph, model: CostModel, rules: tuple[Rule, ...], crossing: Traffic,
        input_pins: Mapping[int, Allowed], output_pins: Mapping[int, Allowed], cap: int, waited: Collection[int],
    ) -> None:  # fmt: skip
        self.graph, self.model, self.axes = graph, model, model.axes
        self.input_pins, self.output_pins, self.cap = input_pins, output_pins, cap
        self.rules = rules
        self.source = source_values(graph, self.rules)
        self.crossing, self.stored = crossing, crossing.stored
        self.producers, self.uses = graph.producers(), graph.uses()
        self.sharing = Sharing(graph, rules)
        self.totals = totals(graph, rules) if model.profile.kind == "tpu" else frozenset[int]()
        self.accumulating = accumulating_ops(graph)
        self.parts = parts_taken(graph, rules, self.accumulating, waited)
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.passages: list[Passage] = []
        self.settling: list[Settling] = []
        self.turnings, self.turned_ends = turnings(graph, crossing.updates, crossing.conversions, crossing.gathers)
        self.values: dict[int, Port] = {}
        self.finished: dict[int, Port] = {}
        self.finishes: dict[int, Collection[int]] = {}  # the operations that read what is finished
        self.copies: dict[int, Port] = {}
        self.copies_inside: dict[int, Port] = {}
        self.rounded: dict[int, Port] = {}
        self.rounding: dict[int, set[int]] = {}
        self.copies_behind: dict[tuple[int, tuple[int, ...]], Port] = {}
        self.held: dict[int, Port] = {}
        self.tensors: dict[int, Value] = {}  # by node: as what a copy is held
        self.reads: dict[tuple[int, int], Port] = {}
        self.taken_from: dict[tuple[int, int], Port] = {}
        self.node_op: dict[int, int] = {}
        self.exchanges: dict[int, np.ndarray] = {}
        self.node_strategies: dict[int, Strategies] = {}
        self.returned = dict(Counter(graph.outputs))
        self.complete, self._cache = True, dict[tuple[Any, ...], Any]()
        self._distinct: dict[tuple[Any, ...], np.ndarray] = {}
        self.passing = Passing(model, self._shared)
        self.memory = Usages(graph, model, crossing, self._shared)

    def build(self, limit_bytes: int | None) -> Space:
        for position, value in enumerate(self.graph.inputs):
            places = self._all(self.graph.values[value].shape)
            if position in self.input_pins:
                places = self._shared(places[self.input_pins[position](places)])
            self._value_node(value, places, self.graph.values[value].name)
            self._copy(value)
        for op, rule in zip(self.graph.ops, self.rules, strict=True):
            self._op(op, rule)
        outputs = self._outputs()
        self._usages()
        problem = StrategyProblem(
            nodes=tuple(self.nodes), edges=tuple(self.edges), usages=tuple(self.memory.usages), limit_bytes=limit_bytes
        )
        return Space(
            problem=problem, rules=self.rules, values=self.values, reads=self.reads, outputs=outputs,
            copies=self.taken_from, passages=tuple(self.passages), settling=tuple(self.settling),
            labels=tuple(node.name for node in self.nodes), node_op=self.node_op, exchanges=self.exchanges,
            strategies=self.node_strategies, complete=self.complete, start_shares=self.sharing.starts,
        )  # fmt: skip

    # -- nodes --------------------------------------------------------------------------------------------

    def _shared(self, array: np.ndarray) -> np.ndarray:
        """The first array of this content: what is made of equal ones is then made once, and known to be equal."""
        return self._distinct.setdefault((array.dtype.char, array.shape, array.tobytes()), array)

    def _all(self, shape: tuple[int, ...]) -> np.ndarray:
        key = ("all", shape)
        if key not in self._cache:
            self._cache[key] = self._shared(all_places(shape, self.axes))
        return self._cache[key]

    def _node(self, costs_s: np.ndarray, label: str) -> int:
        self.nodes.append(Node(name=label, costs_s=costs_s))
        return len(self.nodes) - 1

    def _value_node(self, value: int, places: np.ndarray, label: str) -> Port:
        held = self.graph.values[value].bytes / pieces(places, self.axes)
        port = Port(node=self._node(_HOLDING * self.model.memory_seconds(held), label), places=places)
        self.values[value] = port
        return port

    def _op(self, op: Op, rule: Rule) -> None:
        if op.primitive == "carry_next":
            carry = self.values.get(op.operands[1])
            if carry is not None:
                self.reads[op.index, 0] = carry
                self._read(op, 0, carry, tied=False, trips=op.trips)
            return
        if op.results and all([self.source[v] for v in op.results]):
            for position, value in enumerate(op.operands):
                if not self.source[value]:
                    whole = np.full((1, len(self.axes)), -1, np.int8)
                    port = Port(node=self._node(np.zeros(1), f"{op.primitive} at {op.source}"), places=whole)
                    self.reads[op.index, position] = port
                    self._read(op, position, port, tied=False, trips=op.trips)
            return
        options = self._strategies(op, rule)
        node = self._node(self._op_cost(op, rule, options), f"{op.primitive} at {op.source}")
        self.node_op[node] = op.index
        self.node_strategies[node] = options
        if rule.halos or rule.merges:
            self.exchanges[node] = self.model.exchange_seconds(op, rule, options, self.graph) * op.trips
        trips = op.trips
        if op.primitive == "scan_slice":
            trips /= self.sharing.inner_trips(op.index)  # the stacked operand is resharded once, before the loop
        # an inner loop may gather what it goes along, which the outer one could not before it began
        tied = rule.follows and not (op.primitive == "scan_slice" and len(self.sharing.around[op.index]) > 1)
        for position, value in enumerate(op.operands):
            self.reads[op.index, position] = port = Port(node=node, places=options.operands[position])
            # a norm's mean and scale are made of sums that may be scattered, and gathered for what is normalised
            self._read(op, position, port, tied=tied and not spreads(self.graph, op, value), trips=trips)
        for position, value in enumerate(op.results):
            self.values[value] = Port(node=node, places=options.results[position])
            self._finish(value, op)
            self._copy(value)
            if op.primitive == "carry_init":
                self._copy_inside(value)

    def _strategies(self, op: Op, rule: Rule) -> Strategies:
        """With sums left pending where the operation takes their parts."""
        pending = self.parts.get(op.index, ())
        key = ("strategies", id(rule), pending)
        if key not in self._cache:
            options = strategies(rule, self.axes, pending=pending)
            left = busiest(options, self.cap)
            self.complete &= len(left) == len(options)
            self._cache[key] = dataclasses.replace(
                left,
                operands=tuple(map(self._shared, left.operands)),
                results=tuple(map(self._shared, left.results)),
            )
        return self._cache[key]

    def _op_cost(self, op: Op, rule: Rule, options: Strategies) -> np.ndarray:
        moved = (self.crossing.reads[op.index], self.crossing.writes[op.index], op.index in self.crossing.sums)
        dtype = self.graph.values[op.operands[0]].dtype if op.operands else ""
        kernel, body = self.crossing.kernels[op.index], id(self.crossing.bodies.get(op.index))
        kept = self.crossing.kept(op)
        key = ("cost", id(rule), id(options), op.trips, moved, dtype, op.primitive, kernel, body, kept)
        if key not in self._cache:
            seconds = self.model.op_seconds(op, rule, options, self.graph, self.crossing)
            seconds = seconds + self.model.exchange_seconds(op, rule, options, self.graph)
            self._cache[key] = self._shared(np.ascontiguousarray(seconds * op.trips, np.float64))
        return self._cache[key]

    # -- edges --------------------------------------------------------------------------------------------

    def _finish(self, value: int, op: Op) -> None:
        """What several read of a sum that an addition left pending, or a loop, is summed once for all of them."""
        if op.primitive == "carry_init":
            readers = {o for o, p in self.sharing.after_loop(value) if p not in self.parts.get(o, ())}
            several = len(readers) + self.returned.get(value, 0) > 1
        else:
            readers = {o for o, _ in self.sharing.readers(value)}
            several = len(readers) > 1 and op.primitive in SUMS and op.index not in self.accumulating
        if several and (self.values[value].places == UNREDUCED).any():
            self.finished[value] = self._copied(value, op.trips, (), tied=True)
            self.finishes[value] = readers

    def _copy(self, value: int) -> None:
        returned = self.returned.get(value, 0)
        if len(self.uses[value]) + returned < 2:
            return
        producer = self.producers[value]
        readers = {o for o, _ in self.sharing.readers(value) if self.sharing.shares(value, o)}
        if producer < 0 or self.sharing.follows(value):
            returned = 0
        if len(readers) + returned > 1 and self.graph.values[value].shape:
            self.copies[value] = self._copied(value, self.sharing.trips(value), () if returned else readers)
            self._round(value, readers)
        if len(self.sharing.along(value)) > 1:
            self._hold(value)
        for region, behind in sorted(self.sharing.behind(value).items()):
            if len(behind) > 1 and self.graph.values[value].shape:
                self.copies_behind[value, region] = self._copied(value, self.sharing.trips(value), behind)

    def _round(self, value: int, readers: Collection[int]) -> None:
        """What some of those that share a copy round to bf16 may be resharded for these alone, rounded."""
        rounding = self.sharing.rounding(value, readers)
        if rounding and not self.tensors[self.copies[value].node].narrowed:
            self.rounding[value] = rounding
            self.rounded[value] = self._resharded(self.copies[value], value, rounding, "rounded")

    def _resharded(self, made: Port, value: int, readers: Collection[int], label: str) -> Port:
        """A decision whether `readers` take what is `made` as it lies or resharded for all of them, see `How.held`."""
        layouts = self._all(self.graph.values[value].shape)
        node = self._node(np.zeros(2 * len(layouts)), f"{label} {self.nodes[made.node].name}")
        port = Port(node=node, places=self._shared(np.concatenate([layouts, layouts])))
        self._edge(made, port, self._taken(port, value, readers), How(trips=self.sharing.trips(value), held=True))
        return port

    def _hold(self, value: int) -> None:
        """A stack that several loops go along may be resharded once, before them, and held for all of them."""
        made = self.finished.get(value, self.values[value])
        self.held[value] = self._resharded(made, value, self.sharing.along(value), "stack of")

    def _copy_inside(self, carry: int) -> None:
        """What the iterations of a loop read of its carry, they bring into layout once each."""
        readers = {o for o, _ in self.sharing.readers(carry) if self.sharing.shares_inside(carry, o)}
        if len(readers) > 1 and self.graph.values[carry].shape:
            self.copies_inside[carry] = self._copied(carry, self.graph.ops[min(readers)].trips, readers, inside=True)

    def _copied(
        self, value: int, trips: float, readers: Collection[int], *, tied: bool = False, inside: bool = False
    ) -> Port:
        """`readers`: all that take the copy; () where others do too. `inside`: of the loop that carries the value."""
        there = self.values if inside else self.finished
        made, places = there.get(value, self.values[value]), self._all(self.graph.values[value].shape)
        label = f"{'sum' if tied else 'copy'} of {self.nodes[made.node].name}"
        port = Port(node=self._node(np.zeros(len(places)), label), places=places)
        turning = together(self.turnings.get(use) for use in self.uses[value] if not readers or use[0] in readers)
        how, op = How(tied=tied, trips=trips, turning=turning), self.uses[value][0][0] if turning else -1
        self._edge(made, port, self._taken(port, value, readers), how, op)
        return port

    def _taken(self, port: Port, value: int, readers: Collection[int]) -> Value:
        """What all `readers` (operations) of a value take, who have the copy `port` alone; see `Graph.taken`."""
        reads = [(o, p) for o, p in self.sharing.readers(value) if o in readers]
        self.tensors[port.node] = self.graph.taken(value, reads) if reads else self.graph.values[value]
        return self.tensors[port.node]

    def _read(self, op: Op, position: int, port: Port, *, tied: bool, trips: float) -> None:
        value = op.operands[position]
        if self.source[value] or value not in self.values:
            return
        copy, inside = self.copies.get(value), self.copies_inside.get(value)
        region = self.sharing.region(value, op.index) if self.copies_behind else ()
        behind = self.copies_behind.get((value, region))
        if value in self.held and op.index in self.sharing.along(value):
            made, can_tie = self.held[value], self.sharing.follows(value)
        elif copy is not None and self.sharing.shares(value, op.index):
            made = self.rounded[value] if op.index in self.rounding.get(value, ()) else copy
            can_tie = not self.sharing.follows(value)
        elif behind is not None and op.index in self.sharing.behind(value)[region]:
            made, can_tie = behind, not self.sharing.follows(value)
        elif inside is not None and self.sharing.shares_inside(value, op.index):
            made, can_tie = inside, True
        else:
            finished = value in self.finished and op.index in self.finishes[value]
            made, can_tie = (self.finished if finished else self.values)[value], self.sharing.follows(value)
        if made is not self.values[value]:
            self.taken_from[op.index, position] = made
        cut = any(made is port for port in (copy, self.rounded.get(value))) and self.sharing.several(value)
        sliced, uncut, at = op.primitive == "scan_slice", op.index in self.totals, (op.index, position)
        shared = None if made is inside or made is behind else self.tensors.get(made.node)
        tensor, turning = shared or self.graph.taken(value, [at]), self.turnings.get(at)
        how = How(tied=tied and can_tie, trips=trips, sliced=sliced, cut=cut, uncut=uncut, turning=turning)
        self._edge(made, port, tensor, how, op.index)

    def _edge(self, tail: Port, head: Port, tensor: Value, how: How, op: int = -1) -> None:
        """`op`: what computes the copies in a move."""
        if tail.node == head.node:
            return
        start, gather = self.sharing.start_shares(tensor)
        how = how._replace(start_share=start, gather_share=gather, parted=tensor.index in self.crossing.parted)
        costs, allowed, moved = self.passing.edge(tail.places, head.places, tensor, how)
        if how.settled or how.turning is not None:
            seconds = self.passing.copying(tail.places, head.places, tensor, how) * how.trips
            self.settling.append(Settling(op, tail.node, head.node, seconds, how.settled))
        self.edges.append(Edge(tail=tail.node, head=head.node, costs_s=costs, allowed=allowed))
        self.passages.append(moved)

    def _outputs(self) -> dict[int, Port]:
        inputs_of = {out: inp for inp, out in self.graph.aliases}
        ports: dict[int, Port] = {}
        for position, value in enumerate(self.graph.outputs):
            made = self.copies.get(value) or self.finished.get(value) or self.values.get(value)
            if position in inputs_of:
                port = self.values[self.graph.inputs[inputs_of[position]]]
            else:
                places = self._all(self.graph.values[value].shape)
                if position in self.output_pins:
                    places = self._shared(places[self.output_pins[position](places)])
                # a source is made in any layout: the smallest is the best
                held = self.graph.values[value].bytes / pieces(places, self.axes)
                costs = _HOLDING * self.model.memory_seconds(held) if made is None else np.zeros(len(places))
                port = Port(node=self._node(costs, self.graph.output_paths[position]), places=places)
                if made is None:
                    self.memory.add(port, value, 0, max(len(self.graph.ops), 1))
            ports[position] = port
            if made is not None:
                settled = position in inputs_of and self.producers[value] >= 0
                how = How(settled=settled, turning=self.turned_ends.get(value) if settled else None)
                self._edge(made, port, self.graph.values[value], how, self.producers[value])
        return ports

    # -- memory -------------------------------------------------------------------------------------------

    def _usages(self) -> None:
        needed, intervals = self.crossing.lives
        end = max(len(self.graph.ops), 1)
        aliased, settled = dict(self.graph.aliases), settled_values(self.graph)
        for position, value in enumerate(self.graph.inputs):
            stop = end if position in aliased or position not in self.graph.donated else intervals[value].stop
            self.memory.add(self.values[value], value, 0, max(stop, 1))
        inputs, filled = set(self.graph.inputs), self.memory.add_fills(self.values)
        for value, port in self.values.items():
            if value in inputs:
                continue
            start, stop = intervals[value]
            start = min(start, filled.get(value, start))
            if not self.stored[value]:
                # nothing of it is in memory, save while a pending sum is being finished
                self.memory.add(port, value, start, start + 1, pending=True)
                continue
            if value in settled:
                # a donated argument's next value is written into its buffer, already counted to the end
                stop = self.memory.add_settled(port, value, settled[value], start, stop, intervals)
            elif value in self.returned:
                start = 0  # the caller's buffer, allocated before the step begins
            producer = self.graph.ops[self.producers[value]]
            start = producer.index if producer.primitive == "carry_init" and self.producers[value] >= 0 else start
            if value in self.finished:
                done = self.sharing.loop_after(value)[1] if producer.primitive == "carry_init" else start + 1
                self.memory.add(port, value, start, done, pending=producer.primitive != "carry_init")
                start, port = done - 1, self.finished[value]
            stop = min(stop, self.memory.given_up.get(value, stop))
            if (copy := self.copies.get(value)) is not None:
                others = [needed[o] for o, _ in self.sharing.readers(value) if not self.sharing.shares(value, o)]
                made_stop = min(max([start + 1, *others]), stop)
                if producer.primitive == "scan_stack":
                    made_stop = max(made_stop, self.sharing.around[producer.index][-1][1])
                self.memory.add(port, value, start, made_stop)
                self.memory.add(copy, value, made_stop, stop, tensor=self.tensors[copy.node])
            else:
                self.memory.add(port, value, start, stop)
        for (value, region), port in self.copies_behind.items():
            if value in inputs or self.stored[value]:
                readers = self.sharing.behind(value)[region]
                stop = max(needed[o] for o in readers)
                self.memory.add(port, value, min(readers), stop, tensor=self.tensors[port.node])
        for value, port in self.rounded.items():
            stop = max(needed[o] for o in self.rounding[value])
            self.memory.add(port, value, min(self.rounding[value]), stop, held=True, tensor=self.tensors[port.node])
        twice = self.memory.add_stacks(self.values, self.held)
        for value, port in self.held.items():
            loops = [self.sharing.around[o][-1] for o in self.sharing.along(value)]
            start, stop = min(loops)[0], max(stop for _, stop in loops)
            self.memory.add(port, value, start, stop, held=value not in twice, tensor=self.tensors[port.node])
        self.memory.add_scratch(self.reads, self.values, self.node_strategies)


_HOLDING = 1e-3
"""Share of the time to read an argument that holding it costs, so that of equals the one that holds less is taken:
slicing is free, and so would be a whole batch on every device."""
