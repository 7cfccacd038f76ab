"""`jaxplan.verify`: is what XLA compiled what was planned?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from ..api import Options, ShardedStep, auto_shard
from ..cost import CostModel
from ..errors import ArgumentError
from ..hardware import axis_links, compiler_options, load_profile
from ..plans import Plan
from .compare import Tolerances, compare
from .findings import Verification


def verify(
    subject: Any,
    *arguments: Any,
    plan: Plan | None = None,
    hardware: Any = None,
    donate_argnums: int | Sequence[int] = (),
    tolerances: Tolerances | None = None,
    while_trips: float = 16.0,
) -> Verification:
    """Lay a compiled step beside its plan: shardings, donations, collectives, FLOPs, memory.

    Args:
      subject: one of
        - a step made by `auto_shard`, with its `arguments` (arrays or ShapeDtypeStructs): it is compiled;
        - a Plan on a mesh of devices, with the plain step and its arguments: `verify(plan, train_step, *shapes)`;
        - a `jax.stages.Lowered` or `Compiled` of your own, with `plan`.
      hardware: the profile that prices collectives; by default the plan's.
      donate_argnums: of the plain step beside a Plan.
      tolerances: from when on a difference is grave.
      while_trips: iterations of loops whose trip count the program doesn't say.

    Returns:
      A Verification: `.ok`, `.findings`, and the whole of it printed.

    Raises:
      ArgumentError: the subject is none of these, or has no devices to compile for.
    """
    if isinstance(subject, Plan):
        if not arguments or not callable(arguments[0]):
            raise ArgumentError("verify(plan, train_step, *arguments) needs the step that the plan is of")
        step = auto_shard(
            arguments[0],
            _with_devices(subject.mesh, subject.name),
            donate_argnums=donate_argnums,
            hardware=hardware or subject.hardware,
            options=Options(plan=subject),
        )
        return verify(
            step, *arguments[1:], hardware=hardware, tolerances=tolerances, while_trips=while_trips
        )
    if isinstance(subject, ShardedStep):
        plan = subject.plan(*arguments)
        mesh = _with_devices(plan.mesh, plan.name)
        compiled = subject.lower(*arguments).compile(compiler_options=dict(compiler_options(mesh)))
    elif isinstance(subject, (jax.stages.Lowered, jax.stages.Compiled)):
        if plan is None:
            raise ArgumentError(
                f"verify(a {type(subject).__name__}) needs what was promised: pass plan=, or verify the step that "
                "jaxplan.auto_shard made; jaxplan.audit compares shardings of your own"
            )
        compiled = subject
        if isinstance(subject, jax.stages.Lowered):
            options = compiler_options(plan.mesh) if isinstance(plan.mesh, jax.sharding.Mesh) else {}
            compiled = subject.compile(compiler_options=dict(options))
    else:
        raise ArgumentError(
            f"verify takes a step made by auto_shard, a Plan, or a jax.stages.Lowered or Compiled; got "
            f"{type(subject).__name__}"
        )
    profile = load_profile(hardware or plan.hardware)
    links = axis_links(profile, plan.axes)
    model = CostModel(profile=profile, axes=plan.axes, links=tuple(links[name] for name, _ in plan.axes))
    return compare(plan, compiled, model, tolerances or Tolerances(), while_trips)


def _with_devices(mesh: Any, name: str) -> Any:
    if mesh is None or isinstance(mesh, AbstractMesh):
        raise ArgumentError(
            f"the plan of `{name}` is on a mesh without devices, so there is nothing to compile for: plan on "
            'jaxplan.target("tpu-v5e:2x4").mesh(...), or on real devices'
        )
    return mesh
