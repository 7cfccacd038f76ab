"""Windows, against all assignments in turn: within the limit, never worse, and most often the optimum."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxplan.search import Termination, evaluate
from jaxplan.search.dual import DualAscent
from jaxplan.search.exhaustive import solve as exhaustive
from jaxplan.search.moves import alive_bytes, grow, repair, total_cost
from jaxplan.search.windows import Found, Windows
from tests.search.problems import grid, random_problem

WORK = 200_000


def improved(dual: DualAscent, chosen: np.ndarray, seed: int) -> Found:
    flat = dual.flat
    pool_s = np.concatenate([flat.matrix_s, np.empty(1 << 20)])
    windows = Windows(flat, pool_s, flat.matrix_s.size, np.random.default_rng(seed))
    # Some price or other on every peak: what the dual would begin with.
    prices = np.full(flat.peaks, flat.unary_s.max(initial=0.0) / max(flat.limit_bytes, 1))
    return windows.improve(chosen, total_cost(flat, chosen), prices, WORK, math.inf)


def test_windows_stay_within_the_limit_and_find_optima() -> None:
    tried = found = worse_before = 0
    for seed in range(100):
        problem = random_problem(seed)
        optimum = exhaustive(problem)
        dual, rng = DualAscent(problem), np.random.default_rng(seed)
        chosen = np.array([rng.integers(size) for size in dual.flat.size])
        if optimum.termination is Termination.INFEASIBLE or not repair(
            dual.flat, chosen, alive_bytes(dual.flat, chosen)
        ):
            continue
        before = total_cost(dual.flat, chosen)
        best = improved(dual, chosen, seed)
        told = evaluate(problem, best.chosen)
        assert best.cost_s <= before
        assert problem.limit_bytes is None or told.peak_bytes <= problem.limit_bytes
        if told.forbidden:
            continue
        assert told.objective_s == pytest.approx(best.cost_s, rel=1e-12, abs=1e-15)
        tried += 1
        found += best.cost_s <= optimum.objective_s * (1 + 1e-9)
        worse_before += before > optimum.objective_s * (1 + 1e-9)
    # It proves nothing; problems of at most some thousand assignments it should all but solve.
    assert found > 0.95 * tried and worse_before > 0.5 * tried > 20


def test_the_same_seed_gives_the_same_assignment() -> None:
    dual = DualAscent(grid(8, 6, 0))
    chosen = np.zeros(dual.flat.size.size, dtype=np.int64)
    load = alive_bytes(dual.flat, chosen)
    assert repair(dual.flat, chosen, load)
    first, again, other = (improved(dual, chosen, seed) for seed in (1, 1, 2))
    assert (first.chosen == again.chosen).all() and first.cost_s == again.cost_s
    assert first.cost_s < total_cost(dual.flat, chosen) and other.cost_s < total_cost(dual.flat, chosen)


def test_a_grown_window_hangs_together_and_is_as_large_as_asked() -> None:
    problem = grid(7, 5, 0)
    flat = DualAscent(problem).flat
    near = {i: set(flat.near_node[flat.near_start[i] : flat.near_start[i + 1]].tolist()) for i in range(flat.size.size)}
    shapes = set()
    for seed in range(50):
        most = 1 + seed % 35
        window = grow(flat, seed % 35, most, seed)
        assert window.size == most and seed % 35 in window and (np.diff(window) > 0).all()
        reached, front = {int(window[0])}, [int(window[0])]
        while front:
            new = (near[front.pop()] & set(window.tolist())) - reached
            reached |= new
            front += new
        assert reached == set(window.tolist())
        shapes.add(tuple(window))
    assert len(shapes) > 30
