"""What a plan proves when a template won: a template's own bound, under its pins, is no bound on other plans."""

from __future__ import annotations

from typing import Any

import pytest

from jaxplan.api.candidates import Candidate, Found
from jaxplan.api.planner import bounded_by
from jaxplan.search import SearchResult, Termination

_UNUSED: Any = None


def found(objective_s: float, bound_s: float) -> Found:
    result = SearchResult(
        assignment=(0,), objective_s=objective_s, bound_s=bound_s, termination=Termination.FEASIBLE, peak_bytes=0,
        wall_s=0.0,
    )  # fmt: skip
    return Found(space=_UNUSED, result=result, decision=_UNUSED, memory=_UNUSED)


def candidate(name: str, of: Found) -> Candidate:
    return Candidate(
        name=name, found=of, inputs=(), outputs=(), checked=_UNUSED, compute_s=1.0, comm_s=0.0
    )  # fmt: skip


@pytest.mark.parametrize("own_bound_s", [2.0, -float("inf")])
def test_a_template_that_won_has_the_bound_of_the_search(own_bound_s: float) -> None:
    won = bounded_by(candidate("zero1", found(2.0, own_bound_s)), found(2.1, 1.9))
    assert won.found.result.bound_s == 1.9
    assert won.found.result.gap == pytest.approx(0.05)


def test_no_bound_is_over_the_cost_of_what_it_bounds() -> None:
    won = bounded_by(candidate("zero1", found(2.0, 2.0)), found(2.2, 2.1))
    assert won.found.result.gap == 0.0


def test_the_search_keeps_its_own() -> None:
    searched = found(2.0, 1.9)
    best = candidate("ilp", searched)
    assert bounded_by(best, searched) is best
