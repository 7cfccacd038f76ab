"""Folding real programs: what layers that choose alike cost is what the whole search finds, and the gap says so."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import pytest

from jaxplan.api import model_of
from jaxplan.api.meshes import target_of
from jaxplan.api.options import Options
from jaxplan.ir import trace
from jaxplan.search import StrategyProblem, build, evaluate, solve, solve_folded
from jaxplan.search.folds import Folds
from jaxplan.sharding import graph_rules
from models import get

#: Depths that make layers repeat, of every model whose tiny config is unrolled.
DEEP: dict[str, dict[str, Any]] = {
    "gpt": {"n_layers": 8},
    "llama": {"n_layers": 8},
    "vit": {"n_layers": 8},
    "moe": {"n_layers": 8},
    "resnet": {"blocks": (6, 6)},
    "lstm": {},
}


@functools.cache
def problem_of(name: str, **changes: Any) -> StrategyProblem:
    module = get(name)
    config = module.CONFIGS["tiny"]
    known = {field.name for field in dataclasses.fields(config)}
    config = dataclasses.replace(config, **{k: v for k, v in (DEEP[name] | changes).items() if k in known})
    target = target_of(jax.sharding.AbstractMesh((4, 2), ("data", "model")), "tpu-v5e")
    state = jax.eval_shape(lambda key: module.init_state(config, key), jax.random.key(0))
    step = module.make_train_step(config)
    graph = trace(step, (state, module.batch_shapes(config)), {}, donate_argnums=(0,)).graph
    return build(graph, model_of(target, Options()), rules=graph_rules(graph), max_strategies=96).problem


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("gpt", "llama") else pytest.mark.slow) for n in sorted(DEEP)]
)
def test_alike_layers_cost_what_the_whole_search_finds(name: str) -> None:
    problem = problem_of(name)
    whole = solve(problem)
    folded = solve_folded(problem)
    assert evaluate(problem, folded.assignment).objective_s == folded.objective_s
    assert folded.objective_s <= whole.objective_s * (1 + 1e-3)
    assert folded.objective_s >= whole.bound_s * (1 - 1e-9)
    assert folded.bound_s <= whole.objective_s * (1 + 1e-9)
    assert folded.gap <= 0.01


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_norm_of_all_gradients_leaves_layers_alike(name: str) -> None:
    """What a layer's squares cost to sum up is said by no other layer."""
    folded = set()
    for depth in (8, 12):
        tied = Folds(problem_of(name, n_layers=depth)).layers(None)
        assert tied is not None
        folded.add(len(tied.problem.nodes))
    assert len(folded) == 1


@pytest.mark.slow
def test_where_memory_binds_the_gap_is_proved_too_and_unfolding_gains() -> None:
    free = problem_of("gpt", n_layers=4)
    most = solve_folded(free).peak_bytes
    tight = dataclasses.replace(free, limit_bytes=int(0.9 * most))
    # the fold is within 4 % after seconds and not after minutes; the whole is proved in seconds
    folded, unfolded = solve_folded(tight, time_limit_s=10.0), solve_folded(tight, unfold_gap=0.0, time_limit_s=90.0)
    whole = solve(tight)
    assert unfolded.objective_s < folded.objective_s
    assert folded.peak_bytes <= tight.limit_bytes
    assert folded.bound_s <= whole.objective_s * (1 + 1e-9)
    assert whole.bound_s * (1 - 1e-9) <= unfolded.objective_s <= folded.objective_s
    assert unfolded.objective_s <= whole.objective_s * (1 + 1e-4)
