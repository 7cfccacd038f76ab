"""From a StrategyProblem to an assignment: exact search, local search, and the judge of both."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from . import descend, exhaustive, fold, given, ilp
from .base import Progress as Progress
from .base import Search as Search
from .base import SearchResult as SearchResult
from .base import Termination as Termination
from .build import build as build
from .charges import Charge as Charge
from .charges import Crossed as Crossed
from .charges import charged as charged
from .contest import ContestProblem as ContestProblem
from .contest import read_contest as read_contest
from .contest import write_contest as write_contest
from .engine import start_solver as start_solver
from .evaluate import Evaluation as Evaluation
from .evaluate import Evaluator as Evaluator
from .evaluate import evaluate as evaluate
from .fold import solve_folded as solve_folded
from .folded_tradeoff import folded_tradeoff as folded_tradeoff
from .folds import Folds as Folds
from .ilp import solve as solve
from .known import Tradeoff as Tradeoff
from .known import TradeoffPoint as TradeoffPoint
from .known import Weigh as Weigh
from .known import staircase as staircase
from .least_peak import least_peak as least_peak
from .narrow import narrow as narrow
from .problem import Edge as Edge
from .problem import Node as Node
from .problem import StrategyProblem as StrategyProblem
from .problem import Usage as Usage
from .space import Allowed as Allowed
from .space import Decision as Decision
from .space import Passage as Passage
from .space import Space as Space
from .space import decide as decide
from .space import pinned as pinned
from .tied import Tied as Tied
from .tied_search import Alike as Alike
from .tied_searcher import TIED_SEARCHER as TIED_SEARCHER
from .tradeoff import tradeoff as tradeoff


def _compiled(name: str) -> Search:
    """The `solve` of a module whose compiled kernels are loaded when it is first called, before its time counts."""

    def solve(problem: StrategyProblem, **settings: Any) -> SearchResult:
        # compiled code, and what compiles it, are loaded by those who need them
        from .warm import warmed

        return warmed(name)(problem, **settings)

    return solve


#: Every search algorithm by its name; `solve` is "ilp".
SEARCHES: Mapping[str, Search] = MappingProxyType(
    {
        "ilp": ilp.solve, "descend": descend.solve, "exhaustive": exhaustive.solve, "fold": fold.solve_folded,
        "ft": _compiled("ft"), "optcnn": _compiled("optcnn"), "dp": _compiled("layer_dp"), "mcmc": _compiled("mcmc"),
        "lambda": _compiled("scalarised"), "random": _compiled("random_choice"), "templates": given.solve,
    }
)  # fmt: skip
