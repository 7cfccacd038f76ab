"""Plans of one step that differ: the search's, the templates', under budgets, under random pins, and without the
layout that the search likes best.

What the planner promises of each is held against what is compiled: that the order of good and bad plans is kept can
only be seen where there are some of both.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxplan.api import Found, Options, Pipeline, Target, model_of
from jaxplan.api.found import Candidate
from jaxplan.api.options import TEMPLATES
from jaxplan.api.rivals import rival
from jaxplan.ir import trace
from jaxplan.search import Allowed

_BUDGETS = (0.8, 0.6, 0.45)
"""Shares of the free plan's peak."""

_POOL, _MOST_PINS = 2, 8
"""Random plans for each that is kept, and the arguments that one pins."""

OWN = "jaxplan"

_OPTIONS = Options(time_limit_s=20.0, relative_gap=1e-3, compare_templates=False)


def pipeline_of(step: Any, shapes: tuple[Any, ...], target: Target) -> Pipeline:
    """The planner's pipeline for a step whose first argument, its state, is donated."""
    traced = trace(step, shapes, {}, donate_argnums=(0,))
    budget = target.profile.usable_bytes
    return Pipeline(traced, target, model_of(target, _OPTIONS), budget, _OPTIONS, {}, {}, lambda _: None)


def diverse_plans(pipeline: Pipeline, count: int, seed: int) -> Iterator[tuple[str, Candidate]]:
    """Up to `count` distinct checked plans, each with how it was come by.

    The search's plan and the templates, then of a pool those that lie farthest apart by what the search believes:
    plans within a percent of each other have no order worth telling.
    """
    pool: dict[str, Found] = {}
    for label, found in _searches(pipeline, count, np.random.default_rng(seed)):
        if isinstance(found, Found):
            pool.setdefault(label, found)
    seen: list[object] = []
    for label in _apart({label: found.result.objective_s for label, found in pool.items()}):
        candidate = pipeline.checked(label, pool[label])
        layouts = (candidate.inputs, candidate.outputs, frozenset(candidate.checked.constraints))
        if layouts not in seen:
            seen.append(layouts)
            yield label, candidate
        if len(seen) == count:
            return


def _apart(step_s: Mapping[str, float]) -> Iterator[str]:
    """Labels, named plans first, then always the one farthest, as a ratio, from those before it."""
    place = {label: math.log(seconds) for label, seconds in step_s.items()}
    chosen = [label for label in place if label in (OWN, *TEMPLATES)]
    yield from chosen
    left = [label for label in place if label not in chosen]
    while left:
        label = max(left, key=lambda one: min(abs(place[one] - place[other]) for other in chosen))
        left.remove(label)
        chosen.append(label)
        yield label


def _searches(pipeline: Pipeline, count: int, random: np.random.Generator) -> Iterator[tuple[str, Any]]:
    space, best = pipeline.space({}), pipeline.search({})
    yield OWN, best
    for name in TEMPLATES:
        pins = pipeline.template(name)
        if pins is not None:
            yield name, rival(pipeline, space, pins)
    assert isinstance(best, Found)
    for share in _BUDGETS:
        tight = copy.copy(pipeline)
        tight.budget_bytes = int(share * best.memory.peak_bytes)
        yield f"budget {share:.2f}", rival(tight, space, {})
    graph = pipeline.traced.graph
    large = sorted(range(len(graph.inputs)), key=lambda p: -graph.values[graph.inputs[p]].bytes)
    for position in large[:3]:
        row = best.decision.values[graph.inputs[position]]
        label = f"not the best {pipeline.traced.inputs[position].path}"
        yield label, rival(pipeline, space, {position: _all_but(row)})
    for attempt in range(_POOL * count):
        size = min(int(random.integers(1, _MOST_PINS + 1)), len(large))
        chosen = random.choice(len(large), size=size, replace=False, p=_weights(len(large)))
        pins = {large[i]: _exactly(_any_row(best, graph.inputs[large[i]], random)) for i in chosen}
        yield f"random {attempt}", rival(pipeline, space, pins)


def _weights(count: int) -> np.ndarray:
    """Of inputs by size, the largest first: those whose layout matters are pinned more often."""
    weights = 1.0 / np.arange(1, count + 1)
    return np.asarray(weights / weights.sum())


def _any_row(found: Found, value: int, random: np.random.Generator) -> np.ndarray:
    places = found.space.values[value].places
    return np.asarray(places[random.integers(len(places))])


def _exactly(row: np.ndarray) -> Allowed:
    return lambda places: np.asarray((places == row).all(axis=1))


def _all_but(row: np.ndarray) -> Allowed:
    return lambda places: ~np.asarray((places == row).all(axis=1))
