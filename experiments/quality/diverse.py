"""Plans of one step that differ: the search's, the templates', under budgets, under random pins, and without the
layout that the search likes best.

What the planner promises of each is held against what is compiled: that the order of good and bad plans is kept can
only be seen where there are some of both.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxplan.api import Found, Options, Pipeline, Target, model_of
from jaxplan.api.candidates import Candidate
from jaxplan.api.options import TEMPLATES
from jaxplan.ir import trace
from jaxplan.search import Allowed

_BUDGETS = (0.8, 0.6, 0.45)
"""Shares of the free plan's peak."""

_OPTIONS = Options(time_limit_s=20.0, relative_gap=1e-3, compare_templates=False)


def pipeline_of(step: Any, shapes: tuple[Any, ...], target: Target) -> Pipeline:
    """The planner's pipeline for a step whose first argument, its state, is donated."""
    traced = trace(step, shapes, {}, donate_argnums=(0,))
    budget = target.profile.usable_bytes
    return Pipeline(traced, target, model_of(target, _OPTIONS), budget, _OPTIONS, {}, {}, lambda _: None)


def diverse_plans(pipeline: Pipeline, count: int, seed: int) -> Iterator[tuple[str, Candidate]]:
    """Up to `count` distinct checked plans, each with how it was come by."""
    seen: list[object] = []
    for label, found in _searches(pipeline, count, np.random.default_rng(seed)):
        if isinstance(found, Found):
            candidate = pipeline.checked(label, found)
            layouts = (candidate.inputs, candidate.outputs, frozenset(candidate.checked.constraints))
            if layouts not in seen:
                seen.append(layouts)
                yield label, candidate
        if len(seen) == count:
            return


def _searches(pipeline: Pipeline, count: int, random: np.random.Generator) -> Iterator[tuple[str, Any]]:
    best = pipeline.search({})
    yield "jaxplan", best
    for name in TEMPLATES:
        pins = pipeline.template(name)
        if pins is not None:
            yield name, pipeline.search(pins, rival=True)
    assert isinstance(best, Found)
    for share in _BUDGETS:
        tight = copy.copy(pipeline)
        tight.budget_bytes = int(share * best.memory.peak_bytes)
        yield f"budget {share:.2f}", tight.search({})
    graph = pipeline.traced.graph
    large = sorted(range(len(graph.inputs)), key=lambda p: -graph.values[graph.inputs[p]].bytes)
    for position in large[:3]:
        row = best.decision.values[graph.inputs[position]]
        yield f"not the best {pipeline.traced.inputs[position].path}", pipeline.search({position: _all_but(row)})
    for attempt in range(8 * count):
        chosen = random.choice(len(large), size=min(1 + attempt % 3, len(large)), replace=False, p=_weights(len(large)))
        pins = {large[i]: _exactly(_any_row(best, graph.inputs[large[i]], random)) for i in chosen}
        paths = ", ".join(pipeline.traced.inputs[p].path for p in pins)
        yield f"random {paths}", pipeline.search(pins)


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
