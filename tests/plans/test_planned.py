"""What users do with a plan that the planner made: save it, load it elsewhere, train with plain jax.jit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from jax.sharding import Mesh

import jaxplan
from jaxplan.errors import PlanMismatchError
from jaxplan.plans import Plan, load_plan

OPTIMIZER = optax.adam(1e-2)


@struct.dataclass
class TrainState:
    """As flax has it: a custom node, which a plan file can only name."""

    params: Any
    opt_state: Any


def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
    def loss_of(params: Any) -> jax.Array:
        hidden = jnp.tanh(batch["x"] @ params["up"])
        return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    updates, opt_state = OPTIMIZER.update(gradients, state.opt_state)
    return TrainState(params=optax.apply_updates(state.params, updates), opt_state=opt_state), {"loss": loss}


def arguments() -> tuple[TrainState, dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    params = {"up": random.normal(size=(32, 64)), "down": random.normal(size=(64, 16))}
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
    batch = {"x": random.normal(size=(64, 32)), "y": random.normal(size=(64, 16))}
    state = TrainState(params=params, opt_state=OPTIMIZER.init(params))
    return state, {name: leaf.astype(np.float32) for name, leaf in batch.items()}


@pytest.fixture(scope="module")
def plan(mesh_4x2: Mesh) -> Plan:
    return jaxplan.plan(train_step, mesh_4x2, *arguments(), options=jaxplan.Options(search="fsdp"))


def test_a_loaded_plan_trains_as_the_unsharded_step_does(plan: Plan, mesh_4x2: Mesh, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json", mesh_4x2)
    with pytest.raises(PlanMismatchError, match=r"test_planned\.TrainState.*plan\.bind\("):
        _ = loaded.in_shardings
    loaded = loaded.bind(*arguments())
    assert (loaded.in_shardings, loaded.out_shardings) == (plan.in_shardings, plan.out_shardings)
    sharded = jax.jit(train_step, in_shardings=loaded.in_shardings, out_shardings=loaded.out_shardings)
    mine = theirs = arguments()[0]
    for _ in range(3):
        mine, mine_metrics = sharded(mine, arguments()[1])
        theirs, their_metrics = jax.jit(train_step)(theirs, arguments()[1])
    cut = mine.params["up"].addressable_shards[0].data.size
    assert cut < mine.params["up"].size, "the template fsdp cuts parameters"
    for a, b in zip(
        jax.tree.leaves((mine, mine_metrics)), jax.tree.leaves((theirs, their_metrics)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_changed_model_is_refused(plan: Plan, mesh_4x2: Mesh, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    state, batch = arguments()
    wider = {"up": jnp.zeros((32, 128)), "down": state.params["down"]}
    with pytest.raises(PlanMismatchError, match=r"state/params/up: float32\[32, 64\] -> float32\[32, 128\]"):
        load_plan(tmp_path / "plan.json", mesh_4x2).bind(state.replace(params=wider), batch)


def test_it_prints_explains_and_exports(plan: Plan, mesh_4x2: Mesh, tmp_path: Path) -> None:
    lines = str(plan).splitlines()
    assert max(map(len, lines)) <= 120, [x for x in lines if len(x) > 120]
    assert any("{up" in line or "up" in line.split() for line in lines)
    assert "state/params/up" in plan.explain("params/up")
    plan.to_html(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    exported: dict[str, Any] = {}
    exec(compile(plan.to_python(), "exported.py", "exec"), exported)
    assert exported["in_shardings"](mesh_4x2, *arguments()) == plan.in_shardings
    assert exported["out_shardings"](mesh_4x2, jax.eval_shape(train_step, *arguments())) == plan.out_shardings
