"""What a template's pins leave of a step's decisions, searched to be compared with the plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..search import Alike, Allowed, SearchResult, Space, StrategyProblem, Tied, pinned, solve
from .budget import within_budget
from .found import Found, Nothing

if TYPE_CHECKING:
    from .candidates import Pipeline

RIVAL_NODES = 2000
"""Nodes from which on a problem of which nothing has to be proved is folded."""

RIVAL_GAP = 0.01
"""What a template takes is known within this share: a proof beyond it can take a hundred times the search's time."""

FAR_GAP = 0.2
"""The same where at least so much more than the plan takes is proved, and in proportion in between: nobody asks then.
(A template of a mixture of experts on three axes that takes 1.77 times the plan is known within 3.5 % after 3 s, and
within 3 % after two minutes.)"""

RIVAL_S = 10.0
"""Seconds after which a template's search is ended with what it has found."""


def rival(
    pipeline: Pipeline,
    space: Space,
    pins: Mapping[int, Allowed],
    known: Alike | None = None,
    than_s: float = math.inf,
) -> Found | Nothing:
    """A decision of `space` under `pins` as well, within `RIVAL_GAP` of the cheapest, to be compared with its own.

    Where the problem folds, only plans that treat repeated layers alike are looked among, and the fold is that of
    the search itself; `known` is what was found there, if another process was asked what `question` says.  `than_s`
    is the price of the plan, see `FAR_GAP`.
    """
    limits = _limits(pipeline)
    if _folds(pipeline, space):
        kept = _kept(pipeline, space, pins)

        def alike(limit: int, known: Alike | None = None) -> SearchResult | None:
            return space.folds.alike(limit, kept, known=known, **limits)

        if (first := alike(pipeline.rows_bytes, known)) is not None:
            return within_budget(
                pipeline, space, lambda limit: first if limit == pipeline.rows_bytes else alike(limit) or first
            )
    narrow = pinned(space, pipeline.values_pinned(pins))

    def exact(limit: int) -> SearchResult:
        problem = dataclasses.replace(narrow.problem, limit_bytes=limit)
        return solve(problem, matrices=space.folds.matrices, enough_s=than_s, enough_gap=FAR_GAP, **limits)

    return within_budget(pipeline, narrow, exact)


def layers(pipeline: Pipeline, space: Space) -> Tied | StrategyProblem | None:
    """The problem of which `rival` first asks, tied if the search ties it as well; None where it is not tied."""
    if not _folds(pipeline, space):
        return None
    if pipeline.folds(space):
        return space.folds.layers(pipeline.rows_bytes)
    return dataclasses.replace(space.problem, limit_bytes=pipeline.rows_bytes)


def question(pipeline: Pipeline, space: Space, pins: Mapping[int, Allowed]) -> tuple[Any, ...]:
    """What `rival` first asks of that problem, as `TiedSearcher.search` is asked."""
    limits = _limits(pipeline)
    kept = _kept(pipeline, space, pins)
    return kept, limits["time_limit_s"], limits["relative_gap"], limits["seed"], math.inf


def _folds(pipeline: Pipeline, space: Space) -> bool:
    return len(space.problem.nodes) >= RIVAL_NODES and pipeline.options.fold is not False


def _kept(pipeline: Pipeline, space: Space, pins: Mapping[int, Allowed]) -> dict[int, np.ndarray]:
    """The strategies that pins leave, by node."""
    return {
        space.values[value].node: np.flatnonzero(allowed(space.values[value].places))
        for value, allowed in pipeline.values_pinned(pins).items()
    }


def _limits(pipeline: Pipeline) -> dict[str, Any]:
    options = pipeline.options
    return pipeline.limits | {
        "time_limit_s": min(options.time_limit_s or math.inf, RIVAL_S),
        "relative_gap": max(options.relative_gap, RIVAL_GAP),
    }
