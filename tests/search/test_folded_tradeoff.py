"""Folded frontiers: points of the original, all there are with layers alike, and layers apart are bounded too."""

from __future__ import annotations

import pytest

from jaxplan.search import Folds, evaluate, folded_tradeoff
from jaxplan.search.frontier import trace_frontier

from .test_fold import layered
from .test_frontier import enumerated, staircase


@pytest.mark.parametrize("seed", [1, 5, 12, 16])
def test_a_folded_frontier_is_all_of_it_with_layers_alike_and_a_bound_of_the_rest(seed: int) -> None:
    problem = layered(seed, depth=14, width=2)
    folds = Folds(problem)
    answer = folded_tradeoff(folds, eps=0.0, time_limit_s=30)
    assert answer is not None
    found, method = answer
    assert method.endswith("layers that repeat cut alike")
    for point in found.points:
        result = evaluate(problem, point.assignment)
        assert (result.objective_s, result.peak_bytes) == (point.objective_s, point.peak_bytes)
    tied = folds.tied(3, None)
    assert tied is not None
    assert [(p.peak_bytes, pytest.approx(p.objective_s)) for p in found.points] == staircase(
        *enumerated(tied.problem)
    )
    assert found.apart is not None
    apart = trace_frontier(problem, most_rows=32)
    for point in apart.points:
        position = max(i for i, (size, _) in enumerate(found.apart) if size <= point.peak_bytes)
        assert found.apart[position][1] <= point.objective_s * (1 + 1e-9)
    for point in found.points:
        # what may differ is never slower
        best = apart.at_memory(point.peak_bytes)
        assert best is not None
        assert best.objective_s <= point.objective_s * (1 + 1e-9)
        assert found.apart_regrets is not None
        assert point.objective_s <= best.objective_s * (1 + max(found.apart_regrets)) * (1 + 1e-9)


def test_what_does_not_repeat_is_not_folded() -> None:
    assert folded_tradeoff(Folds(layered(10, depth=14, width=2)), eps=0.0, time_limit_s=5) is None
