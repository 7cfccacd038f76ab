"""What to tell a user whose budget no plan fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..cost import CostModel, simulate_memory
from ..hardware import axis_links
from ..ir import Traced
from ..search import SearchResult, least_peak
from ..search.build import Allowed, build
from ..search.space import Space, decide
from ..sharding import MeshAxes
from ..units import format_bytes
from .meshes import Target

if TYPE_CHECKING:
    from .planner import _Pipeline

_LARGEST_GROWTH = 64


def explain_infeasible(
    traced: Traced, target: Target, pipeline: _Pipeline, space: Space, result: SearchResult, *,
    budget_bytes: int, pins: Mapping[int, Allowed],
) -> str:  # fmt: skip
    """The least reachable peak, what it is made of, what would help, and the smallest mesh that fits."""
    mesh = ", ".join(f"{n}={s}" for n, s in target.axes)
    least = least_peak(space.problem)
    if not least.assignment:
        return (
            f"no plan for `{traced.name}` on mesh ({mesh}): the constraints leave no possible layout ({result.reason}). "
            "Loosen them with PartitionSpec.UNCONSTRAINED."
        )
    decision = decide(space, least.assignment)
    memory = simulate_memory(
        traced.graph, target.axes, pipeline.stored, pipeline.kinds, decision.values, decision.reads
    )
    parts = ", ".join(
        f"{format_bytes(size)} {part}" for part, size in sorted(memory.parts.items(), key=lambda p: -p[1])
    )
    where = traced.graph.ops[memory.peak_time].source if traced.graph.ops else "the start"
    lines = [
        f"no plan for `{traced.name}` on mesh ({mesh}) fits {format_bytes(budget_bytes)} a device.",
        f"Smallest reachable peak: {format_bytes(memory.peak_bytes)} at {where}, made of {parts}.",
    ]
    ways = [f"raise `memory_budget` to {format_bytes(memory.peak_bytes * 1.01)} or more"]
    larger = _smallest_mesh(traced, target, pipeline, budget_bytes)
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


def _smallest_mesh(traced: Traced, target: Target, pipeline: Any, budget_bytes: int) -> MeshAxes | None:
    """Grow one mesh axis at a time by doubling; the first mesh whose least peak fits, or None."""
    growth = 2
    while growth <= _LARGEST_GROWTH:
        for grown in range(len(target.axes)):
            axes = tuple((n, s * growth if a == grown else s) for a, (n, s) in enumerate(target.axes))
            if _least_bytes(traced, target, pipeline, axes) <= budget_bytes:
                return axes
        growth *= 2
    return None


def _least_bytes(traced: Traced, target: Target, pipeline: Any, axes: MeshAxes) -> int:
    links = axis_links(target.profile, axes)
    model = CostModel(profile=target.profile, axes=axes, links=tuple(links[n] for n, _ in axes))
    space = build(traced.graph, model, limit_bytes=None, max_strategies=pipeline.options.max_strategies)
    least = least_peak(space.problem)
    decision = decide(space, least.assignment)
    memory = simulate_memory(
        traced.graph, axes, pipeline.stored, pipeline.kinds, decision.values, decision.reads
    )
    return memory.peak_bytes
