"""What runs in a step, in program order, and what waits for what: the part of a plan that can be simulated."""

from __future__ import annotations

from dataclasses import dataclass

COMPUTE = "compute"
"""The stream of the compute unit, and the kind of what runs on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTask:
    """Work of one device: a stretch of computation, one collective, or the edge of a loop.

    Attributes:
      name: the dearest primitive of a computation, or the collective and its axes.
      kind: "compute", a collective's kind, or "barrier" (a loop begins or ends: nothing runs across it).
      streams: what it holds while it runs: "compute", or the links of its mesh axes, with "compute" where the compute
        unit stands still meanwhile; none for a barrier.
      seconds_s: of all its runs in a step; trips: how many these are.
      after: positions in `Plan.tasks`, all earlier, of what has to end first.
      where: the user's line.
      bytes: the most memory alive on the device during a computation; 0 for others.
    """

    name: str
    kind: str
    streams: tuple[str, ...]
    seconds_s: float
    trips: float
    after: tuple[int, ...]
    where: str
    bytes: int

    @property
    def works_on(self) -> tuple[str, ...]:
        """The streams that it keeps busy."""
        return self.streams if self.kind == COMPUTE else tuple(one for one in self.streams if one != COMPUTE)
