"""Refining: the best plans are compiled for the target, what XLA made of each is priced, and the fastest is kept.

The planner's own prices choose what is compiled; `lowering.yardstick`, which knows nothing of the plan, chooses what is
kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
from jax.sharding import Mesh

from ..errors import ArgumentError
from ..hardware import compile_for
from ..lowering import CompiledPrice, compiled_memory, compiled_price, lower_flat, refused_bytes
from ..units import format_bytes, format_seconds
from .candidates import Pipeline
from .found import Candidate, Found


def require_devices(mesh: object) -> None:
    """Compiling needs devices, if only compile-only ones.

    Raises:
      ArgumentError: `mesh` has none.
    """
    if not isinstance(mesh, Mesh):
        raise ArgumentError(
            "options.refine compiles plans, and an AbstractMesh has no devices to compile for: plan on a mesh of "
            'devices, or on a compile-only one such as jaxplan.target("tpu-v5e:2x4").mesh(data=4, model=2)'
        )


def refined(
    pipeline: Pipeline, best: Candidate, rivals: Mapping[str, Found], budget_bytes: int
) -> tuple[Candidate, tuple[str, ...], int | None]:
    """The fastest of the `options.refine` best distinct plans as compiled, and a line of what was tried for each.

    Where none fits as compiled, the one that takes least, and how many bytes a device that is.

    Args:
      best: the search's choice, compiled in any case; rivals: the templates that fit, by name.
      budget_bytes: what has to do for a plan as compiled.
    """
    tried: list[tuple[float, Candidate]] = []
    over: list[tuple[int, Candidate]] = []
    lines = []
    for candidate in _distinct(pipeline, best, rivals):
        pipeline.say(f"compiling {candidate.name}")
        try:
            price, peak_bytes = _compiled(pipeline, candidate)
        except jax.errors.JaxRuntimeError as refused:
            lines.append(
                f"refined: {candidate.name} is refused by the compiler: {str(refused).splitlines()[0]}"
            )
            wanted = refused_bytes(refused)
            if wanted is not None:
                over.append((wanted, candidate))
            continue
        fits = peak_bytes <= budget_bytes
        lines.append(
            f"refined: {candidate.name} as compiled {format_seconds(price.step_s)} ({price.rule} and collectives), "
            f"{format_bytes(peak_bytes)}{'' if fits else ', over budget'}; "
            f"predicted {format_seconds(candidate.step_s(0.0))}"
        )
        if fits:
            tried.append((price.step_s, candidate))
        else:
            over.append((peak_bytes, candidate))
    if not tried and over:
        least_bytes, candidate = min(over, key=lambda pair: pair[0])
        return candidate, tuple(lines), least_bytes
    return (min(tried, key=lambda pair: pair[0])[1] if tried else best), tuple(lines), None


def _distinct(pipeline: Pipeline, best: Candidate, rivals: Mapping[str, Found]) -> Sequence[Candidate]:
    chosen = [best]
    for name, found in sorted(rivals.items(), key=lambda rival: rival[1].result.objective_s):
        if len(chosen) == pipeline.options.refine:
            break
        if name != best.name:
            candidate = pipeline.checked(name, found)
            if all(_layouts(candidate) != _layouts(other) for other in chosen):
                chosen.append(candidate)
    return chosen


def _layouts(candidate: Candidate) -> object:
    return candidate.inputs, candidate.outputs, frozenset(candidate.checked.constraints)


def _compiled(pipeline: Pipeline, candidate: Candidate) -> tuple[CompiledPrice, int]:
    traced, mesh = pipeline.traced, pipeline.target.mesh
    lowered = lower_flat(
        traced,
        candidate.checked.constraints,
        mesh,
        candidate.inputs,
        candidate.outputs,
        donate=traced.graph.donated,
    )
    compiled = compile_for(lowered, mesh)
    text = compiled.as_text()
    price = compiled_price(text, pipeline.model, while_trips=pipeline.options.while_trips)
    return price, compiled_memory(compiled).peak_bytes
