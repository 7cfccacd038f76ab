"""One evaluator for any shardings of a step: what they cost by our models, as the partitioner carries them out.

No solver and no compiler: the step is lowered, Shardy's own passes decide every layout and every collective, and the
models price those.  A plan, a template and shardings written by hand come out comparable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..cost import (
    CostModel,
    MemoryProfile,
    Traffic,
    idle,
    narrowed,
    source_values,
    step_memory,
    together,
    traffic,
    turnings,
)
from ..ir import Graph, Traced, summed_behind_loops
from ..plans import Constraint
from ..sharding import Collective, Layout, Rule, partition, start_shares_of
from .ahead import waited_values
from .check import in_words, operation_of
from .jit import lower_flat
from .realised import Realised, realised
from .sent import as_sent, collective_prices


@dataclass(frozen=True, kw_only=True)
class Priced:
    """What a step costs under given shardings; one device, one step.

    Attributes:
      inputs, outputs: the layouts of all leaves, those that were left open as propagation decides them.
      op_seconds: compute of every operation, with the copy of what it makes into the place of an argument; flops: of
        every matrix product.
      collectives: with the operation that needs each (-1: unknown) and the seconds of all its runs.
      warnings: what the partitioner could not express.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    op_seconds: Mapping[int, float]
    flops: Mapping[int, float]
    collectives: tuple[tuple[Collective, int, float], ...]
    memory: MemoryProfile
    realised: Realised
    warnings: tuple[str, ...]

    @property
    def compute_s(self) -> float:
        """Seconds of computation."""
        return sum(self.op_seconds.values())

    @property
    def comm_s(self) -> float:
        """Seconds of communication, hidden or not."""
        return sum(seconds for _, _, seconds in self.collectives)

    def step_s(self, overlap: float = 0.0) -> float:
        """Seconds of a step when `overlap` of the communication is hidden."""
        return self.compute_s + (1 - overlap) * self.comm_s


def price(
    traced: Traced,
    rules: Sequence[Rule],
    kinds: Sequence[str],
    model: CostModel,
    mesh: Any,
    inputs: Sequence[Layout | None],
    outputs: Sequence[Layout | None],
    constraints: Sequence[Constraint] = (),
    *,
    platform: str,
    while_trips: float = 16.0,
) -> Priced:
    """Price the step with its leaves laid out as given.

    Args:
      rules, kinds: of `traced.graph`'s operations and inputs.
      mesh: with Auto axes; devices are not needed.
      inputs, outputs: None leaves a leaf to propagation.
      constraints: pinned inside the step, beside those that the user wrote there.
    """
    graph = traced.graph
    lowered = lower_flat(traced, constraints, mesh, inputs, outputs, platform=platform)
    text = lowered.compiler_ir("stablehlo").operation.get_asm(enable_debug_info=True)
    found = partition(text, platform=platform, while_trips=while_trips, flows=True)
    layouts = tuple(Layout(dims=dims) for dims in found.input_layouts)
    where = realised(graph, rules, model.axes, layouts, found)
    refined = replace(model, axes=where.axes, links=tuple(model.link(name) for name, _ in where.axes))
    graph = narrowed(graph, rules, model.profile.kind)
    crossing = traffic(graph, rules, model.profile.kind, model.profile.usable_bytes)
    seconds, flops = {}, {}
    free = source_values(graph, rules)
    for op in graph.ops:
        rule, strategy = rules[op.index], where.strategies[op.index]
        if idle(op, free):
            continue
        once = refined.op_seconds(op, rule, strategy, graph, crossing)
        seconds[op.index] = float(once[0]) * op.trips
        if rule.matmul:
            flops[op.index] = (rule.flops - rule.empty_flops) * float(strategy.shares[0]) * op.trips
        elif op.index in crossing.bodies:
            flops[op.index] = sum(amount for _, amount in crossing.bodies[op.index].products()) * op.trips
    for op_index, settling_s in _copying(graph, refined, crossing, where):
        seconds[op_index] = seconds.get(op_index, 0.0) + settling_s
    asked = [(c, operation_of(c.scope)) for c in found.collectives if c.kind != "all_slice"]
    if model.profile.kind in ("tpu", "gpu"):
        behind = summed_behind_loops(graph)
        asked = [(_behind_its_loop(c, behind.get(op, 1.0)), op) for c, op in asked]
    sent = as_sent(graph, where.values, where.reads, asked, where.axes, model)
    waited = waited_values(traced)
    prices = collective_prices(graph, start_shares_of(graph, rules), model, crossing, sent, waited)
    collectives = tuple((c, op, paid.seconds_s) for (c, op), paid in zip(sent, prices, strict=True))
    memory = step_memory(
        graph, where.axes, model, crossing, kinds, where.values, where.reads, waited, where.outputs,
        seconds,
    )  # fmt: skip
    return Priced(
        inputs=layouts,
        outputs=tuple(Layout(dims=dims) for dims in found.output_layouts),
        op_seconds=seconds,
        flops=flops,
        collectives=collectives,
        memory=memory,
        realised=where,
        warnings=tuple(in_words(graph, warning) for warning in found.warnings),
    )


def _behind_its_loop(item: Collective, trips: float) -> Collective:
    """An all_reduce that runs once for all of a loop's `trips`."""
    return replace(item, trips=item.trips / trips) if item.kind == "all_reduce" and item.trips >= trips > 1 else item


def _copying(graph: Graph, model: CostModel, crossing: Traffic, where: Realised) -> Iterator[tuple[int, float]]:
    """(operation, seconds) of copies beside what is moved; see `settling_seconds` and `turned_seconds`."""
    producers = graph.producers()
    reads, ends = turnings(graph, crossing.updates, crossing.conversions, crossing.gathers)
    moves: dict[tuple[int, bytes], list[tuple[int, int]]] = {}
    for use in sorted(reads.keys() & where.reads.keys()):
        moves.setdefault((graph.ops[use[0]].operands[use[1]], where.reads[use].tobytes()), []).append(use)
    for (value, _), uses in moves.items():
        made, turning = where.values.get(value), together(map(reads.get, uses))
        if made is not None and turning is not None:
            copied_s = model.turned_seconds(turning, made[None], where.reads[uses[0]][None])
            yield uses[0][0], float(copied_s[0, 0]) * graph.ops[uses[0][0]].trips
    for position, result in graph.aliases:
        value, kept = graph.outputs[result], where.values[graph.inputs[position]]
        made = where.values.get(value)
        if producers[value] >= 0 and made is not None and not np.array_equal(made, kept):
            copied_s = model.settling_seconds(made[None], kept[None], graph.values[value])
            if value in ends:
                copied_s = copied_s + model.turned_seconds(ends[value], made[None], kept[None])
            yield producers[value], float(copied_s[0, 0])
