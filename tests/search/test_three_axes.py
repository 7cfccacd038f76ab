"""Meshes of three axes: nothing is pruned away, and a space that lacks strategies proves nothing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import jaxplan
from jaxplan.cost import CostModel
from jaxplan.hardware import axis_links, load_profile
from jaxplan.ir import trace
from jaxplan.search import Space, Termination, build, solve
from models import gpt, llama, moe


def shape(*extents: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(extents, jnp.float32)


def attention(x: Any, q: Any, k: Any) -> Any:
    """Heads and batch, queries and keys: operations of five factors."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", jnp.einsum("bqe,ehd->bqhd", x, q), jnp.einsum("bke,ehd->bkhd", x, k))
    return jax.nn.softmax(scores + x.sum()) + jnp.tanh(scores)


ATTENTION = (shape(16, 64, 64), shape(64, 8, 16), shape(64, 8, 16))


def space_of(fn: Any, arguments: Any, sizes: tuple[int, ...], **settings: Any) -> Space:
    axes = tuple((f"a{i}", size) for i, size in enumerate(sizes))
    profile = load_profile("tpu-v5p")
    links = axis_links(profile, axes)
    model = CostModel(profile=profile, axes=axes, links=tuple(links[name] for name, _ in axes))
    return build(trace(fn, arguments, {}).graph, model, **settings)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 4, 4), (8, 8, 8)])
@pytest.mark.parametrize("model", [gpt, llama, moe])
def test_every_strategy_of_a_model_is_there(model: Any, sizes: tuple[int, ...]) -> None:
    config = model.CONFIGS["tiny"]
    state = jax.eval_shape(lambda key: model.init_state(config, key), jax.random.key(0))
    arguments = (state, model.batch_shapes(config))
    space = space_of(model.make_train_step(config), arguments, sizes)
    assert space.complete
    whole = space_of(model.make_train_step(config), arguments, sizes, max_strategies=10**9)
    assert [n.costs_s.size for n in space.problem.nodes] == [n.costs_s.size for n in whole.problem.nodes]


def test_pruning_is_known_and_can_cost_the_optimum() -> None:
    whole = space_of(attention, ATTENTION, (2, 2, 2))
    pruned = space_of(attention, ATTENTION, (2, 2, 2), max_strategies=8)
    assert whole.complete and not pruned.complete
    best, found = solve(whole.problem), solve(pruned.problem)
    assert best.termination is Termination.OPTIMAL
    assert found.objective_s >= best.objective_s * (1 - 1e-9)


def test_a_plan_from_a_pruned_space_claims_no_proof() -> None:
    mesh = AbstractMesh((2, 2, 2), ("a", "b", "c"))

    def cost(**options: Any) -> Any:
        settings = {"compare_templates": False, "progress": False, **options}
        return jaxplan.plan(attention, mesh, *ATTENTION, hardware="tpu-v5p", options=settings).cost

    whole, pruned = cost(), cost(max_strategies=8)
    assert whole.termination == "optimal" and whole.gap <= 1e-4
    assert pruned.termination == "feasible" and pruned.bound_s == 0.0
    assert whole.objective_s <= pruned.objective_s * (1 + 1e-9)
