"""`jaxplan.verify`: is what XLA compiled what was planned?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import AbstractMesh

from ..api import Options, ShardedStep, auto_shard
from ..cost import CostModel
from ..errors import ArgumentError, CompilerError
from ..hardware import axis_links, compile_for, load_profile
from ..lowering import refused_bytes
from ..plans import Plan
from ..units import format_bytes
from .compare import Tolerances, compare
from .findings import Finding, Verification, ranked
from .known_bugs import known_bugs
from .numerics import differing_results


def verify(
    subject: Any,
    *arguments: Any,
    plan: Plan | None = None,
    hardware: Any = None,
    donate_argnums: int | Sequence[int] = (),
    tolerances: Tolerances | None = None,
    while_trips: float | None = None,
    numerics: bool = False,
) -> Verification:
    """Lay a compiled step beside its plan: shardings, donations, collectives, FLOPs, memory.

    Args:
      subject: one of
        - a step made by `auto_shard`, with its `arguments` (arrays or ShapeDtypeStructs): it is compiled;
        - a Plan on a mesh of devices, with the plain step and its arguments: `verify(plan, train_step, *shapes)`;
        - a `jax.stages.Lowered` or `Compiled` of your own, with `plan`; `verify(plan, compiled)` says the same.
      hardware: the profile that prices collectives; by default the plan's.
      donate_argnums: of the plain step beside a Plan.
      tolerances: from when on a difference is grave.
      while_trips: iterations of loops whose trip count the program doesn't say; by default as many as the step was
        planned with (`options.while_trips`).
      numerics: also run one step both ways, sharded and on one device, and name the first result that differs.  With
        shapes for arguments numbers are made up; give arrays, of smaller shapes too, for real ones.

    Returns:
      A Verification: `.ok`, `.findings`, and the whole of it printed.

    Raises:
      ArgumentError: the subject is none of these, or has no devices to compile for.
    """
    donated = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    if isinstance(subject, Plan) and arguments and isinstance(arguments[0], (jax.stages.Lowered, jax.stages.Compiled)):
        subject, plan, arguments = arguments[0], subject, arguments[1:]  # the other way round is as good
    if isinstance(subject, Plan):
        if not arguments or not callable(arguments[0]):
            raise ArgumentError("verify(plan, train_step, *arguments) needs the step that the plan is of")
        subject, arguments = auto_shard(
            arguments[0],
            _with_devices(subject.mesh, subject.name),
            donate_argnums=donated,
            hardware=hardware or subject.hardware,
            options=Options(plan=subject),
        ), arguments[1:]
    step = subject if isinstance(subject, ShardedStep) else None
    if while_trips is None:
        while_trips = step.options.while_trips if step is not None else Options().while_trips
    if step is not None:
        plan = step.plan(*arguments)
        mesh = _with_devices(plan.mesh, plan.name)
        subject = step.lower(*arguments)
    elif not isinstance(subject, (jax.stages.Lowered, jax.stages.Compiled)):
        raise ArgumentError(
            "verify takes a step made by auto_shard, a Plan, or a jax.stages.Lowered or Compiled; got "
            f"{type(subject).__name__}"
        )
    elif plan is None:
        raise ArgumentError(
            f"verify(a {type(subject).__name__}) needs what was promised: pass plan=, or verify the step that "
            "jaxplan.auto_shard made; jaxplan.audit compares shardings of your own"
        )
    else:
        mesh = plan.mesh
    if numerics and step is None:
        raise ArgumentError("numerics=True runs the step: verify a step made by auto_shard, or a Plan with its step")
    profile = load_profile(hardware or plan.hardware)
    links = axis_links(profile, plan.axes)
    model = CostModel(profile=profile, axes=plan.axes, links=tuple(links[name] for name, _ in plan.axes))
    found: list[Finding] = []
    compiled = subject
    if isinstance(subject, jax.stages.Lowered):
        try:
            compiled = compile_for(subject, mesh) if isinstance(mesh, jax.sharding.Mesh) else subject.compile()
        except jax.errors.JaxRuntimeError as refused:
            raise CompilerError(_refusal(refused, plan)) from refused
        found += known_bugs(plan, profile.kind, subject.as_text())
    verification = compare(plan, compiled, model, tolerances or Tolerances(), while_trips)
    if numerics and step is not None:
        found += differing_results(step, plan, arguments, donated)
    return replace(verification, findings=ranked([*verification.findings, *found]))


def _refusal(refused: jax.errors.JaxRuntimeError, plan: Plan) -> str:
    planned_bytes, budget_bytes, reason = plan.cost.peak_bytes, plan.budget_bytes, str(refused).splitlines()[0]
    wanted_bytes = refused_bytes(refused)
    if wanted_bytes is not None:
        less_bytes = max(budget_bytes - max(wanted_bytes - planned_bytes, 0), 0)
        return (
            f"XLA has no room for `{plan.name}` as planned: it takes {format_bytes(wanted_bytes)} a device, where "
            f"{format_bytes(planned_bytes)} are planned, of a budget of {format_bytes(budget_bytes)}. Plan within what "
            f"the plan lacks less, memory_budget={less_bytes}, as the first call does by itself, or let "
            "options.refine compile plans before one is chosen"
        )
    return (
        f"XLA's compiler fails on `{plan.name}` as planned ({reason}). Plan by a template, such as "
        "options.search='fsdp', as the first call does by itself, or let options.refine compile plans before one is "
        "chosen"
    )


def _with_devices(mesh: Any, name: str) -> Any:
    if mesh is None or isinstance(mesh, AbstractMesh):
        raise ArgumentError(
            f"the plan of `{name}` is on a mesh without devices, so there is nothing to compile for: plan on "
            'jaxplan.target("tpu-v5e:2x4").mesh(...), or on real devices'
        )
    return mesh
