"""What a search learns of a plan that overran the budget: the resharded copies that were in memory at its peak.

The memory rows of a StrategyProblem belong to one node each, and whether a copy is made is said by two: rows don't
count copies.  Those of a plan that overran its budget are told to the search on from there, as memory of their readers,
for all layouts but the one in which the plan made the tensor.  With that the rows are near the simulation where it
matters; what is left between them is taken from the limit.  Bounds are those of the rows without it, and whatever is
found is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..cost import device_bytes
from ..ir import lives_of
from ..search import Evaluator, Space, Usage
from .found import Found

if TYPE_CHECKING:
    from .candidates import Pipeline

LARGE = 1e-3
"""Of the budget: smaller copies are left to the limit."""


class Told:
    """A space with more in its memory, of ever more plans that overran the budget.

    Attributes:
      space: the same decisions, nodes and prices, with the copies that were told in the problem's usages.
    """

    def __init__(self, pipeline: Pipeline, space: Space) -> None:
        self.space, self._pipeline = space, pipeline
        self._known: set[tuple[int, bytes, bytes]] = set()

    def tell(self, over: Found) -> bool:
        """Count what the rows lack of a plan that overran the budget; whether any of it was new."""
        new = tuple(self._copies(over))
        if new:
            problem = self.space.problem
            self.space = replace(self.space, problem=replace(problem, usages=problem.usages + new))
        return bool(new)

    def limit_bytes(self, over: Found) -> int:
        """The limit under which this plan would not have been found: the budget, less what its rows still lack."""
        counted = Evaluator(self.space.problem)(over.result.assignment).peak_bytes
        return min(self._pipeline.budget_bytes - (over.memory.peak_bytes - counted), counted - 1)

    def _copies(self, over: Found) -> Iterator[Usage]:
        pipeline, decision = self._pipeline, over.decision
        graph, crossing, profile = pipeline.graph, pipeline.crossing, pipeline.target.profile
        times = over.memory.times or crossing.times
        needed, _ = lives_of(graph, crossing.stored, times) if over.memory.times else crossing.lives
        for (op, position), row in decision.reads.items():
            value, port = graph.ops[op].operands[position], over.space.reads[op, position]
            made = decision.values.get(value)
            start, stop = times[op], needed[op]
            if made is None or made is row or not start <= over.memory.peak_time < stop:
                continue
            key = value, row.tobytes(), made.tobytes()
            if key in self._known or key[1] == key[2]:
                continue
            sizes = device_bytes(
                graph.values[value], port.places, pipeline.target.axes, profile.kind, crossing.tiling(value)
            )
            sizes = np.where((port.places == made).all(axis=1), 0, sizes)
            if sizes[over.result.assignment[port.node]] >= LARGE * pipeline.budget_bytes:
                self._known.add(key)
                yield Usage(node=port.node, start=start, stop=stop, bytes=sizes)
