"""`jaxplan.compare`: what every search makes of one and the same problem, beside the bound that is proved."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..api import Options, as_options, auto_shard
from ..errors import ArgumentError, InfeasibleError
from ..search import SEARCHES, Evaluator, SearchResult, StrategyProblem
from ..units import format_bytes, format_seconds

RIVALS = ("ilp", "ft", "optcnn", "dp", "mcmc", "lambda", "random", "templates")
"""The searches that are compared where none are named."""


@dataclass(frozen=True, kw_only=True)
class Rival:
    """What one search found.

    Attributes:
      search: its name; result: as the search returns it, with what was found when.
      gap: how much dearer than the best bound that any of the searches proved, relatively; infinite where it found
        nothing.
    """

    search: str
    result: SearchResult
    gap: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Searches of one problem, each given the same time and the same plans to begin from.

    Attributes:
      name: of the step; mesh, hardware: in words; nodes, edges: of the problem; limit_s: what each search was given.
      templates: the step times of the hand-written plans that fit, on the same problem.
      bound_s: the best that was proved.
      rivals: in the order that was asked for.
    """

    name: str
    mesh: str
    hardware: str
    nodes: int
    edges: int
    limit_s: float
    templates: Mapping[str, float]
    bound_s: float
    rivals: tuple[Rival, ...]

    def __str__(self) -> str:
        best = min(self.templates.items(), key=lambda item: item[1], default=None)
        lines = [
            f"Searches of `{self.name}` on ({self.mesh}), {self.hardware}: {self.nodes} nodes, {self.edges} edges; "
            f"{format_seconds(self.limit_s)} each",
            f"  nothing is under {format_seconds(self.bound_s)} a step (proved within the cost model); best template: "
            + ("none fits" if best is None else f"{best[0]}, {format_seconds(best[1])}"),
            f"  {'search':<10} {'step':>9} {'over bound':>10} {'peak':>10} {'found after':>11} {'took':>8}  ended",
        ]
        for rival in self.rivals:
            result = rival.result
            ended = result.termination.value.replace("_", " ") + (f": {result.reason}" if result.reason else "")
            if not result.found:
                lines.append(f"  {rival.search:<10} {'-':>9} {'-':>10} {'-':>10} {'-':>11} {_took(result)}  {ended}")
                continue
            lines.append(
                f"  {rival.search:<10} {format_seconds(result.objective_s):>9} {_percent(rival.gap):>10} "
                f"{format_bytes(result.peak_bytes):>10} {format_seconds(result.best_at_s):>11} {_took(result)}  {ended}"
            )
        lines.append("  peaks as the searches count them: without the copies that resharding makes")
        return "\n".join(lines)


def compare(
    train_step: Callable[..., Any],
    mesh: Any,
    *shapes: Any,
    searches: Sequence[str] = RIVALS,
    limit_s: float = 30.0,
    options: Options | Mapping[str, Any] | None = None,
    **settings: Any,
) -> Comparison:
    """Search one step by several algorithms; nothing is lowered or compiled.

    Args:
      shapes: the step's arguments, arrays or ShapeDtypeStructs.
      searches: names of `jaxplan.search.SEARCHES`; limit_s: of each.
      options: `seed` and `relative_gap` hold for every search; settings: as of `auto_shard`.

    Raises:
      ArgumentError: an unknown search, or no time.  InfeasibleError: no search found anything.  What planning raises.
    """
    unknown = [name for name in searches if name not in SEARCHES]
    if unknown or not searches or not limit_s > 0:
        raise ArgumentError(
            f"searches={tuple(searches)} within limit_s={limit_s}: name some of {', '.join(SEARCHES)}, and a positive "
            "time"
        )
    chosen = as_options(options)
    step = auto_shard(train_step, mesh, options=replace(chosen, search="ilp"), **settings)
    pipeline, input_pins = step.pipeline(shapes, {})
    problem = pipeline.space(input_pins).problem
    given = pipeline.given(input_pins)
    found = compare_on(problem, given, searches, limit_s=limit_s, seed=chosen.seed, relative_gap=chosen.relative_gap)
    if not any(result.found for result in found.values()):
        raise InfeasibleError(
            f"no search found a plan for `{pipeline.traced.name}` within {format_bytes(pipeline.budget_bytes)} a "
            f"device: {'; '.join(f'{name}: {result.reason}' for name, result in found.items() if result.reason)}"
        )
    evaluate = Evaluator(problem)
    bound_s = max(result.bound_s for result in found.values())
    target = pipeline.target
    return Comparison(
        name=pipeline.traced.name,
        mesh=", ".join(f"{name}={size}" for name, size in target.axes),
        hardware=target.profile.name,
        nodes=len(problem.nodes),
        edges=len(problem.edges),
        limit_s=limit_s,
        templates={name: evaluate(assignment).objective_s for name, assignment in given.items()},
        bound_s=max(bound_s, 0.0),
        rivals=tuple(
            Rival(search=name, result=result, gap=_over(result.objective_s, max(bound_s, 0.0)))
            for name, result in found.items()
        ),
    )


def compare_on(
    problem: StrategyProblem, given: Mapping[str, Sequence[int]], searches: Sequence[str], *, limit_s: float, seed: int,
    relative_gap: float,
) -> dict[str, SearchResult]:  # fmt: skip
    """Every search on one problem, each begun from the cheapest of the assignments `given`."""
    evaluate = Evaluator(problem)
    hint = min(given.values(), key=lambda assignment: evaluate(assignment).objective_s, default=None)
    return {
        name: SEARCHES[name](problem, time_limit_s=limit_s, relative_gap=relative_gap, seed=seed, hint=hint)
        for name in searches
    }


def _over(objective_s: float, bound_s: float) -> float:
    return objective_s / bound_s - 1 if bound_s > 0 else math.inf


def _percent(part: float) -> str:
    return f"{part:.3%}" if math.isfinite(part) else "unknown"


def _took(result: SearchResult) -> str:
    return f"{format_seconds(result.wall_s):>8}"
