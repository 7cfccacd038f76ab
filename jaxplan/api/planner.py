"""The one place that spells the whole pipeline out: trace, price, search, lower, check, report."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import ArgumentError, InfeasibleError
from ..ir import Traced
from ..plans import Plan
from ..search import TIED_SEARCHER, Allowed, Evaluator
from ..sharding import Beside
from .annotations import Annotations, summary, unruled
from .candidates import Pipeline
from .found import Candidate, Found, Nothing
from .held import Held
from .infeasible import explain_infeasible
from .meshes import Target
from .options import TEMPLATES, Options
from .prepare import Prepared, prepared
from .refine import refined, require_devices
from .reporting import finished_plan
from .templates_beside import TemplatesBeside

WORTH_CHECKING = 0.0005
"""A template has to promise so much less than the checked plan takes to be checked as well, which takes seconds: what
is printed as less."""

BESIDE_OPS = 4000
"""Operations from which on templates are searched and the step is partitioned in a process of its own: on two cores the
latter takes 0.3 to 0.5 ms of each, with what pins add (ResNets, Inception, U-Net), and the process 1 to 1.5 s to begin,
beside the search."""


def make_plan(
    traced: Traced,
    target: Target,
    budget_bytes: int,
    constraints: Mapping[str, Any] | None,
    options: Options,
    said: Annotations | None = None,
) -> Plan:
    """Plan a traced step on a target.

    Args:
      said: what the step and its arguments say of their own shardings.

    Raises:
      ConstraintError: see `pins.pins_of` and `pins.annotated_pins`.  InfeasibleError: nothing fits `budget_bytes`.
      RuleError: `options.strict` and a primitive without a rule.
    """
    return plan_prepared(prepared(traced, target, budget_bytes, constraints, options, said))


def plan_prepared(ready: Prepared, hint: Found | None = None) -> Plan:
    """The plan of a step that is traced, priced and pinned; `hint`: what an earlier search of the same found.

    Where `options.refine` has plans compiled and none keeps to the budget so, the step is planned again within less.

    Raises:
      InfeasibleError: nothing fits the budget.
    """
    budget_bytes = ready.pipeline.budget_bytes
    plan, over_bytes = _planned(ready, budget_bytes, hint)
    if over_bytes is None:
        return plan

    def within(limit_bytes: int) -> Plan:
        nonlocal over_bytes
        tighter = replace(ready, pipeline=ready.pipeline.with_budget(limit_bytes))
        plan, over_bytes = _planned(tighter, budget_bytes)
        return plan

    held = Held(plan, within, ready.pipeline.say)
    while over_bytes is not None and held.again(over_bytes):
        pass
    return held.plan


def _planned(ready: Prepared, budget_bytes: int, hint: Found | None = None) -> tuple[Plan, int | None]:
    """The plan, and its bytes a device as compiled where they are known to be over `budget_bytes`."""
    started = time.perf_counter()
    pipeline, input_pins = ready.pipeline, ready.pins
    target, options, traced = pipeline.target, pipeline.options, pipeline.traced
    if options.refine:
        require_devices(target.mesh)
    pipeline.say(f"searching ({options.search})")
    template = _template(pipeline) if options.search in TEMPLATES else {}
    begins = options.annotations == "start" and ready.annotated and not template
    rivals: dict[str, Found] = {}
    times: dict[str, float] = {}
    compares = options.search not in TEMPLATES and options.compare_templates
    large = len(traced.graph.ops) >= BESIDE_OPS
    with Beside(wanted=compares and large and (os.cpu_count() or 1) > 1, others=(TIED_SEARCHER,)) as beside:
        start = pipeline.search(ready.start_pins) if begins else hint
        begin = None if template or options.search == "ilp" else _best_given(pipeline, input_pins)
        pins = {**template, **input_pins}
        space = pipeline.space(pins)

        def searched() -> Found | Nothing:
            return pipeline.search(pins, stubborn=True, start=start, begin=begin, space=space)

        def checked(outcome: Found | Nothing) -> Candidate | None:
            return pipeline.checked(options.search, outcome, beside) if isinstance(outcome, Found) else None

        if compares:
            with TemplatesBeside(pipeline, space, input_pins, beside) as templates:
                outcome = searched()
                templates.price(outcome.result.objective_s)
                best = checked(outcome)
                pipeline.say("comparing with templates")
                rivals = templates.found()
        else:
            outcome = searched()
            best = checked(outcome)
    if compares:
        best, times = _against_templates(pipeline, best, rivals)
    if best is None:
        assert isinstance(outcome, Nothing)
        raise InfeasibleError(explain_infeasible(pipeline, outcome, input_pins))
    if begins and isinstance(start, Found):
        times["as annotated"] = best.searched_s(start.result.objective_s, options.overlap)
    tried: tuple[str, ...] = ()
    over_bytes = None
    if options.refine:
        best, tried, over_bytes = refined(pipeline, best, rivals, budget_bytes)
    if isinstance(outcome, Found):
        best = bounded_by(best, outcome)
    plan = finished_plan(pipeline, best, times, time.perf_counter() - started)
    heeded = Annotations() if options.annotations == "ignore" else ready.said
    pinned = (
        [heeded.inputs[position] for position in ready.annotated],
        [heeded.outputs[position] for position in ready.annotated_outputs],
    )
    plan = replace(
        plan,
        assumptions=(*plan.assumptions, *summary(*pinned, options.annotations), *tried),
        warnings=(*plan.warnings, *unruled(heeded.inputs)),
        logical_axes={
            traced.inputs[position].path: tuple(name or "" for name in one.names)
            for position, one in ready.said.inputs.items()
            if one.names
        },
    )
    return plan, over_bytes


def make_pipeline(
    traced: Traced, target: Target, budget_bytes: int, constraints: Mapping[str, Any] | None, options: Options
) -> tuple[Pipeline, dict[int, Allowed]]:
    """Where searches of a traced step begin: its pipeline, and the pins of its constraints on arguments.

    What arguments say of their own shardings is left aside.

    Raises:
      ConstraintError: see `pins.pins_of`.  RuleError: `options.strict` and a primitive without a rule.
    """
    ready = prepared(traced, target, budget_bytes, constraints, replace(options, annotations="ignore"))
    return ready.pipeline, dict(ready.pins)


def _best_given(pipeline: Pipeline, input_pins: Mapping[int, Allowed]) -> tuple[int, ...] | None:
    """The cheapest template that fits, for a search to begin from."""
    evaluate = Evaluator(pipeline.space(input_pins).problem)
    given = pipeline.given(input_pins).values()
    return min(given, key=lambda assignment: evaluate(assignment).objective_s, default=None)


def _template(pipeline: Pipeline) -> dict[int, Allowed]:
    pins = pipeline.template(pipeline.options.search)
    if pins is None:
        raise ArgumentError(
            f"template {pipeline.options.search!r} cuts the batch over one mesh axis and tensors over another: mesh "
            f'({", ".join(f"{n}={s}" for n, s in pipeline.target.axes)}) has only one. Use "fsdp" or "megatron", '
            "or a mesh of two axes"
        )
    return pins


def _against_templates(
    pipeline: Pipeline, best: Candidate | None, rivals: Mapping[str, Found]
) -> tuple[Candidate | None, dict[str, float]]:
    """The best of the search's plan and the hand-written templates, and what each template that fits would take.

    A template is the same problem with some arguments pinned, so a proved optimum can't lose to it; a search that
    was cut short can.  Only a template that promises to win by `WORTH_CHECKING` is lowered and checked too, those that
    promise most before the others: what they keep of it often spares the rest.
    """
    overlap = pipeline.options.overlap
    times = {name: found.result.objective_s for name, found in rivals.items()}
    if best is not None:
        times = {name: best.searched_s(seconds, overlap) for name, seconds in times.items()}
    for name, found in sorted(rivals.items(), key=lambda rival: rival[1].result.objective_s):
        if best is None or times[name] < best.step_s(overlap) * (1 - WORTH_CHECKING):
            rival = pipeline.checked(name, found)
            times[name] = rival.step_s(overlap)
            if best is None or times[name] < best.step_s(overlap):
                best = rival
    return best, times


def bounded_by(best: Candidate, searched: Found) -> Candidate:
    """A template that won, with the bound of the search: it is one of the plans that the search looked among."""
    result = best.found.result
    if best.found is searched:
        return best
    bound_s = min(searched.result.bound_s, result.objective_s)
    return replace(
        best, found=replace(best.found, result=replace(result, bound_s=bound_s))
    )
