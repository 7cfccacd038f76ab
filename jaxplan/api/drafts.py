"""What a step's tasks are made of before they are written down."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ir import Graph, Op
from ..sharding import Collective
from .combined import Alike

SUMS = frozenset({"all_reduce", "reduce_scatter"})
"""Collectives that finish what their operation made; the others bring in what it reads."""


@dataclass
class Draft:
    """A task that may still grow.

    Attributes:
      dearest_s: the price of the operation that names it.
      xla_s: what XLA takes all its runs to last; through: the tasks whose result it reads through a reshape.
    """

    name: str
    kind: str
    streams: tuple[str, ...]
    trips: float
    after: frozenset[int]
    where: str
    seconds_s: float = 0.0
    dearest_s: float = -1.0
    bytes: int = 0
    alike: Alike | None = None
    xla_s: float = 0.0
    through: frozenset[int] = frozenset()


@dataclass
class Sent:
    """The collectives around one operation: those that fetch its operands, those that finish its sums."""

    fetch: list[Collective] = field(default_factory=list)
    finish: list[Collective] = field(default_factory=list)


def moved(graph: Graph, op: Op, item: Collective) -> list[int]:
    """The operands that a collective brings into layout: those of its shape, or all where none has it."""
    alike = [v for v in op.operands if graph.values[v].shape == item.shape]
    return alike or list(op.operands)
