"""What XLA for TPU runs later than it could, as much of it as memory has room for: found once for all amounts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..ir import Graph
from ..sharding import MeshAxes
from .beside_gathers import beside_gathers
from .held_back import behind_loops, run_later
from .model import CostModel
from .rounded_sums import Behind, behind_rounded, put_behind
from .with_updates import with_updates


@dataclass(frozen=True)
class Deferred:
    """Products and gathers, each with when it runs instead.

    Attributes:
      behind: a sum that is rounded up, see `rounded_sums`; gathers, sums_at: beside gathers, see `beside_gathers`;
        updates: with updates, see `with_updates`.
    """

    behind: Behind | None = None
    gathers: Mapping[int, int] = field(default_factory=dict)
    sums_at: Mapping[int, int] = field(default_factory=dict)
    updates: Mapping[int, int] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """How many there are of the kind of which there are most."""
        return max(0 if self.behind is None else len(self.behind.ops), len(self.gathers), len(self.updates))

    def first(self, count: int) -> Deferred:
        """The first so many of each kind."""
        gathers, updates = (dict(itertools.islice(late.items(), count)) for late in (self.gathers, self.updates))
        behind = None if self.behind is None else self.behind._replace(ops=self.behind.ops[:count])
        return replace(self, behind=behind, gathers=gathers, updates=updates)

    def times(self, graph: Graph, times: tuple[int, ...]) -> tuple[int, ...]:
        """`times` with these run when they do: what the products of one kind are, later ones after it."""
        if self.behind is not None:
            times = put_behind(graph, times, self.behind)
        late = {**self.gathers, **self.updates}
        return run_later(behind_loops(graph), times, late) if late else times


def deferred(
    graph: Graph,
    axes: MeshAxes,
    model: CostModel,
    stored: Sequence[bool],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    outputs: Mapping[int, np.ndarray] | None,
    seconds: Mapping[int, float] | None,
) -> Deferred:
    """Of a step on TPU.

    Args:
      stored: see `fusion.Traffic`; seconds: of every operation, all its runs; None: nothing runs beside gathers.
      values, reads: the layout row of every value where it is made, and of every operand as it is read; outputs: of
        results, by position.
    """
    behind = behind_rounded(graph, axes, model, stored, values, reads)
    found = Deferred(behind, updates=with_updates(graph, axes, values))
    if model.profile.gathers_in_products and seconds is not None:
        late = beside_gathers(graph, model, stored, values, reads, outputs, seconds)
        found = replace(found, gathers=late.products, sums_at=late.sums)
    return found
