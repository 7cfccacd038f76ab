"""A checked candidate -> the Plan that the user gets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from ..cost import CostModel, collective_wire_bytes, excess_wire_bytes, filled_shares, product_times
from ..hardware import xla_times
from ..ir import Traced, users_line
from ..plans import Alternative, Plan, PlanCost, PlannedCollective, TensorPlan
from ..sharding import NONE, UNREDUCED, Layout, layout_of_places, pieces, places_of_layout
from ..units import format_seconds
from .meshes import Target
from .options import TEMPLATES, Options
from .repeated import repeated
from .schedule import planned_tasks
from .xla_writer import Kernels

MOST_ALTERNATIVES = 8
"""Layouts of one input that a plan tells the price of, the cheapest ones."""

_WORTH_TELLING = 0.002
"""Share of the step below which an unplanned collective is listed with the others but not warned of."""

if TYPE_CHECKING:
    from .candidates import Pipeline
    from .found import Candidate


def finished_plan(
    pipeline: Pipeline, best: Candidate, templates: Mapping[str, float], search_s: float
) -> Plan:
    """Write a candidate up: tensors, collectives as the partitioner inserts them, cost, warnings."""
    traced, target, options = pipeline.traced, pipeline.target, pipeline.options
    collectives = _collectives(traced, pipeline.model, best)
    unruled = _unruled(traced, pipeline.model, best)
    alike = repeated(traced, pipeline.kinds, pipeline.batch_dims, target.axes, best)
    warnings = (*alike, *_warnings(traced, pipeline.model, best, unruled))
    return Plan(
        name=traced.name,
        fingerprint=traced.fingerprint,
        axes=target.axes,
        device_kind=target.device_kind,
        hardware=target.profile.name,
        budget_bytes=pipeline.budget_bytes,
        inputs=_inputs(traced, target, best, pipeline.kinds),
        outputs=_outputs(traced, target, best),
        constraints=best.checked.constraints,
        collectives=collectives,
        cost=_cost(pipeline, best, collectives, search_s),
        warnings=warnings,
        assumptions=(*traced.graph.assumptions, *_stated(options), *_folded(best), *_rounded(pipeline)),
        alternatives=_alternatives(traced, target, best, pipeline.budget_bytes, options.overlap),
        templates=dict(sorted(templates.items())),
        unruled_s={primitive: seconds for primitive, (_, seconds) in sorted(unruled.items())},
        tasks=planned_tasks(
            traced.graph, best.found.decision.compute_s, best.found.decision.settled_s, best.checked.collectives,
            best.sent, pipeline.model, best.found.memory.heap, _kernels(pipeline, best),
        ),
        search=best.name,
        jax_version=jax.__version__,
        mesh=target.mesh,
        in_tree=traced.in_tree,
        out_tree=traced.out_tree,
    )


def _kernels(pipeline: Pipeline, best: Candidate) -> Kernels | None:
    graph, crossing, target = pipeline.traced.graph, pipeline.crossing, pipeline.target
    times = xla_times(target.profile)
    if times is None:
        return None
    values, reads = best.found.decision.values, best.found.decision.reads
    partial = {value for value, row in values.items() if UNREDUCED in row}
    operands = {key: graph.ops[key[0]].operands[key[1]] for key in reads}
    moved = {key for key, v in operands.items() if v not in values or _is_sent(values[v], reads[key])}
    leaving = {graph.outputs[place]: row for place, row in best.found.decision.outputs.items()}
    results = {v for v, row in leaving.items() if v in values and _is_sent(values[v], row)}
    return Kernels(
        stored=crossing.stored, moved=moved, partial=partial, results=results,
        products_s=product_times(graph, target.axes, reads, times), times=times,
        filled=filled_shares(graph, crossing.reads, crossing.writes),
    )  # fmt: skip


def _is_sent(made: np.ndarray, read: np.ndarray) -> bool:
    """Whether a layout takes communication to become another: what is whole is cut where it lies."""
    return bool(((made != read) & (made != NONE)).any())


def _stated(options: Options) -> tuple[str, ...]:
    return (
        f"{options.overlap:.0%} of every collective is taken to be hidden behind computation (options.overlap)",
    )


def _folded(best: Candidate) -> tuple[str, ...]:
    result = best.found.result
    if result.folded_s is None:
        return ()
    gain = (result.folded_s - result.objective_s) / result.folded_s if result.folded_s else 0.0
    apart = f"; letting them differ gained {gain:.2%}" if gain > 0 else ""
    return (f"layers that are alike were decided once (options.fold){apart}",)


def _rounded(pipeline: Pipeline) -> tuple[str, ...]:
    rounded = any(value.narrowed for value in pipeline.graph.values)
    said = "f32 that only products read lies in memory and is sent in bf16, at jax's default matmul precision on TPU"
    return (said,) if rounded else ()


def _local(size: float, layout: Layout, target: Target) -> int:
    return int(np.ceil(size / layout.shards(target.axes)))


def _inputs(traced: Traced, target: Target, best: Candidate, kinds: Sequence[str]) -> tuple[TensorPlan, ...]:
    graph = traced.graph
    next_of = {i: traced.outputs[o].path for i, o in graph.aliases}
    return tuple(
        TensorPlan(
            path=leaf.path, shape=leaf.shape, dtype=leaf.dtype, layout=layout, bytes=int(graph.values[v].bytes),
            local_bytes=_local(graph.values[v].bytes, layout, target), alias=next_of.get(i, ""), kind=kinds[i],
            donated=i in graph.donated, host=leaf.host,
        )
        for i, (leaf, v, layout) in enumerate(zip(traced.inputs, graph.inputs, best.inputs, strict=True))
    )  # fmt: skip


def _outputs(traced: Traced, target: Target, best: Candidate) -> tuple[TensorPlan, ...]:
    graph = traced.graph
    from_input = {o: traced.inputs[i].path for i, o in graph.aliases}
    return tuple(
        TensorPlan(
            path=leaf.path, shape=leaf.shape, dtype=leaf.dtype, layout=layout, bytes=int(graph.values[v].bytes),
            local_bytes=_local(graph.values[v].bytes, layout, target), alias=from_input.get(i, ""), kind="result",
            host=leaf.host,
        )
        for i, (leaf, v, layout) in enumerate(zip(traced.outputs, graph.outputs, best.outputs, strict=True))
    )  # fmt: skip


def _collectives(traced: Traced, model: CostModel, best: Candidate) -> tuple[PlannedCollective, ...]:
    rows = []
    for (item, op_index), one in zip(best.checked.collectives, best.sent, strict=True):
        if item.kind == "all_slice":
            continue  # every device keeps a part of what it has: nothing is sent
        op = traced.graph.ops[op_index] if 0 <= op_index < len(traced.graph.ops) else None
        kind, sizes = model.compiled_kind(item.kind, item.axes), [model.link(a).size for a in item.axes]
        wire_bytes = collective_wire_bytes(kind, item.bytes, sizes) + excess_wire_bytes(item.excess, math.prod(sizes))
        rows.append(
            PlannedCollective(
                kind=kind,
                axes=tuple(item.axes),
                bytes=int(item.bytes),
                wire_bytes=int(wire_bytes),
                trips=item.trips,
                seconds_s=one.seconds_s,
                where=op.source if op else item.scope,
                primitive=op.primitive if op else "",
            )
        )
    return tuple(rows)


def _cost(
    pipeline: Pipeline, best: Candidate, rows: Sequence[PlannedCollective], search_s: float
) -> PlanCost:
    seconds: dict[str, float] = {}
    sent: dict[str, int] = {}
    for row in rows:
        name = "+".join(row.axes)
        seconds[name] = seconds.get(name, 0.0) + row.seconds_s
        sent[name] = sent.get(name, 0) + int(row.wire_bytes * row.trips)
    ops, options = pipeline.graph.ops, pipeline.options
    objective_s = best.searched_s(best.found.result.objective_s, options.overlap)
    # a search cut short may have proved nothing: no step takes less
    bound_s = best.searched_s(max(best.found.result.bound_s, 0.0), options.overlap)
    return PlanCost(
        step_s=best.step_s(options.overlap),
        compute_s=best.compute_s,
        comm_s=best.comm_s,
        exposed_comm_s=best.comm_s * (1 - options.overlap),
        comm_s_by_axis=dict(sorted(seconds.items())),
        comm_bytes=sum(sent.values()),
        comm_bytes_by_axis=dict(sorted(sent.items())),
        peak_bytes=best.found.memory.peak_bytes,
        peak_parts=dict(best.found.memory.parts),
        peak_where=ops[best.found.memory.peak_op].source if ops else "",
        termination="template" if best.name in TEMPLATES else best.found.result.termination.value,
        objective_s=objective_s,
        bound_s=bound_s,
        flops_by_source=_flops_by_source(pipeline, best),
        gap=(objective_s - bound_s) / objective_s if objective_s > bound_s else 0.0,
        search_s=search_s,
    )


def _flops_by_source(pipeline: Pipeline, best: Candidate) -> dict[str, float]:
    space, found, ops = best.found.space, best.found.result, pipeline.graph.ops
    flops: dict[str, float] = {}

    def add(source: str, amount: float) -> None:
        line = users_line(source)
        flops[line] = flops.get(line, 0.0) + amount

    for node, index in space.node_op.items():
        rule = space.rules[index]
        if rule.matmul:
            share = float(space.strategies[node].shares[found.assignment[node]])
            add(ops[index].source, (rule.flops - rule.empty_flops) * share * ops[index].trips)
    for index, body in pipeline.crossing.bodies.items():
        for source, amount in body.products():
            add(source, amount * ops[index].trips)
    return dict(sorted(flops.items()))


def _unruled(traced: Traced, model: CostModel, best: Candidate) -> dict[str, tuple[str, float]]:
    """Of each primitive without a rule: where it stands first, and the seconds a step of all its operations."""
    graph, found = traced.graph, best.found
    unruled: dict[str, tuple[str, float]] = {}
    of_op: dict[int, str] = {}
    for op, rule in zip(graph.ops, found.space.rules, strict=True):
        # of single numbers there is nothing to cut
        if rule.note and any(math.prod(graph.values[v].shape) > 1 for v in (*op.operands, *op.results)):
            source, seconds = unruled.get(op.primitive, (op.source, 0.0))
            unruled[op.primitive] = (source, seconds + found.decision.compute_s.get(op.index, 0.0))
            of_op[op.index] = op.primitive
    for item, op_index in best.checked.collectives:
        if op_index in of_op and item.kind != "all_slice":
            source, seconds = unruled[of_op[op_index]]
            seconds += model.collective_over(item.kind, item.bytes, item.axes) * item.trips
            unruled[of_op[op_index]] = (source, seconds)
    return unruled


def _warnings(
    traced: Traced, model: CostModel, best: Candidate, unruled: Mapping[str, tuple[str, float]]
) -> tuple[str, ...]:
    graph = traced.graph
    warnings = [
        f"`{primitive}` at {source} has no sharding rule and is replicated: {format_seconds(seconds)} a step (counted "
        "in the cost); jaxplan.register_rule can give it one"
        for primitive, (source, seconds) in sorted(unruled.items())
    ]
    extra: dict[tuple[str, str], float] = {}
    for item, op_index in best.checked.unplanned:
        where = graph.ops[op_index].source if 0 <= op_index < len(graph.ops) else item.scope
        key = (f"{item.kind} over {'+'.join(item.axes)}", where)
        extra[key] = (
            extra.get(key, 0.0) + model.collective_over(item.kind, item.bytes, item.axes) * item.trips
        )
    worth_telling = [(k, s) for k, s in extra.items() if s > _WORTH_TELLING * best.step_s(0.0)]
    for (what, where), seconds in sorted(worth_telling, key=lambda e: (-e[1], e[0])):
        warnings.append(
            f"the partitioner adds {what} at {where}, which the search did not plan: {format_seconds(seconds)} a step "
            "(counted in the cost)"
        )
    return (*warnings, *best.checked.warnings)


def _alternatives(
    traced: Traced, target: Target, best: Candidate, budget_bytes: int, overlap: float
) -> dict[str, tuple[Alternative, ...]]:
    """For every input leaf what its other layouts would cost, its neighbours' choices kept.

    An upper bound: a new search with that layout pinned can only do better.
    """
    problem, assignment = best.found.space.problem, best.found.result.assignment
    whole_s = best.searched_s(best.found.result.objective_s, overlap)
    inputs = {best.found.space.values[value].node for value in traced.graph.inputs}
    adjacent: dict[int, list[tuple[int, np.ndarray, np.ndarray | None, bool]]] = {node: [] for node in inputs}
    for edge in problem.edges:
        if edge.tail in inputs:
            adjacent[edge.tail].append((edge.head, edge.costs_s, edge.allowed, True))
        if edge.head in inputs:
            adjacent[edge.head].append((edge.tail, edge.costs_s, edge.allowed, False))
    layouts: dict[tuple[int, int, int], Layout] = {}
    parts: dict[int, np.ndarray] = {}
    rows: dict[str, tuple[Alternative, ...]] = {}
    for position, (leaf, value) in enumerate(zip(traced.inputs, traced.graph.inputs, strict=True)):
        port = best.found.space.values[value]
        total = problem.nodes[port.node].costs_s.copy()
        possible = np.ones(len(total), bool)
        for other, costs, allowed, first in adjacent[port.node]:
            total += costs[:, assignment[other]] if first else costs[assignment[other], :]
            if allowed is not None:
                possible &= allowed[:, assignment[other]] if first else allowed[assignment[other], :]
        chosen = places_of_layout(best.inputs[position], target.axes)
        objective_s = whole_s + (total - total[assignment[port.node]])
        peak = best.found.memory.peak_bytes - _local(
            traced.graph.values[value].bytes, best.inputs[position], target
        )
        others = np.flatnonzero(possible & (port.places != chosen).any(axis=1))
        # only those that can be among the cheapest are written up; of equal ones the text decides
        far = np.inf
        if len(others) > MOST_ALTERNATIVES:
            far = np.partition(objective_s[others], MOST_ALTERNATIVES - 1)[MOST_ALTERNATIVES - 1]
        if id(port.places) not in parts:
            parts[id(port.places)] = pieces(port.places, target.axes)
        found = []
        for i in others[objective_s[others] <= far].tolist():
            key = id(port.places), i, len(leaf.shape)
            if key not in layouts:
                layouts[key] = layout_of_places(port.places[i], len(leaf.shape), target.axes)
            held = peak + int(traced.graph.values[value].bytes / parts[id(port.places)][i])
            found.append(
                Alternative(layout=layouts[key], objective_s=float(objective_s[i]), fits=held <= budget_bytes)
            )
        rows[leaf.path] = tuple(sorted(found, key=lambda a: (a.objective_s, str(a.layout))))[:MOST_ALTERNATIVES]
    return rows
