"""Holding a plan to what XLA makes of it: one that takes more than its budget as compiled is made again, and where the
compiler fails on one the next template is taken.

The planner's memory is a model.  Where a plan compiles to more than its budget, what the model lacked of it is taken
off the budget and the step is planned within the rest: that plan can't come out again, and what is lacking of one plan
of a step is most of what is lacking of the next.

Compilers have faults that only some layouts meet: XLA for TPU was seen to fail a check of its own where it made
reduce_scatters of an equivariant network's sums (jax 0.10.2, libtpu 0.0.42.1).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from ..errors import InfeasibleError
from ..lowering import compiled_memory, is_fault, refused_bytes
from ..plans import Plan
from ..units import format_bytes, format_seconds
from .options import TEMPLATES

MOST_PLANS = 5
"""Plans of one step that are compiled before giving up on its budget."""

MOST_FAILURES = 3
"""Templates that are compiled in the place of a plan that the compiler fails on: each may take minutes."""


def peak_as_compiled(compile_step: Callable[[], Any]) -> int | None:
    """Bytes a device of what `compile_step` compiles, or would take where XLA refuses it for want of memory.

    None where the backend doesn't say.
    """
    try:
        compiled = compile_step()
    except jax.errors.JaxRuntimeError as refused:
        wanted = refused_bytes(refused)
        if wanted is None:
            raise
        return wanted
    return compiled_memory(compiled).peak_bytes if compiled.memory_analysis() is not None else None


class Held:
    """One step's plans within one budget, each held against what was compiled of it.

    Attributes:
      plan: the one to run, so far.
    """

    def __init__(
        self, plan: Plan, within: Callable[[int], Plan], say: Callable[[str], None],
        template: Callable[[str], Plan] | None = None,
    ) -> None:  # fmt: skip
        """`within(limit)`: the step planned again, within so many bytes a device; `template(name)`: by a template."""
        self.plan, self._within, self._template, self._say = plan, within, template, say
        self._tried: list[tuple[int, Plan]] = []
        self._failed: list[tuple[Plan, jax.errors.JaxRuntimeError]] = []
        self._left = sorted(plan.templates, key=plan.templates.__getitem__) or list(TEMPLATES)

    def instead(self, failure: jax.errors.JaxRuntimeError) -> bool:
        """Whether `plan` is another one now, to be compiled, since the compiler failed on the last.

        That is the fastest template that lies otherwise than whatever it failed on, which is warned of.

        Raises:
          jax.errors.JaxRuntimeError: the first failure, where the compiler failed on the templates too.
        """
        if self._template is None or not is_fault(failure):
            return False
        self._failed.append((self.plan, failure))
        first, reason = self._failed[0][0], str(self._failed[0][1]).splitlines()[0]
        while self._left and len(self._failed) <= MOST_FAILURES:
            name = self._left.pop(0)
            self._say(f"XLA's compiler fails on the plan ({reason}): planning by template {name}")
            try:
                plan = self._template(name)
            except InfeasibleError:
                continue
            if any(plan.lies_as(failed) for failed, _ in self._failed):
                continue
            warning = (
                f"XLA's compiler fails on the plan of {format_seconds(first.cost.step_s)} a step ({reason}): template "
                f"`{name}`, of {format_seconds(plan.cost.step_s)}, runs instead"
            )
            warnings.warn(f"jaxplan: `{plan.name}`: {warning}", stacklevel=_calls_within_jaxplan())
            self.plan = replace(plan, warnings=(*plan.warnings, warning))
            return True
        if len(self._failed) > 1:
            raise self._failed[0][1]
        return False

    def again(self, compiled_bytes: int) -> bool:
        """Whether `plan` is another one now, to be compiled, since the last was compiled to so many bytes.

        Where none is found that fits as compiled, it is the one that takes least; that is warned of, and XLA has the
        last word.
        """
        budget = self.plan.budget_bytes
        if compiled_bytes <= budget:
            return False
        self._tried.append((compiled_bytes, self.plan))
        told = ", ".join(
            f"{format_bytes(plan.cost.peak_bytes)} planned were {format_bytes(compiled)} compiled"
            for compiled, plan in self._tried
        )
        lacking = compiled_bytes - self.plan.cost.peak_bytes
        # the second where no plan leaves so much room: the next one may want less of it
        limits = (budget - lacking, self.plan.cost.peak_bytes - 1) if len(self._tried) < MOST_PLANS else ()
        for limit in limits:
            limit = max(limit, 0)
            self._say(f"{told}, of {format_bytes(budget)}: planning within {format_bytes(limit)}")
            try:
                plan = self._within(limit)
            except InfeasibleError:
                continue
            line = f"held to its budget of {format_bytes(budget)}: {told}; planned again within {format_bytes(limit)}"
            self.plan = replace(plan, budget_bytes=budget, assumptions=(*plan.assumptions, line))
            return True
        least_bytes, plan = min(self._tried, key=lambda tried: tried[0])
        warning = (
            f"as compiled no plan that was found keeps to the budget of {format_bytes(budget)} a device ({told}): this "
            f"one takes {format_bytes(least_bytes)}. Raise memory_budget, or take more devices"
        )
        warnings.warn(f"jaxplan: `{plan.name}`: {warning}", stacklevel=_calls_within_jaxplan())
        self.plan = replace(plan, warnings=(*plan.warnings, warning))
        return False


def _calls_within_jaxplan() -> int:
    """The `stacklevel` at which a warning points to who called."""
    package, frame, level = __name__.partition(".")[0], sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    return level
