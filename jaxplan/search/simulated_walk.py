"""FlexFlow's search as published: the walk of mcmc.py, judged by a simulator instead of by a sum of costs.

What a proposal changes is simulated alone (`Simulated.change`); overlapping counts, and two searches that agree on the
objective may differ here.  Memory stays a hard limit, and impossible pairs stay impossible.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from . import moves
from .arena import Arena, allowed
from .base import Incumbent, SearchResult, Termination
from .mcmc import TEMPERATURES
from .problem import StrategyProblem
from .reduce import reduce

#: Proposals of a chain, and chains without gain that end the walk, at least.
CHAIN, PATIENCE = 1_000, 6


class Changed(Protocol):
    """What a change would make of the step."""

    @property
    def step_s(self) -> float: ...


class Simulated(Protocol):
    """A simulator of the problem's assignments, such as `jaxplan.simulator.StrategySimulator`."""

    @property
    def step_s(self) -> float: ...

    @property
    def assignment(self) -> tuple[int, ...]: ...

    def change(self, strategies: Mapping[int, int]) -> Changed: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Walk:
    """The best of a walk: `result` as the problem prices it, `simulated_s` as the simulator does; `history` holds
    (wall_s, simulated_s) whenever that got better; `proposals` were simulated."""

    result: SearchResult
    simulated_s: float
    history: tuple[tuple[float, float], ...]
    proposals: int


def walk_simulated(
    problem: StrategyProblem, simulated: Simulated, *, time_limit_s: float, seed: int, hint: Sequence[int]
) -> Walk:
    """Walk from `hint`, which is feasible, and return nothing that simulates slower."""
    best = Incumbent(problem)
    best.offer(hint)
    deadline = best.started + time_limit_s
    reduction = reduce(problem, contract_only=True)
    arena = Arena(reduction, best, deadline=deadline, relative_gap=0.0, seed=seed, hint=hint)
    _go_to(simulated, hint)
    start_s = least_s = simulated.step_s
    found = tuple(int(s) for s in hint)
    history, proposals, chain, last_gain = [(best.wall_s, least_s)], 0, 0, 0
    movable = [n for n, size in enumerate(arena.flat.size.tolist()) if size > 1]
    best_chosen = arena.start.copy()
    while movable and chain - last_gain < max(PATIENCE, chain / 2) and time.monotonic() < deadline:
        chosen = (arena.start, best_chosen)[chain % 3].copy() if chain % 3 < 2 else arena.by_chance()
        heat_s = TEMPERATURES[chain // 3 % len(TEMPERATURES)] * start_s
        chain += 1
        if not allowed(arena.flat, chosen) or not arena.fits(chosen):
            continue
        load = moves.alive_bytes(arena.flat, chosen)
        _go_to(simulated, reduction.lift(chosen.tolist()))
        for _ in range(CHAIN):
            if time.monotonic() > deadline:
                break
            node = movable[int(arena.random.integers(len(movable)))]
            now, new = int(chosen[node]), int(arena.random.integers(int(arena.flat.size[node]) - 1))
            new += new >= now
            if arena.flat.limit_bytes >= 0 and not moves.fits(arena.flat, node, now, new, load):
                continue
            moves.move(arena.flat, node, new, chosen, load)
            if not allowed(arena.flat, chosen):
                moves.move(arena.flat, node, now, chosen, load)
                continue
            proposals += 1
            before_s, lifted = simulated.step_s, reduction.lift(chosen.tolist())
            after_s = simulated.change(_difference(simulated, lifted)).step_s
            if after_s > before_s and (
                heat_s <= 0 or arena.random.random() >= math.exp((before_s - after_s) / heat_s)
            ):
                simulated.rollback()
                moves.move(arena.flat, node, now, chosen, load)
                continue
            simulated.commit()
            if after_s < least_s:
                least_s, found, best_chosen, last_gain = after_s, lifted, chosen.copy(), chain
                history.append((best.wall_s, least_s))
    judged = best.aside()
    judged.assignment, judged.objective_s = (), math.inf
    judged.offer(found)
    termination = Termination.TIME_LIMIT if time.monotonic() >= deadline else Termination.FEASIBLE
    return Walk(
        result=judged.result(termination), simulated_s=least_s, history=tuple(history), proposals=proposals
    )


def _difference(simulated: Simulated, assignment: Sequence[int]) -> dict[int, int]:
    return {
        n: new for n, (now, new) in enumerate(zip(simulated.assignment, assignment, strict=True)) if now != new
    }


def _go_to(simulated: Simulated, assignment: Sequence[int]) -> None:
    simulated.change(_difference(simulated, assignment))
    simulated.commit()
