"""The Frontier value: its points, which of them answers a wish, and its forms as text, JSON and picture."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ArgumentError, InfeasibleError
from ..plans import Plan
from ..units import format_bytes, format_seconds, parse_bytes
from .document import reading, write_document


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """One plan that no other one found beats in both.

    Attributes:
      step_s, peak_bytes: what the search prices a step at, and the peak of its simulated memory on one device.
      counted_bytes: the peak as the search counts it: without the copies that resharding makes.
      bound_s: nothing that it counts at so many bytes is faster.
      regret: up to the next point that it found, by its count, this one is at most so much slower than the fastest plan
        there is, relatively; budgets as near to the next point as `eps` says are the next point's.  Where layers that
        repeat were decided once, `bound_s` and `regret` are of plans that cut them alike.
      apart_regret: the same of any plan.
      make: makes the plan; None in a frontier read from a file.
    """

    step_s: float
    peak_bytes: int
    bound_s: float
    counted_bytes: int
    regret: float = 0.0
    apart_regret: float = 0.0
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
      alike: whether layers that repeat were decided once.
    """

    name: str
    mesh: str
    hardware: str
    memory_bytes: int
    points: tuple[FrontierPoint, ...]
    method: str
    eps: float
    alike: bool = False

    @property
    def regret_bound(self) -> float:
        """The largest of the points' regrets: 0 where every one is proved."""
        return max(point.regret for point in self.points)

    @property
    def apart_regret_bound(self) -> float:
        """The same against plans that may cut layers apart that repeat."""
        return max(point.apart_regret for point in self.points)

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
        from .frontier_text import frontier_text

        return frontier_text(self)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the points, without their plans; the same file for the same frontier."""
        document = {
            "name": self.name, "mesh": self.mesh, "hardware": self.hardware,
            "memory_bytes": self.memory_bytes, "method": self.method, "eps": self.eps,
            "alike": self.alike,
            "points": [
                {
                    "peak_bytes": p.peak_bytes, "step_s": p.step_s, "bound_s": p.bound_s,
                    "counted_bytes": p.counted_bytes, "regret": p.regret, "apart_regret": p.apart_regret,
                }
                for p in self.points
            ],
        }  # fmt: skip
        write_document(path, document)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Frontier:
        """Read what `to_json` wrote.

        Raises:
          PlanFileError: the file is no frontier, or of another schema.
        """
        with reading(path, "frontier") as document:
            points = tuple(FrontierPoint(**point) for point in document.pop("points"))
            return cls(points=points, **document)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the frontier as an SVG."""
        from .picture import frontier_picture

        Path(path).write_text(frontier_picture(self), encoding="utf-8")

