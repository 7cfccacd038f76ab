"""What a search decided, and what the partitioner made of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..cost import MemoryProfile
from ..lowering import Checked, Orders, Sending
from ..search import Decision, SearchResult, Space
from ..sharding import Layout


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search decided: layouts, compute and communication as the search prices them, memory as it will be.

    `orders`: of the axes that cut dimensions together, where they are found already.
    """

    space: Space
    result: SearchResult
    decision: Decision
    memory: MemoryProfile
    orders: Orders | None = None


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A found plan as the partitioner realises it.

    Attributes:
      compute_s, comm_s: of a step, with the collectives that the partitioner really inserts; sent: each of them;
        written_s: of those that the step's own `shard_map`s send, of which the search, having no say, knows nothing;
        lone_s: of starts, see `Sending`.
    """

    name: str
    found: Found
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    checked: Checked
    compute_s: float
    comm_s: float
    sent: tuple[Sending, ...]
    written_s: float
    lone_s: float = 0.0

    def searched_s(self, seconds: float, overlap: float) -> float:
        """An objective or a bound of the search's as seconds of a whole step, what it doesn't know as in this plan."""
        return seconds + (1 - overlap) * (self.written_s + self.lone_s)

    def step_s(self, overlap: float) -> float:
        """Seconds of a step when `overlap` of the communication is hidden."""
        return self.compute_s + (1 - overlap) * self.comm_s


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """A search that found nothing within the budget; `result` says why, `least` is the smallest that was simulated."""

    space: Space
    result: SearchResult
    least: MemoryProfile | None = None


def assignment_in(space: Space, found: Found) -> tuple[int, ...]:
    """An assignment of a space with more pins, in this one: the same layouts, counted among more."""
    chosen = list(found.result.assignment)
    for value, port in found.space.values.items():
        wider = space.values[value].places
        if len(wider) != len(port.places):
            row = port.places[chosen[port.node]]
            chosen[port.node] = int(np.flatnonzero((wider == row).all(axis=1))[0])
    return tuple(chosen)
