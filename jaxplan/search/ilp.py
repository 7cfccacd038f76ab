"""Exact search: an integer program over the reduced problem, solved by HiGHS through OR-Tools.

Sets.       Nodes n with strategies S_n; edges (m, n) with their allowed pairs P_mn; peaks p: the time steps of
            the reduced problem, at which the usages u alive have bytes b_u.
Variables.  x_n,i in {0, 1}: node n takes strategy i.  e_mn,ij >= 0: edge (m, n) takes the pair (i, j); it is
            continuous, because it is integral as soon as x is.  A forbidden pair has no variable.
Objective.  minimise  sum_n sum_i cost_n,i x_n,i + sum_mn sum_ij cost_mn,ij e_mn,ij.
Constraints.
  (1) sum_i x_n,i = 1                                    for each node        `Program.add_one_choice`
  (2) sum_j e_mn,ij = x_m,i                              for each edge and i  `Program.add_links`
  (3) sum_i e_mn,ij = x_n,j                              for each edge and j  `Program.add_links`
  (4) sum_u alive at p sum_i b_u,i x_n(u),i <= limit     for some peaks       `Program.add_memory`
  (5) sum over a cover C of x_n,i <= nodes in C - 1      for some peaks       `Program.add_cover`

(2) and (3) together are far tighter than e_ij >= x_i + x_j - 1: on the contest's problem B that form gives a
bound of 37,946 under an optimum of 532,843.  Rows (4) are added when a solution breaks them, at the worst peaks:
a few of tens of thousands ever bind.  Rows (5) stand in where (4) was met within the solver's tolerance only.
rounds.py says in which order relaxations, cores and exact programs are solved.

Engine: MathOpt's HiGHS, because at its time limit it still tells its best solution and bound, which OR-Tools'
model_builder does not (9.15).  It can neither be interrupted nor told a first solution: it runs in a process of its
own (engine.py, highs.py), which is ended on Ctrl-C.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from .base import Incumbent, Progress, SearchResult, Termination
from .contract import Matrices
from .engine import Engine
from .problem import StrategyProblem
from .program import OutOfTime
from .reduce import reduce
from .rounds import Rounds


def solve(
    problem: StrategyProblem,
    *,
    time_limit_s: float | None = None,
    relative_gap: float = 1e-4,
    seed: int = 0,
    on_progress: Progress | None = None,
    hint: Sequence[int] | None = None,
    matrices: Matrices | None = None,
    enough_s: float = math.inf,
    enough_gap: float = math.inf,
    proof_s: float = math.inf,
    large_gap: float = 0.0,
) -> SearchResult:
    """The cheapest feasible assignment, within `relative_gap` of the bound; see `jaxplan.search.base.Search`.

    INFEASIBLE comes without an assignment; `least_peak` says how many bytes are needed.  `matrices`: see `reduce`.
    OPTIMAL is what is found first, if anything, once it is known that nothing costs less than `enough_s`; with an
    `enough_gap`, see `base.Incumbent`.  `proof_s` limits what is spent on the last percent of a large problem's gap, of
    which the search ends with FEASIBLE within `large_gap`, if that is more than `relative_gap`; see `rounds.Rounds`.
    """
    best = Incumbent(problem.verify(), on_progress, enough_s, enough_gap)
    deadline = math.inf if time_limit_s is None else best.started + time_limit_s
    try:
        if hint is not None:
            best.offer(hint)
        reduction = reduce(problem, matrices=matrices)
        if reduction.infeasible:
            return best.result(Termination.INFEASIBLE, reduction.infeasible)
        engine = Engine(deadline=deadline, seed=seed)
        rounds = Rounds(
            reduction.problem, reduction.lift, best, engine, relative_gap, proof_s=proof_s, large_gap=large_gap
        )
        if not rounds.run():
            reason = f"no assignment keeps every time step within {problem.limit_bytes} bytes"
            return best.result(Termination.INFEASIBLE, reason)
        return best.result(Termination.FEASIBLE if rounds.near else Termination.OPTIMAL)
    except OutOfTime:
        return best.result(Termination.TIME_LIMIT)
    except KeyboardInterrupt:
        return best.result(Termination.INTERRUPTED)


def solve_with_room(
    problem: StrategyProblem, *, time_limit_s: float | None = None, relative_gap: float = 1e-4, seed: int = 0,
    matrices: Matrices | None = None, enough_s: float = math.inf,
) -> tuple[SearchResult, bool]:  # fmt: skip
    """`solve`, first without the limit: an optimum that keeps it all the same is one within it, and soon found.

    For problems of which most have room to spare: whatever the peaks have a say in reduces less.  Returns the result,
    and whether the limit had a say in it.
    """
    search = functools.partial(solve, relative_gap=relative_gap, seed=seed, matrices=matrices, enough_s=enough_s)
    if problem.limit_bytes is None:
        return search(problem, time_limit_s=time_limit_s), False
    free = search(replace(problem, limit_bytes=None), time_limit_s=time_limit_s)
    if free.found and free.peak_bytes <= problem.limit_bytes:
        return free, False
    if free.termination is Termination.INTERRUPTED or free.bound_s >= enough_s:
        return replace(free, assignment=(), objective_s=math.inf, peak_bytes=-1), True
    left_s = None if time_limit_s is None else max(time_limit_s - free.wall_s, 0.0)
    return search(problem, time_limit_s=left_s), True
