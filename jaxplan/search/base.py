"""What every search algorithm returns, and the names they are called by."""

from __future__ import annotations

import copy
import enum
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ..errors import SolverError
from .evaluate import Evaluator
from .problem import StrategyProblem

#: A solver's own objective may differ from the recomputed one by its arithmetic alone: this much, relatively.
OBJECTIVE_TOLERANCE = 1e-9


class Termination(enum.Enum):
    """Why a search stopped.  Only OPTIMAL claims a proof, within the relative gap that was asked for."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    TIME_LIMIT = "time_limit"
    INTERRUPTED = "interrupted"
    INFEASIBLE = "infeasible"


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best assignment found, what it costs, and what is known of the least possible cost.

    `bound_s` is a proved lower bound on every feasible assignment (-inf when nothing is known).  `assignment`
    is empty, `objective_s` infinite and `peak_bytes` -1 when nothing feasible was found.  INFEASIBLE is a
    proof that there is nothing, and `reason` says which rule it breaks; `least_peak` then tells how many
    bytes would do.  Of a search that proves nothing, `reason` may say what in it was not exact.  `history` holds
    (wall_s, objective_s, bound_s) whenever either got better.  `folded_s` is the least cost found with nodes that are
    alike choosing alike, where the problem was folded (fold.py).
    """

    assignment: tuple[int, ...]
    objective_s: float
    bound_s: float
    termination: Termination
    peak_bytes: int
    wall_s: float
    history: tuple[tuple[float, float, float], ...] = ()
    reason: str = ""
    folded_s: float | None = None

    @property
    def found(self) -> bool:
        """Whether something feasible was; a problem of no nodes has an assignment too, the empty one."""
        return math.isfinite(self.objective_s)

    @property
    def gap(self) -> float:
        """(objective - bound) / |objective|, at least 0; 0 for a cost of zero that is proved, inf without a
        bound.
        """
        slack = self.objective_s - self.bound_s
        if not math.isfinite(slack):
            return math.inf
        if slack <= 0:
            return 0.0
        return slack / abs(self.objective_s) if self.objective_s else math.inf

    def bounded(self, bound_s: float, relative_gap: float) -> SearchResult:
        """The same, no better proved than `bound_s` says: optimal no more where that leaves a wider gap."""
        result = replace(self, bound_s=min(self.bound_s, bound_s))
        if result.termination is Termination.OPTIMAL and result.gap > relative_gap:
            return replace(result, termination=Termination.FEASIBLE)
        return result

    @property
    def best_at_s(self) -> float:
        """Seconds after which the assignment was found; infinite without one."""
        return next((wall_s for wall_s, objective_s, _ in self.history if objective_s == self.objective_s), math.inf)


#: (objective_s of the best so far, bound_s), whenever either moves.
Progress = Callable[[float, float], None]


class Search(Protocol):
    """The signature all algorithms share.

    Stops by itself when the bound is within `relative_gap`, else at `time_limit_s` (None: never), then or at
    Ctrl-C with the best so far.  `hint` is an assignment to start from.  The same problem, seed and hint give
    the same assignment, unless a time limit cuts the search short.
    """

    def __call__(
        self,
        problem: StrategyProblem,
        *,
        time_limit_s: float | None = None,
        relative_gap: float = 1e-4,
        seed: int = 0,
        on_progress: Progress | None = None,
        hint: Sequence[int] | None = None,
    ) -> SearchResult: ...


class Incumbent:
    """The best feasible assignment so far and the best bound so far, with the times at which they came.

    Where only what costs less than `enough_s` is wanted, a bound that excludes it ends the search; with an
    `enough_gap`, as soon as what is found is as near to the bound as that is beyond `enough_s`, or within
    `enough_gap`, if that is less.
    """

    def __init__(
        self,
        problem: StrategyProblem,
        on_progress: Progress | None = None,
        enough_s: float = math.inf,
        enough_gap: float = math.inf,
    ) -> None:
        self.enough_s, self.enough_gap = enough_s, enough_gap
        self.evaluator = Evaluator(problem)
        # What rounding can make of costs that cancel.
        self._noise_s = 1e-12 * math.fsum(self.evaluator.largest_costs().tolist())
        self.assignment: tuple[int, ...] = ()
        self.objective_s, self.bound_s = math.inf, -math.inf
        self.started = time.monotonic()
        self._on_progress = on_progress
        self._history: list[tuple[float, float, float]] = []

    @property
    def found(self) -> bool:
        """Whether there is a feasible assignment so far."""
        return math.isfinite(self.objective_s)

    @property
    def wall_s(self) -> float:
        """Seconds since the search began."""
        return time.monotonic() - self.started

    def aside(self) -> Incumbent:
        """A copy that goes its own way and reports nothing."""
        other = copy.copy(self)
        other._history, other._on_progress = [], None
        return other

    def offer(self, assignment: Sequence[int], claimed_s: float | None = None) -> bool:
        """Keep the assignment if it is feasible and cheaper; SolverError if it does not cost what was
        claimed.
        """
        found = self.evaluator(assignment)
        if claimed_s is not None:
            size_s = max(abs(claimed_s), abs(found.objective_s))
            if abs(found.objective_s - claimed_s) > OBJECTIVE_TOLERANCE * size_s + self._noise_s:
                raise SolverError(
                    f"the search claims {claimed_s!r} s for an assignment that costs {found.objective_s!r} s"
                )
        if found.feasible and found.objective_s < self.objective_s:
            self.assignment, self.objective_s = tuple(int(s) for s in assignment), found.objective_s
            self._record()
        return found.feasible

    def raise_bound(self, bound_s: float) -> None:
        """Note a proved lower bound; a weaker one than is known changes nothing."""
        if bound_s > self.bound_s:
            self.bound_s = bound_s
            self._record()

    def closed(self, relative_gap: float) -> bool:
        """Whether the best so far is within the gap of the bound, or nothing costs as little as is wanted."""
        if self.bound_s >= self.enough_s:
            if math.isinf(self.enough_gap):
                return True
            beyond = (self.bound_s - self.enough_s) / abs(self.enough_s) if self.enough_s else math.inf
            relative_gap = max(relative_gap, min(beyond, self.enough_gap))
        slack = self.objective_s - self.bound_s
        return math.isfinite(slack) and slack <= relative_gap * abs(self.objective_s)

    def result(self, termination: Termination, reason: str = "") -> SearchResult:
        """The search as it stands."""
        found = self.evaluator(self.assignment) if self.found else None
        return SearchResult(
            assignment=self.assignment,
            objective_s=self.objective_s,
            bound_s=min(self.bound_s, self.objective_s),
            termination=termination,
            peak_bytes=found.peak_bytes if found else -1,
            wall_s=self.wall_s,
            history=tuple(self._history),
            reason=reason,
        )

    def _record(self) -> None:
        self._history.append((self.wall_s, self.objective_s, self.bound_s))
        if self._on_progress is not None:
            self._on_progress(self.objective_s, self.bound_s)
