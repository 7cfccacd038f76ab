"""Search of a folded problem: nodes that are alike decide once.

An unrolled network repeats its layers ten to a hundred times.  Nodes are coloured by what they cost and what is
around them (alike.py), contracted a colour at a time (quotient.py), tied to one choice a colour (tied.py), and the
tied problem, whose size does not grow with depth, is solved exactly.  Its optimum is an assignment of the original
and is priced there.  The bound is the original's as well (lifted.py): layers that may differ can't be cheaper than
it says.  Where the two stay apart, a finer colouring leaves more layers at the ends of a chain to themselves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from . import ilp
from .base import Incumbent, Progress, SearchResult, Termination
from .folds import DEPTHS, Folds
from .lifted import LiftedAscent, ascend
from .problem import StrategyProblem
from .quotient import Quotient
from .reduce import reduce
from .tied import Tied

#: A gap, half of what is promised, that neither more messages nor a finer fold are tried for: they take longer than
#: they could gain.
GOOD_GAP = 5e-3

#: A finer fold has to bring the cost or the bound on by this share of the cost to be followed by a finer one still.
LEAST_GAIN = 1e-3


def solve_folded(
    problem: StrategyProblem,
    *,
    time_limit_s: float | None = None,
    relative_gap: float = 1e-4,
    seed: int = 0,
    on_progress: Progress | None = None,
    hint: Sequence[int] | None = None,
    unfold_gap: float = math.inf,
    folds: Folds | None = None,
) -> SearchResult:
    """The cheapest assignment in which nodes that are alike choose alike; FEASIBLE unless the bound closes the gap.

    What doesn't fold, or has no assignment folded, is solved as it is; so is, from the folded optimum on, what has a
    larger gap left than `unfold_gap`: half of the time limit is left for that.  `folds` are those of the same problem,
    under this limit or another.  See `jaxplan.search.base.Search`.
    """
    best = Incumbent(problem.verify(), on_progress)
    deadline = math.inf if time_limit_s is None else best.started + time_limit_s
    # where memory binds, a fold that chooses alike can take any time to prove, and layers that differ gain percents
    until = deadline if time_limit_s is None or math.isinf(unfold_gap) else best.started + time_limit_s / 2
    folds = folds or Folds(problem)
    enough = relative_gap if math.isinf(unfold_gap) else max(relative_gap, unfold_gap / 2)
    reason = overflow(problem)
    if reason:
        return best.result(Termination.INFEASIBLE, reason)
    try:
        if hint is not None:
            best.offer(hint)
        folded_s = math.inf
        for depth in DEPTHS:
            if depth == DEPTHS[-1] and not math.isinf(unfold_gap):
                # what is found may be as good as it can be, and only the fold's bound weak
                _bound_whole(problem, folds, best, enough, until)
                if best.closed(enough):
                    break
            before_s, bound_s = best.objective_s, best.bound_s
            quotient = folds.quotient(depth, problem.limit_bytes)
            tied = folds.tied(depth, problem.limit_bytes)
            if quotient is None or time.monotonic() > until:
                break
            if tied is not None:
                folded_s = min(folded_s, _fold(quotient, tied, best, until, relative_gap, seed))
            gain_s = max(before_s - best.objective_s, best.bound_s - bound_s)
            if best.closed(max(relative_gap, GOOD_GAP)) or not gain_s > LEAST_GAIN * abs(best.objective_s):
                break
    except KeyboardInterrupt:
        return best.result(Termination.INTERRUPTED)
    folded = best.result(Termination.OPTIMAL if best.closed(relative_gap) else Termination.FEASIBLE)
    if math.isfinite(folded_s):
        folded = replace(folded, folded_s=folded_s)
        if best.closed(max(relative_gap, unfold_gap)):
            return folded
    left_s = None if time_limit_s is None else deadline - time.monotonic()
    if left_s is not None and left_s <= 0:
        return replace(folded, termination=Termination.TIME_LIMIT)
    whole = ilp.solve(
        problem,
        time_limit_s=left_s,
        # what is proved this far need not have been searched at all
        relative_gap=enough if folded.found else relative_gap,
        seed=seed,
        on_progress=on_progress,
        hint=folded.assignment or hint,
        matrices=folds.matrices,
    )
    bound_s = min(max(whole.bound_s, folded.bound_s), whole.objective_s)
    return replace(whole, bound_s=bound_s, folded_s=folded.folded_s)


def _bound_whole(problem: StrategyProblem, folds: Folds, best: Incumbent, gap: float, deadline: float) -> None:
    """Bound the problem itself, as far as messages do: of twelve unrolled blocks with triangle attention (58,000 nodes)
    the fold's bound is 25 % under what it found, this one 0.5 % after four seconds."""
    from .dual import DualAscent
    from .dual import ascend as ascend_whole

    reduction = reduce(problem, matrices=folds.matrices)
    if not reduction.infeasible:
        ascend_whole(DualAscent(reduction.problem), best, gap, deadline)


def overflow(problem: StrategyProblem) -> str:
    """Why nothing fits, if even the least bytes of every usage exceed the limit at some time step; else ""."""
    if problem.limit_bytes is None or not problem.usages:
        return ""
    least: dict[int, int] = {}
    for usage in problem.usages:
        if id(usage.bytes) not in least:
            least[id(usage.bytes)] = int(usage.bytes.min())
    bounds = np.array([(u.start, u.stop) for u in problem.usages], dtype=np.int64)
    amounts = np.array([least[id(u.bytes)] for u in problem.usages], dtype=np.int64)
    times, where = np.unique(bounds, return_inverse=True)
    delta = np.zeros(times.size, dtype=np.int64)
    np.add.at(delta, where.reshape(-1, 2)[:, 0], amounts)
    np.subtract.at(delta, where.reshape(-1, 2)[:, 1], amounts)
    over = np.flatnonzero(np.cumsum(delta) > problem.limit_bytes)
    if not over.size:
        return ""
    return f"at time step {times[over[0]]} the least choices already exceed {problem.limit_bytes} bytes"


def _fold(
    quotient: Quotient, tied: Tied, best: Incumbent, deadline: float, relative_gap: float, seed: int
) -> float:
    """Solve the tied problem of a quotient and bound the original; the cost of the tied optimum, inf without one."""
    left_s = None if math.isinf(deadline) else max(deadline - time.monotonic(), 0.0)
    with ThreadPoolExecutor(max_workers=1) as threads:
        # it loads compiled code, while the solver's process is waited for
        dual = threads.submit(_ready, quotient)
        found, limited = ilp.solve_with_room(
            tied.problem, time_limit_s=left_s, relative_gap=relative_gap / 2, seed=seed, matrices=quotient.matrices
        )
    if not found.found:
        return math.inf
    alike = tied.lift(found.assignment)
    best.offer(alike, found.objective_s)
    good = max(relative_gap, GOOD_GAP)
    ascend(dual.result(), best, good, deadline)
    # memory that has no say is worth nothing
    if limited and not best.closed(good) and time.monotonic() < deadline:
        prices_s = _prices(tied, found, deadline)
        if prices_s:
            ascend(LiftedAscent(quotient, prices_s), best, good, deadline)
    return best.evaluator(alike).objective_s


def _ready(quotient: Quotient) -> LiftedAscent:
    """The ascent of a quotient, its compiled code loaded: that is at its first call."""
    dual = LiftedAscent(quotient)
    first = dual.copy()
    first.sweep(0.0)
    first.bound_s()
    return dual


def _prices(tied: Tied, found: SearchResult, deadline: float) -> Mapping[int, float]:
    """What a byte is worth at the time steps that bind in the tied problem, seconds."""
    limit = tied.problem.limit_bytes
    reduction = reduce(tied.problem)
    if not limit or reduction.infeasible or not reduction.time_steps.size:
        return {}
    # compiled code, and what compiles it, are loaded by those who need them
    from .dual import DualAscent
    from .dual import ascend as ascend_tied

    dual, best = DualAscent(reduction.problem), Incumbent(tied.problem)
    best.offer(found.assignment)
    ascend_tied(dual, best, 0.0, deadline)
    return {int(reduction.time_steps[peak]): price / limit for peak, price in dual.price.items() if price > 0}
