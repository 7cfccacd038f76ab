"""`jaxplan.export`: of what a plan pins inside the step, the least that has to be written by hand.

A plan pins values by the hundred, most of them where the partitioner would have chosen the same or as well.  Those who
want to go on without jaxplan write its PartitionSpecs on arguments and results, which alone may be ten times as slow:
propagation then decides inside.  What matters there are a few lines, often the first: what leaves an embedding.  The
evaluator says which: the first lines of the program that are enough, and of these those that can't be left out, many at
once at first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..api import Options, as_options, speaker, step_of_shapes, target_of
from ..errors import ArgumentError, PlanMismatchError
from ..plans import Constraint, Plan
from ..units import format_bytes, format_seconds
from .audit import Auditor

Line = tuple[str, str, tuple[int, ...], str, str]


@dataclass(frozen=True, kw_only=True)
class Export:
    """A plan in as few lines as are as good as the whole; predicted seconds and bytes, one device, one step.

    Attributes:
      plan: with those of its constraints that are left.
      step_s, peak_bytes: with these; all_s: with all that the plan has; none_s: with none.
      lines, all_lines: how many places in the program the constraints are of, alike ones of a place as one.
    """

    plan: Plan
    step_s: float
    peak_bytes: int
    all_s: float
    none_s: float
    lines: int
    all_lines: int

    def to_python(self) -> str:
        """As `Plan.to_python`: a module that needs jax alone, with the lines to write inside the step at its end."""
        return self.plan.to_python()

    def __str__(self) -> str:
        rows = (
            ("all of the plan's", self.all_lines, self.all_s),
            ("none", 0, self.none_s),
            ("these", self.lines, self.step_s),
        )
        table = [f"  {name:<18}{lines:>5} lines  {format_seconds(step_s):>9} a step" for name, lines, step_s in rows]
        _, _, lines = self.plan.to_python().partition("\n# Inside the step")
        return "\n".join(
            [
                f"Export of the plan of `{self.plan.name}`: specs of arguments and results, and constraints inside",
                *table,
                f"  peak {format_bytes(self.peak_bytes)} of {format_bytes(self.plan.budget_bytes)} a device",
                "",
                *(line.removeprefix("# ") for line in lines.splitlines()[2:]),
            ]
        )


def export(
    plan: Plan,
    train_step: Callable[..., Any],
    *shapes: Any,
    within: float = 0.01,
    donate_argnums: int | Sequence[int] = (),
    hardware: Any = None,
    options: Options | Mapping[str, Any] | None = None,
) -> Export:
    """The fewest `with_sharding_constraint`s inside the step with which its plan is as good as with all.

    Each try asks the partitioner, which takes a second or less; there are some dozens.  Ctrl-C ends them, and what is
    left by then is returned.

    Args:
      plan: of this step at these shapes.
      shapes: the step's arguments, arrays or ShapeDtypeStructs.
      within: how much slower the step may become; its peak stays within the plan's budget, or is none higher.
      donate_argnums, hardware, options: as of `auto_shard`; hardware by default the plan's.

    Raises:
      ArgumentError: no step to export the plan of.  PlanMismatchError: the plan is of another program.
    """
    if not isinstance(plan, Plan) or not callable(train_step):
        raise ArgumentError("export(plan, train_step, *shapes) takes a Plan, its plain step and the step's arguments")
    chosen = as_options(options)
    target = target_of(plan.mesh, hardware or plan.hardware)
    traced = step_of_shapes(train_step, shapes, donate_argnums, chosen).traced(target)
    if plan.fingerprint != traced.fingerprint:
        raise PlanMismatchError(
            f"the plan is of another program than `{traced.name}` at these shapes (fingerprint {plan.fingerprint} in "
            f"the plan, {traced.fingerprint} now): plan it again, or give the shapes and options it was planned for"
        )
    fewest = _Fewest(plan, Auditor(traced, target, chosen), within, speaker(chosen))
    return fewest.found()


@dataclass
class _Fewest:
    """Leaves lines out while the rest is good enough.

    Attributes:
      left: of each line the constraints, in program order.
      priced: seconds and peak bytes by the lines that are there, each asked once.
    """

    plan: Plan
    auditor: Auditor
    within: float
    say: Callable[[str], None]
    left: dict[Line, list[Constraint]] = field(default_factory=dict)
    priced: dict[frozenset[Line], tuple[float, int]] = field(default_factory=dict)

    def found(self) -> Export:
        for one in sorted(self.plan.constraints, key=lambda one: (*one.site.frame, one.site.equation)):
            if one.is_pin:
                line = (one.source, one.primitive, one.shape, str(one.layout.spec()), one.why)
                self.left.setdefault(line, []).append(one)
        lines = list(self.left)
        all_s, all_bytes = self._price(())
        none_s, _ = self._price(lines)
        self.enough_s, self.enough_bytes = all_s * (1 + self.within), max(self.plan.budget_bytes, all_bytes)
        try:
            first = 0
            while first < len(lines) and not self._left_out(lines[first:]):
                first = max(2 * first, 1)
            # the last first: what is pinned in the forward pass is easier to write than its gradient
            self._leave_out(lines[:first][::-1])
            # what was needed beside others may no longer be
            count = -1
            while count != len(self.left):
                count = len(self.left)
                for line in list(self.left):
                    self._left_out([line])
        except KeyboardInterrupt:
            self.say("interrupted: what was not tried stays")
        step_s, peak_bytes = self._price(())
        return Export(
            plan=replace(self.plan, constraints=self._constraints(self.left)), step_s=step_s, peak_bytes=peak_bytes,
            all_s=all_s, none_s=none_s, lines=len(self.left), all_lines=len(lines),
        )  # fmt: skip

    def _leave_out(self, lines: Sequence[Line]) -> None:
        """All of these, or halves of them that can be."""
        if lines and not self._left_out(lines) and len(lines) > 1:
            half = len(lines) // 2
            self._leave_out(lines[:half])
            self._leave_out(lines[half:])

    def _left_out(self, lines: Sequence[Line]) -> bool:
        """Whether all of these could be, and are."""
        step_s, peak_bytes = self._price(lines)
        good = step_s <= self.enough_s and peak_bytes <= self.enough_bytes
        if good:
            for line in lines:
                del self.left[line]
        self.say(f"{format_seconds(step_s)} without {len(lines)} lines; {len(self.left)} left")
        return good

    def _constraints(self, lines: Collection[Line]) -> tuple[Constraint, ...]:
        kept = {id(one) for line in lines for one in self.left[line]}
        return tuple(one for one in self.plan.constraints if id(one) in kept or not one.is_pin)

    def _price(self, without: Collection[Line]) -> tuple[float, int]:
        """Seconds and peak bytes of the step with the lines that are left but these."""
        lines = frozenset(self.left).difference(without)
        if lines not in self.priced:
            inputs, outputs = [t.layout for t in self.plan.inputs], [t.layout for t in self.plan.outputs]
            step = self.auditor.price(inputs, outputs, self._constraints(lines))
            self.priced[lines] = step.step_s(self.auditor.options.overlap), step.memory.peak_bytes
        return self.priced[lines]
