"""What to tell a user whose budget no plan fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..cost import CostModel, simulate_memory
from ..hardware import axis_links
from ..search import least_peak
from ..search.build import Allowed, build
from ..search.space import decide
from ..sharding import MeshAxes
from ..units import format_bytes

if TYPE_CHECKING:
    from .candidates import Nothing, Pipeline

_LARGEST_GROWTH = 64


def explain_infeasible(pipeline: Pipeline, outcome: Nothing, pins: Mapping[int, Allowed]) -> str:
    """The least reachable peak, what it is made of, what would help, and the smallest mesh that fits."""
    traced, target, space, budget_bytes = (
        pipeline.traced,
        pipeline.target,
        outcome.space,
        pipeline.budget_bytes,
    )
    mesh = ", ".join(f"{n}={s}" for n, s in target.axes)
    least = least_peak(space.problem)
    if not least.assignment:
        return (
            f"no plan for `{traced.name}` on mesh ({mesh}): the constraints leave no possible layout "
            f"({outcome.result.reason}). Loosen them with PartitionSpec.UNCONSTRAINED."
        )
    decision = decide(space, least.assignment)
    memory = pipeline.simulate(decision)
    parts = ", ".join(
        f"{format_bytes(size)} {part}" for part, size in sorted(memory.parts.items(), key=lambda p: -p[1])
    )
    where = traced.graph.ops[memory.peak_time].source if traced.graph.ops else "the start"
    lines = [
        f"no plan for `{traced.name}` on mesh ({mesh}) fits {format_bytes(budget_bytes)} a device.",
        f"Smallest reachable peak: {format_bytes(memory.peak_bytes)} at {where}, made of {parts}.",
    ]
    ways = [f"raise `memory_budget` to {format_bytes(memory.peak_bytes * 1.01)} or more"]
    larger = _smallest_mesh(pipeline)
    if larger:
        ways.append(f"use a larger mesh: ({', '.join(f'{n}={s}' for n, s in larger)}) fits")
    if traced.graph.aliases and not traced.graph.donated:
        ways.append("donate the state (donate_argnums=0), so that old and new state share one buffer")
    if memory.parts.get("residuals", 0) + memory.parts.get("activations", 0) > memory.peak_bytes // 3:
        ways.append(
            "recompute activations in the backward pass (jax.checkpoint / nn.remat) or use a smaller batch"
        )
    if pins:
        ways.append(f"loosen the {len(pins)} constrained tensors")
    return " ".join(lines) + " Ways out: " + "; ".join(ways) + "."


def _smallest_mesh(pipeline: Pipeline) -> MeshAxes | None:
    """Grow one mesh axis at a time by doubling; the first mesh whose least peak fits, or None."""
    axes = pipeline.target.axes
    growth = 2
    while growth <= _LARGEST_GROWTH:
        for grown in range(len(axes)):
            larger = tuple((n, s * growth if a == grown else s) for a, (n, s) in enumerate(axes))
            if _least_bytes(pipeline, larger) <= pipeline.budget_bytes:
                return larger
        growth *= 2
    return None


def _least_bytes(pipeline: Pipeline, axes: MeshAxes) -> int:
    links = axis_links(pipeline.target.profile, axes)
    model = CostModel(
        profile=pipeline.target.profile,
        axes=axes,
        links=tuple(links[n] for n, _ in axes),
        exposed=pipeline.model.exposed,
    )
    graph = pipeline.traced.graph
    space = build(graph, model, limit_bytes=None, max_strategies=pipeline.options.max_strategies)
    decision = decide(space, least_peak(space.problem).assignment)
    memory = simulate_memory(graph, axes, pipeline.stored, pipeline.kinds, decision.values, decision.reads)
    return memory.peak_bytes
