"""The one place that spells the whole pipeline out: trace, price, search, lower, check, report."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from ..cost import CostModel, MemoryProfile, materialised, simulate_memory
from ..errors import InfeasibleError, RuleError
from ..hardware import axis_links
from ..ir import Traced
from ..lowering import Checked, check, planned_constraints
from ..plans import Plan
from ..search import SearchResult, Termination, solve
from ..search.build import Allowed, build
from ..search.space import Decision, Space, decide
from ..sharding import Layout, layout_of_places
from .infeasible import explain_infeasible
from .meshes import Target
from .options import TEMPLATES, Options
from .pins import pins_of
from .reporting import finished_plan
from .templates import input_kinds, template_pins

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One searched and checked plan, before it is written up.

    Attributes:
      memory: at the decided layouts; step_s: with the collectives that the partitioner really inserts.
    """

    name: str
    space: Space
    result: SearchResult
    decision: Decision
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    checked: Checked
    memory: MemoryProfile
    compute_s: float
    comm_s: float

    def step_s(self, overlap: float) -> float:
        """Seconds of a step when `overlap` of the communication is hidden."""
        return self.compute_s + (1 - overlap) * self.comm_s


def make_plan(
    traced: Traced,
    target: Target,
    budget_bytes: int,
    constraints: Mapping[str, Any] | None,
    options: Options,
) -> Plan:
    """Plan a traced step on a target.

    Raises:
      ConstraintError: see `pins.pins_of`.  InfeasibleError: nothing fits `budget_bytes`.
      RuleError: `options.strict` and a primitive without a rule.
    """
    started = time.perf_counter()
    say = _speaker(options)
    model = CostModel(profile=target.profile, axes=target.axes, links=_links(target))
    input_pins, output_pins = pins_of(traced, target.axes, constraints)
    pipeline = _Pipeline(traced, target, model, budget_bytes, options, output_pins, say)
    names = [options.search]
    if options.search == "ilp" and options.compare_templates and not constraints:
        names += TEMPLATES
    best: Candidate | None = None
    times: dict[str, float] = {}
    infeasible: tuple[Space, SearchResult] | None = None
    for name in names:
        pins = dict(input_pins)
        if name != "ilp":
            wanted = template_pins(name, traced.graph, pipeline.kinds, target.axes)
            if wanted is None:
                continue
            pins = {**wanted, **input_pins}
        say(f"planning {name}")
        outcome = pipeline.candidate(name, pins)
        if not isinstance(outcome, Candidate):
            infeasible = infeasible or outcome
            continue
        if name != "ilp":
            times[name] = outcome.step_s(options.overlap)
        if best is None or outcome.step_s(options.overlap) < best.step_s(options.overlap) * (1 - 1e-6):
            best = outcome
    if best is None:
        assert infeasible is not None
        raise InfeasibleError(
            explain_infeasible(
                traced, target, pipeline, *infeasible, budget_bytes=budget_bytes, pins=input_pins
            )
        )
    return finished_plan(
        traced,
        target,
        model,
        best,
        pipeline.kinds,
        budget_bytes,
        options,
        times,
        time.perf_counter() - started,
    )


class _Pipeline:
    """What all candidates of one step share."""

    def __init__(
        self, traced: Traced, target: Target, model: CostModel, budget_bytes: int, options: Options,
        output_pins: Mapping[int, Allowed], say: Say,
    ) -> None:  # fmt: skip
        self.traced, self.target, self.model = traced, target, model
        self.budget_bytes, self.options, self.output_pins, self.say = budget_bytes, options, output_pins, say
        probe = build(traced.graph, model, limit_bytes=None, max_strategies=options.max_strategies)
        self.rules = probe.rules
        self.kinds = input_kinds(traced.graph, probe.rules)
        self.stored = materialised(traced.graph, probe.rules)
        unknown = sorted(
            {
                f"`{op.primitive}` at {op.source}"
                for op, rule in zip(traced.graph.ops, probe.rules, strict=True)
                if rule.note
            }
        )
        if unknown and options.strict:
            raise RuleError(
                f"no sharding rule for {', '.join(unknown)} and options.strict is set: register one with "
                "jaxplan.register_rule(primitive, fn), or plan without strict to have them replicated"
            )
        self.unknown = unknown

    def candidate(self, name: str, pins: Mapping[int, Allowed]) -> Candidate | tuple[Space, SearchResult]:
        """Search, lower and check under these pins; the failed search when nothing fits."""
        limit = self.budget_bytes
        space = build(
            self.traced.graph, self.model, input_pins=pins, output_pins=self.output_pins, limit_bytes=limit,
            max_strategies=self.options.max_strategies,
        )  # fmt: skip
        for _ in range(4):
            problem = dataclasses.replace(space.problem, limit_bytes=max(limit, 0))
            result = solve(
                problem,
                time_limit_s=self.options.time_limit_s,
                relative_gap=self.options.relative_gap,
                seed=self.options.seed,
            )
            if not result.assignment or result.termination is Termination.INFEASIBLE:
                return space, result
            decision = decide(space, result.assignment)
            memory = simulate_memory(
                self.traced.graph, self.target.axes, self.stored, self.kinds, decision.values, decision.reads
            )
            excess = memory.peak_bytes - self.budget_bytes
            if excess <= 0:
                break
            # the search's rows leave out what only shows at the decided layouts (gathered copies): make room for it
            limit = min(limit - excess, result.peak_bytes - 1)
            self.say(f"{name}: {excess} bytes over budget once copies are counted, searching again")
        else:
            return space, dataclasses.replace(result, termination=Termination.INFEASIBLE)
        return self._checked(name, space, result, decision, memory)

    def _lowering_mesh(self) -> Any:
        """A mesh to lower for: without devices, unless the step has operations that name theirs (callbacks)."""
        needs_devices = any("callback" in op.primitive for op in self.traced.graph.ops)
        return self.target.mesh if needs_devices else self.target.abstract

    def _checked(
        self, name: str, space: Space, result: SearchResult, decision: Decision, memory: MemoryProfile
    ) -> Candidate:
        graph, axes = self.traced.graph, self.target.axes
        inputs = tuple(
            layout_of_places(decision.values[v], len(graph.values[v].shape), axes) for v in graph.inputs
        )
        outputs = tuple(
            layout_of_places(decision.outputs[p], len(graph.values[v].shape), axes)
            if p in decision.outputs
            else Layout(dims=((),) * len(graph.values[v].shape))
            for p, v in enumerate(graph.outputs)
        )
        constraints = planned_constraints(graph, axes, decision.values, decision.reads)
        self.say(f"checking {name} against the partitioner")
        checked = check(
            self.traced, self.rules, axes, self._lowering_mesh(), inputs, outputs, decision.values, constraints,
            reads=decision.reads, platform=self.target.platform, while_trips=self.options.while_trips,
        )  # fmt: skip
        comm_s = sum(
            self.model.collective_over(c.kind, c.bytes, c.axes) * c.trips for c, _ in checked.collectives
        )
        return Candidate(
            name=name, space=space, result=result, decision=decision, inputs=inputs, outputs=outputs, checked=checked,
            memory=memory, compute_s=sum(decision.compute_s.values()), comm_s=comm_s,
        )  # fmt: skip


def _links(target: Target) -> tuple[Any, ...]:
    links = axis_links(target.profile, target.axes)
    return tuple(links[name] for name, _ in target.axes)


def _speaker(options: Options) -> Say:
    show = sys.stderr.isatty() if options.progress is None else options.progress
    if not show or jax.process_index() != 0:
        return lambda _: None
    return lambda text: print(f"jaxplan: {text}", file=sys.stderr, flush=True)
