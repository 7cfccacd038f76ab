"""Every assignment in turn: the oracle that the other algorithms are tested against, and exact on tiny
problems.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import numpy as np

from ..errors import ArgumentError
from .base import Incumbent, Progress, SearchResult, Termination
from .problem import Ints, StrategyProblem

#: Refused above: about a minute.
MOST_ASSIGNMENTS = 5_000_000

_BLOCK = 20_000


def solve(
    problem: StrategyProblem,
    *,
    time_limit_s: float | None = None,
    relative_gap: float = 0.0,
    seed: int = 0,
    on_progress: Progress | None = None,
    hint: Sequence[int] | None = None,
) -> SearchResult:
    """Price all assignments; of equally cheap ones the lexicographically first wins.

    ArgumentError above MOST_ASSIGNMENTS of them.  `relative_gap`, `seed` and `hint` change nothing.
    """
    sizes = [node.costs_s.size for node in problem.verify().nodes]
    count = math.prod(sizes)
    if count > MOST_ASSIGNMENTS:
        raise ArgumentError(
            f"exhaustive search over {count:.3g} assignments of {len(sizes)} nodes; at most "
            f'{MOST_ASSIGNMENTS} are taken: use the search "ilp"'
        )
    best = Incumbent(problem, on_progress)
    deadline = math.inf if time_limit_s is None else best.started + time_limit_s
    try:
        for block in _blocks(sizes, count):
            if time.monotonic() > deadline:
                return best.result(Termination.TIME_LIMIT)
            objective_s = _objectives(problem, block)
            at = int(np.argmin(objective_s))
            if objective_s[at] < best.objective_s:
                best.offer(block[at].tolist(), float(objective_s[at]))
    except KeyboardInterrupt:
        return best.result(Termination.INTERRUPTED)
    if not best.found and sizes:
        return best.result(
            Termination.INFEASIBLE, f"none of {count} assignments is allowed and within the limit"
        )
    best.raise_bound(best.objective_s)
    return best.result(Termination.OPTIMAL)


def _blocks(sizes: list[int], count: int) -> Iterator[Ints]:
    """All assignments in lexicographic order, [block, nodes] at a time."""
    for first in range(0, count, _BLOCK):
        flat = np.arange(first, min(first + _BLOCK, count))
        if sizes:
            yield np.stack(np.unravel_index(flat, sizes), axis=1)


def _objectives(problem: StrategyProblem, block: Ints) -> np.ndarray:
    """The cost of each assignment, infinity for those that are not feasible."""
    total = np.zeros(len(block))
    for node, chosen in zip(problem.nodes, block.T, strict=True):
        total += node.costs_s[chosen]
    for edge in problem.edges:
        pair = block[:, edge.tail], block[:, edge.head]
        total += (
            edge.costs_s[pair]
            if edge.allowed is None
            else np.where(edge.allowed[pair], edge.costs_s[pair], np.inf)
        )
    if problem.limit_bytes is not None:
        for time_step in {usage.start for usage in problem.usages}:
            alive = np.zeros(len(block), dtype=np.int64)
            for usage in problem.usages:
                if usage.start <= time_step < usage.stop:
                    alive += usage.bytes[block[:, usage.node]]
            total[alive > problem.limit_bytes] = np.inf
    return total
