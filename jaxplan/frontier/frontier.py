"""`jaxplan.frontier`: every plan of a step that no other one beats in both time and memory.

First by exact elimination over frontier tables (`search.frontier`); where those would be too wide, stretch by stretch
over what can still lead there (`search.stretches`), and then by searches under ever other budgets (`search.sweep`).
All work on what the search prices and on its memory rows; each assignment is then simulated on the whole timeline,
resharded copies included, and those that another one beats there are dropped: what is proved of a point is against all
that the search counts at fewer bytes than its next point had, dropped or not.  Large problems are folded
(`search.folded_tradeoff`, `options.fold`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from ..api import (
    Found,
    Options,
    Pipeline,
    as_options,
    finished_plan,
    prepared,
    step_of_shapes,
    target_of,
)
from ..cost import MemoryProfile
from ..errors import ArgumentError, InfeasibleError
from ..plans import Plan
from ..search import (
    Decision,
    SearchResult,
    Space,
    Termination,
    Tradeoff,
    TradeoffPoint,
    Weigh,
    decide,
    folded_tradeoff,
    tradeoff,
)
from ..units import format_bytes
from .points import Frontier, FrontierPoint

Simulated = Callable[[tuple[int, ...]], tuple[Decision, MemoryProfile]]
"""An assignment -> what it decides, and its memory with the copies that resharding makes."""

#: Decisions from which on layers that repeat are decided once, if not told otherwise: tables over fewer take seconds.
FOLD_NODES = 4000


def frontier(
    train_step: Callable[..., Any],
    mesh: Any,
    *shapes: Any,
    eps: float = 1e-3,
    time_limit_s: float = 60.0,
    donate_argnums: int | Sequence[int] = (),
    hardware: Any = None,
    constraints: Mapping[str, Any] | None = None,
    options: Options | Mapping[str, Any] | None = None,
) -> Frontier:
    """The frontier of step time and peak memory of a step on a mesh.

    Args:
      shapes: the step's arguments, arrays or ShapeDtypeStructs.
      eps: plans are not parted whose times differ by less, relatively, or whose peaks by less of what lies between the
        frontier's ends.
      time_limit_s: no stretch or search begins after it.
      donate_argnums, hardware, constraints, options: as of `auto_shard`.

    Raises:
      ArgumentError: `eps` or `time_limit_s` is negative.  InfeasibleError: no plan at all.  What planning raises.
    """
    if eps < 0 or time_limit_s < 0:
        raise ArgumentError(f"eps={eps} and time_limit_s={time_limit_s} must not be negative")
    chosen = as_options(options)
    target = target_of(mesh, hardware)
    step = step_of_shapes(train_step, shapes, donate_argnums, chosen)
    traced, memory_bytes = step.traced(target), target.profile.usable_bytes
    ready = prepared(traced, target, memory_bytes, constraints, chosen, step.said(traced, target.axes))
    pipeline = ready.pipeline
    space = pipeline.space(ready.pins)

    @cache
    def simulated(assignment: tuple[int, ...]) -> tuple[Decision, MemoryProfile]:
        decision = decide(space, assignment)
        return decision, pipeline.simulate(decision)

    found, method = _searched(
        space, chosen, eps=eps, time_limit_s=time_limit_s, say=pipeline.say,
        weigh=lambda assignment: simulated(assignment)[1].peak_bytes,
    )  # fmt: skip
    points = _points(pipeline, space, found, simulated)
    if points and found.spent_bytes >= 0:
        method += (
            f"; no more of those that count under {format_bytes(found.spent_bytes + 1)} were looked for: such as were "
            "found take more memory than faster ones do, with the copies that resharding makes"
        )
    if not points:
        raise InfeasibleError(
            f"no plan for `{traced.name}`: every assignment is forbidden by its constraints"
        )
    return Frontier(
        name=traced.name,
        mesh=", ".join(f"{name}={size}" for name, size in target.axes),
        hardware=target.profile.name,
        memory_bytes=memory_bytes,
        points=points,
        method=method,
        eps=eps,
        alike=found.apart is not None,
    )


def _searched(
    space: Space, options: Options, *, eps: float, time_limit_s: float, say: Callable[[str], None], weigh: Weigh
) -> tuple[Tradeoff, str]:
    """The frontier, folded where `options.fold` says so or, by "auto", where that leaves a large problem small."""
    limits: dict[str, Any] = {
        "eps": eps, "time_limit_s": time_limit_s, "seed": options.seed, "say": say, "weigh": weigh,
    }  # fmt: skip
    if options.fold is True or (options.fold == "auto" and len(space.problem.nodes) >= FOLD_NODES):
        folded = folded_tradeoff(space.folds, **limits)
        if folded is not None:
            return folded
    return tradeoff(space.problem, **limits)


def _points(
    pipeline: Pipeline, space: Space, found: Tradeoff, simulated_of: Simulated
) -> tuple[FrontierPoint, ...]:
    """The points with their peaks as simulated, less those that another one beats then."""
    simulated = []
    regrets = zip(found.regrets, found.apart_regrets or found.regrets, strict=True)
    for point, (later, apart) in zip(found.points, regrets, strict=True):
        decision, memory = simulated_of(point.assignment)
        one = Found(space=space, result=_result(point, found), decision=decision, memory=memory)
        # of a point within a grain of the next nothing is said later on
        regret = max(later, point.objective_s / one.result.bound_s - 1) if one.result.bound_s > 0 else later
        simulated.append(
            FrontierPoint(
                step_s=point.objective_s, peak_bytes=memory.peak_bytes, bound_s=one.result.bound_s, regret=regret,
                apart_regret=max(regret, apart), counted_bytes=point.peak_bytes, make=_maker(pipeline, one),
            )
        )  # fmt: skip
    kept: list[FrontierPoint] = []
    for one_point in sorted(simulated, key=lambda point: (point.peak_bytes, point.step_s)):
        if not kept or one_point.step_s < kept[-1].step_s:
            kept.append(one_point)
    return tuple(kept)


def _result(point: TradeoffPoint, found: Tradeoff) -> SearchResult:
    bound_s = found.bound_at(point.peak_bytes)
    proved = bound_s >= point.objective_s * (1 - 1e-9)
    return SearchResult(
        assignment=point.assignment, objective_s=point.objective_s, bound_s=min(bound_s, point.objective_s),
        termination=Termination.OPTIMAL if proved else Termination.FEASIBLE, peak_bytes=point.peak_bytes, wall_s=0.0,
    )  # fmt: skip


def _maker(pipeline: Pipeline, found: Found) -> Callable[[], Plan]:
    @cache
    def make() -> Plan:
        return finished_plan(pipeline, pipeline.checked("frontier", found), {}, 0.0)

    return make
