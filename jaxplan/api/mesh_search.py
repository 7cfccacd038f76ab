"""Searching among meshes: one trace, one search on each, and whole plans for the few that may be the best.

On every mesh the step is first searched roughly.  What that proves of a mesh rules it out where another one's plan is
faster; the others are planned to the end, the most promising first, until no mesh is left that may be faster by more
than `MESH_GAP`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..errors import ConstraintError, InfeasibleError
from ..ir import Traced
from ..plans import Plan
from ..search import Allowed, Termination, least_peak
from ..sharding import MeshAxes
from ..units import format_bytes, format_seconds
from .annotations import Annotations
from .devices import Devices
from .found import Found
from .meshes import Target
from .options import TEMPLATES, Options, speaker
from .planner import plan_prepared
from .prepare import Prepared, prepared
from .processes import agreed_plan

MESH_GAP = 0.005
"""A mesh that can be faster by no more than this share is not looked into: first searches are proved no nearer."""

ROUGH_S = 30.0
"""Of the first search on a mesh."""

MOST_PLANNED = 3
"""Meshes that are planned to the end: those after them were promised less by the same prices."""

LEAST_GAP = 1e-3
"""Within which a least peak is proved."""

NEAR_BUDGET = 1.1
"""A least peak over the budget by less may fit once its copies are counted: there the first search is stubborn."""


class Step(Protocol):
    """A step that is traced for the mesh at hand."""

    def traced(self, target: Target, /) -> Traced:
        """The step's program."""
        ...

    def said(self, traced: Traced, axes: MeshAxes, /) -> Annotations:
        """What the step and its arguments say of their own shardings."""
        ...


@dataclass(frozen=True, kw_only=True)
class MeshTrial:
    """What a first search says of a mesh.

    Attributes:
      ready, found: None where nothing fits, for the reason `fault`.
      least_bytes: the smallest peak that the memory rows allow, or a bound of it; 0 where it was not looked for.
      floor_bytes: no peak under it is possible by these rows; 0 where that is not proved.
    """

    target: Target
    ready: Prepared | None = None
    found: Found | None = None
    fault: str = ""
    least_bytes: int = 0
    floor_bytes: int = 0

    @property
    def step_s(self) -> float:
        """As the search prices a step; infinite where nothing fits."""
        return self.found.result.objective_s if self.found else float("inf")

    @property
    def bound_s(self) -> float:
        """No plan on this mesh is faster."""
        return self.found.result.bound_s if self.found else float("inf")

    def __str__(self) -> str:
        mesh = ",".join(f"{name}={size}" for name, size in self.target.axes)
        if self.found is None:
            return f"{mesh}: {self.fault}"
        return f"{mesh}: {format_seconds(self.step_s)}, {format_bytes(self.found.memory.peak_bytes)}"


class MeshSearch:
    """First searches of one step on meshes of any number of devices."""

    def __init__(
        self, step: Step, budget_bytes: int, constraints: Mapping[str, Any] | None, options: Options,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.step, self.budget_bytes, self.constraints, self.options = (
            step,
            budget_bytes,
            constraints,
            options,
        )
        self.say = say
        self._everywhere: Traced | None = (
            None  # where the program says nothing of a mesh, it is the same on all
        )
        limit_s = ROUGH_S if options.time_limit_s is None else min(options.time_limit_s, ROUGH_S)
        self._rough = replace(
            options, time_limit_s=limit_s, relative_gap=max(options.relative_gap, MESH_GAP), refine=0
        )

    def traced(self, target: Target) -> Traced:
        """The step's program on a mesh."""
        if self._everywhere is not None:
            return self._everywhere
        traced = self.step.traced(target)
        if not any(op.primitive == "sharding_constraint" for op in traced.graph.ops):
            self._everywhere = traced
        return traced

    def first(self, targets: Sequence[Target]) -> tuple[MeshTrial, ...]:
        """A first search on each, the fastest first; those where nothing fits last.

        Raises:
          ConstraintError: what is said of shardings can be met on no mesh.
        """
        trials: list[MeshTrial] = []
        refusals: list[ConstraintError] = []
        for target in targets:
            try:
                trials.append(self._on(target))
            except ConstraintError as error:
                refusals.append(error)
                trials.append(MeshTrial(target=target, fault="what is said of shardings can't be met"))
        if len(refusals) == len(trials):
            raise refusals[0]
        if not any(trial.found for trial in trials):
            # copies count in the simulation alone: the nearest mesh may do after all
            near = min((t for t in trials if t.ready and t.least_bytes), key=lambda t: t.least_bytes, default=None)
            if near is not None and near.least_bytes <= NEAR_BUDGET * self.budget_bytes:
                trials[trials.index(near)] = self._stubborn(near)
        # of meshes that are as good, the one of fewer axes
        return tuple(sorted(trials, key=lambda t: t.step_s * (1 + MESH_GAP / 10 * len(t.target.axes))))

    def _on(self, target: Target) -> MeshTrial:
        mesh = ", ".join(f"{name}={size}" for name, size in target.axes)
        traced, devices = self.traced(target), target.abstract.size
        held = int(_arguments_bytes(traced) / devices)
        if held > self.budget_bytes:
            fault = f"needs at least {format_bytes(held)} a device"
            return MeshTrial(target=target, fault=fault, least_bytes=held, floor_bytes=held)
        self.say(f"looking at mesh ({mesh})")
        ready = prepared(
            traced, target, self.budget_bytes, self.constraints, self._rough, self.step.said(traced, target.axes)
        )
        pipeline, pins = ready.pipeline, self._pins(ready)
        if pins is None:
            return MeshTrial(target=target, fault=f"has too few axes for template {self.options.search!r}")
        outcome = pipeline.search(pins)
        least_bytes = floor_bytes = 0
        if not isinstance(outcome, Found):
            least = least_peak(pipeline.space(pins).problem, relative_gap=LEAST_GAP, seed=self.options.seed)
            least_bytes = max(least.peak_bytes, 0)
            if least.termination is Termination.OPTIMAL:
                floor_bytes = int(least_bytes * (1 - LEAST_GAP))
            fault = f"needs about {format_bytes(least_bytes)} a device"
            return MeshTrial(
                target=target, ready=ready, fault=fault, least_bytes=least_bytes, floor_bytes=floor_bytes
            )
        return MeshTrial(target=target, ready=ready, found=outcome)

    def _pins(self, ready: Prepared) -> dict[int, Allowed] | None:
        """Those of the template to search by, if any, under the step's own; None: the mesh has too few axes."""
        if self.options.search not in TEMPLATES:
            return dict(ready.pins)
        template = ready.pipeline.template(self.options.search)
        return None if template is None else {**template, **ready.pins}

    def _stubborn(self, trial: MeshTrial) -> MeshTrial:
        """The trial once more, near the least peak of its mesh by simulation."""
        assert trial.ready is not None
        outcome = trial.ready.pipeline.search(self._pins(trial.ready) or {}, stubborn=True)
        return replace(trial, found=outcome, fault="") if isinstance(outcome, Found) else trial

    def finished(self, trial: MeshTrial) -> Plan:
        """The whole plan on a trial's mesh.

        Raises:
          InfeasibleError: nothing fits.
        """
        ready = trial.ready
        if ready is None:
            traced, target = self.traced(trial.target), trial.target
            said = self.step.said(traced, target.axes)
            ready = prepared(traced, target, self.budget_bytes, self.constraints, self.options, said)
        return plan_prepared(replace(ready, pipeline=ready.pipeline.under(self.options)), trial.found)


def best_plan(search: MeshSearch, trials: Sequence[MeshTrial]) -> Plan:
    """The plan of the best mesh among those tried, and in its assumptions what was tried.

    Raises:
      InfeasibleError: nothing fits on any of them.
    """
    fitting = [trial for trial in trials if trial.found]
    if not fitting:
        return _last_resort(search, trials)
    best: Plan | None = None
    best_trial = fitting[0]
    for trial in fitting[:MOST_PLANNED]:
        if best is not None and trial.bound_s >= best.cost.step_s * (1 - MESH_GAP):
            continue
        plan = search.finished(trial)
        if best is None or plan.cost.step_s < best.cost.step_s * (1 - MESH_GAP / 10):
            best, best_trial = plan, trial
    assert best is not None
    others = "; ".join(str(trial) for trial in trials if trial is not best_trial)
    tried = f"mesh {best_trial} chosen" + (f"; tried too, by a first search: {others}" if others else "")
    return replace(best, assumptions=(*best.assumptions, tried))


def plan_on_devices(
    devices: Devices, step: Step, budget_bytes: int, constraints: Mapping[str, Any] | None, options: Options,
    settings: Mapping[str, str],
) -> tuple[Plan, Traced, Target]:  # fmt: skip
    """The plan of a step on the best mesh of `devices`, with the program and the target that it is for.

    Several processes agree on it, see `processes.agreed_plan`; `settings` as there.

    Raises:
      InfeasibleError: nothing fits on any mesh.
    """
    search = MeshSearch(step, budget_bytes, constraints, options, speaker(options))
    targets = devices.targets(options.mesh_axes)
    widest = targets[-1]  # it has all the names that constraints may use

    def make() -> Plan:
        return best_plan(search, search.first(targets))

    plan = agreed_plan(
        search.traced(widest), widest, settings, make, lambda plan: devices.target(plan.axes).mesh
    )
    target = devices.target(plan.axes)
    return plan, search.traced(target), target


def _last_resort(search: MeshSearch, trials: Sequence[MeshTrial]) -> Plan:
    """The plan on the mesh that comes nearest to the budget, if a whole search finds one after all.

    Raises:
      InfeasibleError: what no mesh can do, and of this one what would help.
    """
    nearest = min((t for t in trials if t.least_bytes), key=lambda t: t.least_bytes, default=trials[0])
    try:
        return search.finished(nearest)
    except InfeasibleError as error:
        tried = "; ".join(map(str, trials))
        raise InfeasibleError(
            f"no mesh of {nearest.target.abstract.size} devices will do ({tried}). {error}"
        ) from error


def _arguments_bytes(traced: Traced) -> float:
    """Bytes of the arguments that are read: all are there at the start, each in at most as many parts as devices."""
    graph = traced.graph
    read = {v for op in graph.ops for v in op.operands} | set(graph.outputs)
    return sum(graph.values[v].bytes for v in graph.inputs if v in read)
