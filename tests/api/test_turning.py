"""Orders of axes that suit no reader of a tensor: what turns on its way is in the price and in the bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import jaxplan
from jaxplan.api import Found, Options, Pipeline
from jaxplan.api.in_orders import in_orders
from jaxplan.api.turning import _turned
from jaxplan.ir import trace
from jaxplan.search import Evaluator, Space, solve
from models import get, get_config


def messages() -> tuple[Any, tuple[Any, Any]]:
    """A step of a graph network, in whose messages edges and nodes take one another's axes, and its shapes."""
    gnn, config = get("gnn"), get_config("gnn", "ogbn-products")
    state = jax.eval_shape(lambda key: gnn.init_state(config, key), jax.random.key(0))
    return gnn.make_train_step(config), (state, gnn.batch_shapes(config))


def perturbed(space: Space, seed: int, shift: float) -> tuple[int, ...]:
    """An assignment that is the cheapest where nodes and edges cost something else."""
    rng = np.random.default_rng(seed)

    def shaken(costs_s: np.ndarray) -> np.ndarray:
        return costs_s * rng.uniform(1 - shift, 1 + shift, costs_s.shape)

    problem = space.problem
    nodes = tuple(replace(node, costs_s=shaken(node.costs_s)) for node in problem.nodes)
    edges = tuple(replace(edge, costs_s=shaken(edge.costs_s)) for edge in problem.edges)
    return solve(replace(problem, nodes=nodes, edges=edges), seed=seed).assignment


@pytest.mark.parametrize("sizes", [(2, 2, 2)])
def test_the_search_that_knows_all_orders_proves_what_turns(
    sizes: tuple[int, ...], planner_for: Callable[..., Pipeline]
) -> None:
    train_step, shapes = messages()
    step = jaxplan.auto_shard(
        train_step, AbstractMesh(sizes, ("data", "model", "more")[: len(sizes)]), donate_argnums=0, hardware="tpu-v5p",
        options={"compare_templates": False},
    )  # fmt: skip
    cost = step.plan(*shapes).cost
    assert cost.gap < 0.006
    assert (cost.termination == "optimal") == (cost.gap <= Options().relative_gap)
    planner = planner_for(trace(train_step, shapes, {}, donate_argnums=(0,)), sizes, "tpu-v5p")
    alone = planner.within(planner.space({}), None)
    assert isinstance(alone, Found)
    _, turns = _turned(planner, alone)
    assert sum(turns.values()) > 0.005 * alone.result.objective_s, "else nothing is shown here"
    found = planner.search({}).result
    assert found.gap < 0.006 and alone.result.objective_s + sum(turns.values()) > 1.01 * found.objective_s


@pytest.mark.parametrize("sizes", [(4, 4), pytest.param((4, 2, 2), marks=pytest.mark.slow)])
def test_no_plan_with_its_turns_is_cheaper_than_with_every_order(
    sizes: tuple[int, ...], planner_for: Callable[..., Pipeline]
) -> None:
    train_step, shapes = messages()
    planner = planner_for(trace(train_step, shapes, {}, donate_argnums=(0,)), sizes, "tpu-v5p")
    space = planner.space({})
    every = in_orders(space, planner.model, planner.target.axes)
    assert every is not None
    met = []
    for seed in range(4):
        assignment = perturbed(space, seed, 0.5)
        found, _ = planner.as_found(space, solve(space.problem, hint=assignment, time_limit_s=1e-3), 0.0)
        objective_s = Evaluator(space.problem)(assignment).objective_s
        result = replace(found.result, assignment=assignment, objective_s=objective_s)
        turned, turns = _turned(planner, planner.as_found(space, result, 0.0)[0])
        in_order = every.of(assignment)
        assert in_order is not None and every.without(in_order) == assignment
        with_turns_s = Evaluator(every.problem)(in_order).objective_s
        assert objective_s * (1 - 1e-9) <= with_turns_s <= turned.result.objective_s * 1.001
        if turns:
            met.append((with_turns_s - objective_s) / (turned.result.objective_s - objective_s))
    assert len(met) > 2 and np.mean(met) > 0.3, "of what the chosen orders turn much turns in any order"
