"""Searches of one tied problem in another process, which is told the problem once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .contract import Matrices
from .engine import start_solver
from .folds import Folds
from .problem import Ints, StrategyProblem
from .tied import Tied
from .tied_search import Alike, search_tied

TIED_SEARCHER = "jaxplan.search.tied_searcher:TiedSearcher"
"""Who answers there."""


@dataclass(frozen=True, eq=False)
class _Held:
    tied: Tied
    matrices: Matrices = field(default_factory=Matrices)


class TiedSearcher:
    """`Folds.alike` asks this of a problem first, wherever it is asked."""

    def __init__(self) -> None:
        self._held: _Held | None = None
        start_solver()

    def hold(self, problem: StrategyProblem | Tied) -> bool:
        """Take the problem that is searched from now on, to be tied here where it isn't; False where it can't be."""
        if isinstance(problem, Tied):
            self._held = _Held(problem)
        else:
            folds = Folds(problem)
            tied = folds.layers(problem.limit_bytes)
            self._held = None if tied is None else _Held(tied, folds.matrices)
        return self._held is not None

    def search(
        self, kept: Mapping[int, Ints], time_limit_s: float | None, relative_gap: float, seed: int, enough_s: float
    ) -> Alike:
        """`search_tied` of it."""
        assert self._held is not None
        return search_tied(
            self._held.tied, kept, time_limit_s=time_limit_s, relative_gap=relative_gap, seed=seed, enough_s=enough_s,
            matrices=self._held.matrices,
        )  # fmt: skip
