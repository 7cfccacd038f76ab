"""`jaxplan.audit`: shardings written by hand, or a template, priced as the plan is, beside the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from ..api import (
    Options,
    Target,
    as_options,
    budget_of,
    input_kinds,
    make_plan,
    model_of,
    step_of_shapes,
    target_of,
)
from ..cost import CostModel
from ..errors import ArgumentError, CompilerError
from ..hardware import compile_for
from ..ir import Traced
from ..lowering import Priced, compiled_collectives, compiled_memory, lower_flat, price, refused_bytes
from ..plans import Constraint, Plan
from ..sharding import Layout, graph_rules
from .audit_text import audit_text
from .layouts import written_layouts

_MOST_CHANGES = 8
"""Changes that are priced one after the other: each takes the partitioner a second."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """What one way of sharding the step costs; one device, one step.

    Attributes:
      inputs, outputs: spec of every leaf by path, those left open as propagation decides them.
      comm_s_by_axis: by the axes that a collective runs over ("data+model").
      seconds_by_source: computation and communication of each line of the program.
      compiled_bytes, compiled_comm_s: of the compiled program; None where it was not compiled, the latter also where
        XLA has no room for that many bytes.
    """

    inputs: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    step_s: float
    compute_s: float
    comm_s: float
    comm_s_by_axis: Mapping[str, float]
    seconds_by_source: Mapping[str, float]
    flops: float
    peak_bytes: int
    peak_parts: Mapping[str, int]
    compiled_bytes: int | None = None
    compiled_comm_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Change:
    """Leaves to be laid out otherwise, the same way.

    Attributes:
      before, after: theirs and the plan's layout.
      saving_s, saving_bytes: by how much the plan's step and peak would grow if these leaves alone stayed as they are.
    """

    paths: tuple[str, ...]
    before: Layout
    after: Layout
    saving_s: float
    saving_bytes: int


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Somebody's shardings beside the plan's.

    Attributes:
      subject: "yours", or the template's name.
      theirs, ours: what each costs; plan: the plan.
      changes: shardings of arguments to change, those that save most time first.
      unpriced: leaves that differ too, smaller than those.
    """

    name: str
    subject: str
    budget_bytes: int
    theirs: Side
    ours: Side
    plan: Plan
    changes: tuple[Change, ...]
    unpriced: int
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        return audit_text(self)


def audit(
    train_step: Callable[..., Any],
    mesh: Any,
    *shapes: Any,
    in_shardings: Any = None,
    out_shardings: Any = None,
    template: str | None = None,
    donate_argnums: int | Sequence[int] = (),
    hardware: Any = None,
    memory_budget: int | str | None = None,
    options: Options | Mapping[str, Any] | None = None,
    compile: bool = False,
) -> Audit:
    """Price shardings written by hand, or a template, and lay them beside the plan.

    Args:
      shapes: the step's arguments, arrays or ShapeDtypeStructs.
      in_shardings, out_shardings: as `jax.jit` takes them; PartitionSpecs will do.  None leaves it to propagation.
      template: a hand-written plan by name ("fsdp") instead of shardings.
      donate_argnums, hardware, memory_budget, options: as of `auto_shard`.
      compile: compile both too, and read memory and collectives from the programs.

    Raises:
      ArgumentError: both or neither of shardings and template.  ConstraintError: shardings that don't fit.
      What planning raises.
    """
    if (in_shardings is None) == (template is None):
        raise ArgumentError("audit takes either in_shardings= (with out_shardings=) or template=, such as 'fsdp'")
    chosen = as_options(options)
    target = target_of(mesh, hardware)
    step = step_of_shapes(train_step, shapes, donate_argnums, chosen)
    traced = step.traced(target)
    auditor = Auditor(traced, target, chosen)
    budget_bytes = budget_of(target, memory_budget)
    plan = make_plan(traced, target, budget_bytes, None, chosen)
    ours = auditor.of_plan(plan)
    if template is not None:
        other = make_plan(traced, target, budget_bytes, None, replace(chosen, search=template))
        inputs: tuple[Layout | None, ...] = tuple(t.layout for t in other.inputs)
        outputs: tuple[Layout | None, ...] = tuple(t.layout for t in other.outputs)
        constraints = other.constraints
    else:
        args_tree = jax.tree.structure(step.shapes)
        inputs = written_layouts("in_shardings", in_shardings, args_tree, traced.inputs, target.axes)
        outputs = written_layouts("out_shardings", out_shardings, traced.out_tree, traced.outputs, target.axes)
        constraints = ()
    theirs = auditor.price(inputs, outputs, constraints)
    changes, unpriced = auditor.changes(theirs, ours, plan)
    sides = auditor.side(theirs), auditor.side(ours)
    if compile:
        sides = (
            auditor.compiled(
                "your" if template is None else f"template {template}'s", sides[0], inputs, outputs, constraints
            ),
            auditor.compiled("the plan's", sides[1], ours.inputs, ours.outputs, plan.constraints),
        )
    return Audit(
        name=traced.name, subject=template or "yours", budget_bytes=budget_bytes, theirs=sides[0], ours=sides[1],
        plan=plan, changes=changes, unpriced=unpriced, warnings=theirs.warnings,
    )  # fmt: skip


class Auditor:
    """Prices one step under several shardings."""

    def __init__(self, traced: Traced, target: Target, options: Options) -> None:
        self.traced, self.target, self.options = traced, target, options
        self.model: CostModel = model_of(target, options)
        self.rules = graph_rules(traced.graph)
        self.kinds = input_kinds(traced.graph, self.rules)

    def price(
        self,
        inputs: Sequence[Layout | None],
        outputs: Sequence[Layout | None],
        constraints: Sequence[Constraint],
    ) -> Priced:
        return price(
            self.traced, self.rules, self.kinds, self.model, self.target.abstract, inputs, outputs, constraints,
            platform=self.target.platform, while_trips=self.options.while_trips,
        )  # fmt: skip

    def of_plan(self, plan: Plan) -> Priced:
        return self.price(
            [t.layout for t in plan.inputs], [t.layout for t in plan.outputs], plan.constraints
        )

    def side(self, priced: Priced) -> Side:
        ops = self.traced.graph.ops
        by_source: dict[str, float] = {}
        by_axis: dict[str, float] = {}
        for index, seconds in priced.op_seconds.items():
            by_source[ops[index].source] = by_source.get(ops[index].source, 0.0) + seconds
        for item, index, seconds in priced.collectives:
            where = ops[index].source if 0 <= index < len(ops) else item.scope
            by_source[where] = by_source.get(where, 0.0) + seconds
            axes = "+".join(item.axes)
            by_axis[axes] = by_axis.get(axes, 0.0) + seconds
        return Side(
            inputs={leaf.path: layout for leaf, layout in zip(self.traced.inputs, priced.inputs, strict=True)},
            outputs={leaf.path: layout for leaf, layout in zip(self.traced.outputs, priced.outputs, strict=True)},
            step_s=priced.step_s(self.options.overlap), compute_s=priced.compute_s, comm_s=priced.comm_s,
            comm_s_by_axis=by_axis, seconds_by_source=by_source, flops=sum(priced.flops.values()),
            peak_bytes=priced.memory.peak_bytes, peak_parts=priced.memory.parts,
        )  # fmt: skip

    def changes(self, theirs: Priced, ours: Priced, plan: Plan) -> tuple[tuple[Change, ...], int]:
        """Leaves that lie otherwise, those alike together, and what it costs to leave each group alone as it is.

        Priced inside the plan, whose constraints hold the rest in place: changed one by one in their program, shardings
        of arguments set propagation loose.
        """
        graph = self.traced.graph
        groups: dict[tuple[str, Layout, Layout], list[int]] = {}
        for position, (before, after) in enumerate(zip(theirs.inputs, ours.inputs, strict=True)):
            if before != after:
                groups.setdefault((self.kinds[position], before, after), []).append(position)

        def size(positions: Sequence[int]) -> float:
            return sum(graph.values[graph.inputs[p]].bytes for p in positions)

        ranked = sorted(groups.items(), key=lambda group: -size(group[1]))
        next_of = dict(graph.aliases)
        changes = []
        for (_, before, after), positions in ranked[:_MOST_CHANGES]:
            inputs, outputs = list(ours.inputs), list(ours.outputs)
            for position in positions:
                inputs[position] = before
                if position in next_of:
                    outputs[next_of[position]] = before
            kept = self.price(inputs, outputs, plan.constraints)
            changes.append(
                Change(
                    paths=tuple(self.traced.inputs[p].path for p in positions), before=before, after=after,
                    saving_s=kept.step_s(self.options.overlap) - ours.step_s(self.options.overlap),
                    saving_bytes=kept.memory.peak_bytes - ours.memory.peak_bytes,
                )
            )  # fmt: skip
        changes.sort(key=lambda change: -change.saving_s)
        return tuple(changes), sum(len(positions) for _, positions in ranked[_MOST_CHANGES:])

    def compiled(
        self,
        whose: str,
        side: Side,
        inputs: Sequence[Layout | None],
        outputs: Sequence[Layout | None],
        constraints: Sequence[Constraint],
    ) -> Side:
        mesh = self.target.mesh
        if isinstance(mesh, jax.sharding.AbstractMesh):
            raise ArgumentError(
                'audit(compile=True) needs a mesh with devices: jaxplan.target("tpu-v5e:2x4").mesh(...), or real ones'
            )
        lowered = lower_flat(self.traced, constraints, mesh, inputs, outputs, donate=self.traced.graph.donated)
        try:
            program = compile_for(lowered, mesh)
        except jax.errors.JaxRuntimeError as refused:
            wanted_bytes = refused_bytes(refused)
            if wanted_bytes is not None:
                return replace(side, compiled_bytes=wanted_bytes)
            raise CompilerError(
                f"XLA's compiler fails on `{self.traced.name}` with {whose} shardings "
                f"({str(refused).splitlines()[0]}): audit(compile=False) compares what is predicted alone"
            ) from refused
        found = compiled_collectives(
            program.as_text(), self.target.axes, while_trips=self.options.while_trips
        )
        every = [name for name, _ in self.target.axes]
        comm_s = sum(
            self.model.collective_over(c.kind, c.bytes, every if c.axes == ("?",) else c.axes) * c.trips
            for c in found
        )
        return replace(side, compiled_bytes=compiled_memory(program).peak_bytes, compiled_comm_s=comm_s)
