"""A search's compiled kernels, loaded before its clock starts: from Numba's cache a second, compiled anew ten."""

from __future__ import annotations

import functools
import importlib
import time

import numpy as np

from .base import Search
from .evaluate import Evaluator
from .problem import Edge, Node, StrategyProblem, Usage

#: Nodes of the ring that is searched for it: no reduction solves it, every search is through at once.
RING, STRATEGIES = 6, 4

#: A compilation ends, whatever the machine.
LONGEST_S = 300.0


@functools.cache
def warmed(module: str) -> Search:
    """The `solve` of a module of this package, after a search that calls its kernels."""
    search: Search = importlib.import_module(f".{module}", __package__).solve
    search(_ring(), time_limit_s=None, seed=0)
    return search


@functools.cache
def load_walk() -> None:
    """The kernels of frontier tables and of the bounds that rule most of their entries out."""
    from .branches import Branch
    from .frontier import trace_frontier

    ring = _ring()
    trace_frontier(ring, width=1e-3, most_rows=1)
    Branch(ring, ring.limit_bytes or 0, by_byte={0: 1.0})


def _ring() -> StrategyProblem:
    """A small problem in which memory binds and every choice depends on others."""
    rng = np.random.default_rng(0)
    problem = StrategyProblem(
        nodes=tuple(Node(name=f"n{i}", costs_s=rng.random(STRATEGIES)) for i in range(RING)),
        edges=tuple(
            Edge(tail=i, head=(i + step) % RING, costs_s=rng.random((STRATEGIES, STRATEGIES)))
            for i in range(RING)
            for step in (1, 2)
        ),
        usages=tuple(
            Usage(node=i, start=i, stop=i + 3, bytes=rng.integers(1, 1000, STRATEGIES)) for i in range(RING)
        ),
    )
    evaluate = Evaluator(problem)
    peaks = [evaluate([int(s) for s in rng.integers(STRATEGIES, size=RING)]).peak_bytes for _ in range(16)]
    return StrategyProblem(
        nodes=problem.nodes, edges=problem.edges, usages=problem.usages, limit_bytes=int(np.quantile(peaks, 0.25))
    )


def compile_all() -> None:
    """Compile every kernel of this package into Numba's cache: half a minute, once in an installation."""
    from .alike import Contents, colours
    from .base import Incumbent
    from .contract import Matrices
    from .dual import DualAscent
    from .lifted import LiftedAscent
    from .priced import PricedSearch
    from .quotient import Quotient

    ring = _ring()
    search = PricedSearch(
        DualAscent(ring), list, Incumbent(ring), relative_gap=0.0, deadline=time.monotonic() + LONGEST_S, seed=0
    )
    search.run(patience=2)
    search.climb()
    load_walk()
    matrices = Matrices()
    contents = Contents(ring, matrices)
    lifted = LiftedAscent(Quotient(ring, contents, colours(ring, contents, 1), matrices))
    lifted.sweep(0.0)
    lifted.bound_s()
    for module in ("ft", "optcnn", "layer_dp", "mcmc", "scalarised", "random_choice"):
        warmed(module)
