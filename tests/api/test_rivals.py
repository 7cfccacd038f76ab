"""What a plan proves when a template won: a template's own bound, under its pins, is no bound on other plans.

And the searches that prove nothing: no plan of theirs is worse than the best template.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import jaxplan
from jaxplan.api.found import Candidate, Found
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
        name=name, found=of, inputs=(), outputs=(), checked=_UNUSED, compute_s=1.0, comm_s=0.0, sent=(), written_s=0.0
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


def train_step(params: Any, batch: Any) -> tuple[Any, Any]:
    def loss(params: Any) -> Any:
        hidden = jax.nn.relu(batch["x"] @ params["up"])
        return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


SHAPES = (
    {"up": shape(512, 2048), "down": shape(2048, 512)},
    {"x": shape(64, 512), "y": shape(64, 512)},
)
MESH = AbstractMesh((2, 2), ("data", "model"))


@pytest.mark.parametrize("name", ["ft", "optcnn", "dp", "mcmc", "lambda", "random", "templates"])
def test_a_searched_plan_is_no_worse_than_the_best_template_nor_under_the_proof(name: str) -> None:
    proved = jaxplan.plan(train_step, MESH, *SHAPES, hardware="tpu-v5e")
    plan = jaxplan.plan(train_step, MESH, *SHAPES, hardware="tpu-v5e", options={"search": name, "time_limit_s": 10.0})
    assert plan.cost.step_s <= min(plan.templates.values()) * (1 + 1e-6)
    assert plan.cost.objective_s >= proved.cost.objective_s * (1 - 1e-9)
    assert plan.search == name or plan.search in plan.templates
    assert plan.cost.termination == "optimal" or plan.cost.bound_s <= proved.cost.objective_s


def test_compare_measures_every_search_by_the_best_bound() -> None:
    comparison = jaxplan.compare(
        train_step, MESH, *SHAPES, hardware="tpu-v5e", limit_s=5.0, searches=("ilp", "mcmc", "templates")
    )
    exact, walk, given = comparison.rivals
    assert exact.gap <= 1e-4
    assert exact.gap <= walk.gap <= given.gap
    assert given.result.objective_s == min(comparison.templates.values())
    assert comparison.bound_s == max(rival.result.bound_s for rival in comparison.rivals)
    with pytest.raises(jaxplan.ArgumentError, match="name some of"):
        jaxplan.compare(train_step, MESH, *SHAPES, hardware="tpu-v5e", searches=("magic",))
