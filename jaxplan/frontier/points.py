"""The Frontier value: its points, which of them answers a wish, and its forms as text, JSON and picture."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ArgumentError, InfeasibleError
from ..plans import Plan
from ..units import BYTES, SECONDS, format_bytes, format_seconds, parse_bytes, told_apart
from .document import reading, write_document

#: A regret that only float sums in another order make.
PROVED = 1e-6


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """One plan that no other one found beats in both.

    Attributes:
      step_s, peak_bytes: what the search prices a step at, and the peak of its simulated memory on one device.
      counted_bytes: the peak as the search counts it: without the copies that resharding makes.
      bound_s: nothing that it counts at so many bytes is faster.
      make: makes the plan; None in a frontier read from a file.
    """

    step_s: float
    peak_bytes: int
    bound_s: float
    counted_bytes: int
    make: Callable[[], Plan] | None = field(default=None, compare=False, repr=False)

    @property
    def plan(self) -> Plan:
        """The plan, checked against the partitioner now.

        Raises:
          ArgumentError: the frontier was read from a file.
        """
        if self.make is None:
            raise ArgumentError(
                "a frontier read from a file has no plans: make this one with "
                f"jaxplan.plan(..., memory_budget={self.peak_bytes})"
            )
        return self.make()


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Plans by increasing memory and decreasing time, both strictly.

    Attributes:
      name: of the step; mesh, hardware: in words; memory_bytes: what one device has for a program.
      points: at least one.
      method: how they were found, in words.
      eps: points nearer than this were not parted: in time, relatively, or of the memory from end to end.
      regret_bound: at any budget, how much slower at most, relatively, the fastest of these points is than the fastest
        plan there is, both by their `counted_bytes`; budgets as near to the next point as `eps` says are the next
        point's.
      apart_regret_bound: None, or layers that repeat were decided once: `bound_s` and `regret_bound` are of plans that
        cut them alike, and this is how much slower than any plan a point is at most.
    """

    name: str
    mesh: str
    hardware: str
    memory_bytes: int
    points: tuple[FrontierPoint, ...]
    method: str
    eps: float
    regret_bound: float
    apart_regret_bound: float | None = None

    def at_memory(self, budget: int | str) -> FrontierPoint:
        """The fastest point within a budget, in bytes or as "12GiB".

        Raises:
          InfeasibleError: no point is; says the smallest peak that is reached.
        """
        budget_bytes = parse_bytes(budget)
        position = bisect_right([point.peak_bytes for point in self.points], budget_bytes)
        if position:
            return self.points[position - 1]
        least = self.points[0]
        raise InfeasibleError(
            f"no plan for `{self.name}` on mesh ({self.mesh}) fits {format_bytes(budget_bytes)} a device. Smallest "
            f"peak on the frontier: {format_bytes(least.peak_bytes)}, at {format_seconds(least.step_s)} a step. Raise "
            "the budget, use a larger mesh, or recompute more (jax.checkpoint)"
        )

    def at_time(self, step_s: float) -> FrontierPoint:
        """The point of least memory within a step time, in seconds.

        Raises:
          InfeasibleError: no point is; says the fastest.
        """
        for point in self.points:
            if point.step_s <= step_s:
                return point
        fastest = self.points[-1]
        raise InfeasibleError(
            f"no plan for `{self.name}` on mesh ({self.mesh}) takes {format_seconds(step_s)} a step. Fastest on the "
            f"frontier: {format_seconds(fastest.step_s)}, with a peak of {format_bytes(fastest.peak_bytes)} a device. "
            "Allow more time, or use a larger mesh"
        )

    @property
    def knee(self) -> FrontierPoint:
        """The point farthest from the line between both ends, each axis taken from end to end: the best bargain."""
        slow, fast = self.points[0], self.points[-1]
        bytes_wide, seconds_wide = fast.peak_bytes - slow.peak_bytes, slow.step_s - fast.step_s

        def bargain(point: FrontierPoint) -> float:
            if not bytes_wide:
                return 0.0
            spent = (point.peak_bytes - slow.peak_bytes) / bytes_wide
            return (slow.step_s - point.step_s) / seconds_wide - spent

        return max(self.points, key=lambda point: (bargain(point), -point.peak_bytes))

    def __str__(self) -> str:
        lines = [
            f"Frontier of `{self.name}` on ({self.mesh}), {self.hardware}: {len(self.points)} plans, {self.method}, "
            f"{_proved(self.regret_bound)}{self._counted()}",
            f"  {'peak a device':>14}  {'step':>12}  {'not faster than':>15}",
        ]
        size = told_apart([point.peak_bytes for point in self.points], BYTES)
        step, knee = told_apart([point.step_s for point in self.points], SECONDS), self.knee
        for point in self.points:
            mark = "  <- knee" if point is knee and len(self.points) > 2 else ""
            over = "  (more than a device has)" if point.peak_bytes > self.memory_bytes else ""
            shown = f"  {size(point.peak_bytes):>14}  {step(point.step_s):>12}  {step(point.bound_s):>15}"
            lines.append(f"{shown}{mark}{over}")
        return "\n".join(lines)

    def _counted(self) -> str:
        """What is to be said of the proof."""
        parts = []
        if self.apart_regret_bound is not None:
            parts.append(f"against layers cut apart, {_within(self.apart_regret_bound)}")
        copies = [point.peak_bytes - point.counted_bytes for point in self.points]
        if any(copies):
            least, most = format_bytes(min(copies)), format_bytes(max(copies))
            size = least if least == most else f"{least} to {most}"
            parts.append(f"counted without resharded copies ({size} of each peak)")
        return f" ({'; '.join(parts)})" if parts else ""

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the points, without their plans; the same file for the same frontier."""
        document = {
            "name": self.name, "mesh": self.mesh, "hardware": self.hardware,
            "memory_bytes": self.memory_bytes, "method": self.method, "eps": self.eps,
            "regret_bound": self.regret_bound, "apart_regret_bound": self.apart_regret_bound,
            "points": [[p.peak_bytes, p.step_s, p.bound_s, p.counted_bytes] for p in self.points],
        }  # fmt: skip
        write_document(path, document)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Frontier:
        """Read what `to_json` wrote.

        Raises:
          PlanFileError: the file is no frontier, or of another schema.
        """
        with reading(path, "frontier") as document:
            points = tuple(
                FrontierPoint(
                    peak_bytes=int(size), step_s=float(step_s), bound_s=float(bound_s), counted_bytes=int(counted)
                )
                for size, step_s, bound_s, counted in document.pop("points")
            )
            return cls(points=points, **document)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the frontier as an SVG."""
        from .picture import frontier_picture

        Path(path).write_text(frontier_picture(self), encoding="utf-8")


def _proved(regret_bound: float) -> str:
    return "proved" if regret_bound < PROVED else f"proved {_within(regret_bound)}"


def _within(regret_bound: float) -> str:
    percent = 100 * regret_bound
    return f"within {percent:.2g} %" if percent < 100 else f"within {percent:.0f} %"
