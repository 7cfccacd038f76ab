"""What to tell a user whose budget no plan fits."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from ..cost import CostModel, MemoryProfile
from ..hardware import axis_links
from ..search import Allowed, Space, build
from ..sharding import MeshAxes
from ..units import format_bytes
from .candidates import Pipeline
from .found import Nothing
from .least import near_least_peak

_LARGEST_GROWTH = 64
"""Times as many devices as the user has, at most, in the advice on a larger mesh."""
_PATIENCE_S = 20.0
"""A refusal is not worth a longer search."""


def explain_infeasible(pipeline: Pipeline, outcome: Nothing, pins: Mapping[int, Allowed]) -> str:
    """The least reachable peak, what it is made of, what would help, and the smallest mesh that fits."""
    traced, target, space, budget_bytes = (
        pipeline.traced,
        pipeline.target,
        outcome.space,
        pipeline.budget_bytes,
    )
    mesh = ", ".join(f"{n}={s}" for n, s in target.axes)
    memory = outcome.least or _least_memory(pipeline, space, target.axes)
    if memory is None:
        return (
            f"no plan for `{traced.name}` on mesh ({mesh}): the constraints leave no possible layout "
            f"({outcome.result.reason}). Loosen them with PartitionSpec.UNCONSTRAINED."
        )
    parts = ", ".join(
        f"{format_bytes(size)} {part}" for part, size in sorted(memory.parts.items(), key=lambda p: -p[1])
    )
    where = traced.graph.ops[memory.peak_op].source if traced.graph.ops else "the start"
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
    """Grow one mesh axis at a time by doubling; the first mesh that fits, or None when none is found in time."""
    axes = pipeline.target.axes
    deadline = time.monotonic() + _PATIENCE_S
    growth = 2
    while growth <= _LARGEST_GROWTH:
        for grown in range(len(axes)):
            if time.monotonic() > deadline:
                return None
            larger = tuple((n, s * growth if a == grown else s) for a, (n, s) in enumerate(axes))
            if pipeline.fits_nothing(larger):
                continue
            memory = _least_memory(
                pipeline, _space(pipeline, larger), larger, only_within=pipeline.budget_bytes
            )
            if memory is not None and memory.peak_bytes <= pipeline.budget_bytes:
                return larger
        growth *= 2
    return None


def _space(pipeline: Pipeline, axes: MeshAxes) -> Space:
    links = axis_links(pipeline.target.profile, axes)
    model = CostModel(
        profile=pipeline.target.profile,
        axes=axes,
        links=tuple(links[n] for n, _ in axes),
        exposed=pipeline.model.exposed,
    )
    return build(
        pipeline.graph, model, rules=pipeline.rules, crossing=pipeline.crossing, limit_bytes=None,
        max_strategies=pipeline.options.max_strategies, waited=pipeline.waited,
    )  # fmt: skip


def _least_memory(
    pipeline: Pipeline, space: Space, axes: MeshAxes, *, only_within: float = math.inf
) -> MemoryProfile | None:
    """Memory of the cheapest assignment near the least peak; None when nothing is possible (or within reach)."""
    decision, _ = near_least_peak(space, pipeline.options.seed, only_within=only_within)
    if decision is None:
        return None
    return pipeline.simulate(decision, axes)
