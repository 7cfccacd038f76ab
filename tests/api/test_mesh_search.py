"""The mesh that the planner chooses: the best of all, kept from call to call, and an error that says what was tried."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan.errors import ArgumentError, ConstraintError, InfeasibleError, MeshError


def step(weights: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    def loss(w: dict[str, Any]) -> jax.Array:
        return ((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), value


def shapes(rows: int, width: int, hidden: int) -> tuple[Any, Any]:
    def shape(*extents: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(extents, jnp.float32)

    return {"up": shape(width, hidden), "down": shape(hidden, width)}, shape(rows, width)


# few rows and wide weights on two nodes: neither the batch nor the weights alone are the right thing to cut
WIDE = shapes(512, 2048, 8192)


def test_it_is_the_best_of_all_meshes() -> None:
    chosen = jaxplan.plan(step, "auto", *WIDE, devices=16, hardware="v100", donate_argnums=0)
    every = {
        sizes: jaxplan.plan(
            step,
            AbstractMesh(sizes, ("data", "model")[: len(sizes)]),
            *WIDE,
            hardware="v100",
            donate_argnums=0,
        ).cost.step_s
        for sizes in ((16,), (2, 8), (4, 4), (8, 2))
    }
    assert max(every.values()) > 1.02 * min(every.values()), "no mesh is worse: nothing is tested"
    assert chosen.cost.step_s <= 1.005 * min(every.values())
    said = chosen.assumptions[-1]
    for sizes in every:
        assert ",".join(f"{n}={s}" for n, s in zip(("data", "model"), sizes, strict=False)) in said


def test_a_step_runs_on_its_mesh_and_stays_there() -> None:
    sharded = jaxplan.auto_shard(step, mesh="auto", donate_argnums=0)
    random = np.random.default_rng(0)
    weights = {
        "up": random.standard_normal((64, 128), np.float32),
        "down": random.standard_normal((128, 64), np.float32),
    }
    state, plain = weights, weights
    for rows in (64, 64, 8):  # a shorter batch is a plan of its own, on the mesh that holds the state
        x = random.standard_normal((rows, 64), np.float32)
        state, loss = sharded(state, x)
        plain, expected = jax.jit(step)(plain, x)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for name, weight in plain.items():
        np.testing.assert_allclose(state[name], weight, rtol=1e-4, atol=1e-6)
    plans = [sharded.plan(weights, jax.ShapeDtypeStruct((rows, 64), jnp.float32)) for rows in (64, 8)]
    assert plans[0].mesh == plans[1].mesh
    assert set(plans[0].mesh.devices.flat) == set(jax.devices())
    assert (
        jaxplan.auto_shard(step, "auto", options={"plan": plans[0]})
        .plan(weights, jax.ShapeDtypeStruct((64, 64), jnp.float32))
        .axes
        == plans[0].axes
    )


def test_a_constraint_leaves_the_meshes_that_have_its_axes() -> None:
    settings: dict[str, Any] = {"devices": 8, "hardware": "tpu-v5e"}
    chosen = jaxplan.plan(step, "auto", *WIDE, constraints={"weights/up": P(None, "model")}, **settings)
    assert dict(chosen.axes).keys() == {"data", "model"}
    assert "data=8: what is said of shardings can't be met" in chosen.assumptions[-1]
    with pytest.raises(ConstraintError, match="names axis 'tensor'"):
        jaxplan.plan(step, "auto", *WIDE, constraints={"weights/up": P(None, "tensor")}, **settings)


def test_three_axes_are_looked_at_when_asked_for() -> None:
    chosen = jaxplan.plan(
        step, "auto", *shapes(64, 128, 256), devices=8, hardware="tpu-v5e", options={"mesh_axes": 3}
    )
    assert "replica=2,data=2,model=2" in chosen.assumptions[-1]


def test_what_fits_no_mesh_says_what_each_would_need() -> None:
    # cut in eight the weights alone are 16 MiB
    with pytest.raises(
        InfeasibleError, match=r"no mesh of 8 devices will do \(data=8: needs at least 16\.\d MiB"
    ):
        jaxplan.plan(step, "auto", *WIDE, devices=8, hardware="tpu-v5e", memory_budget="8MiB")
    with pytest.raises(InfeasibleError, match=r"data=4,model=2: needs about .* Smallest reachable peak: "):
        jaxplan.plan(step, "auto", *WIDE, devices=8, hardware="tpu-v5e", memory_budget="17MiB")


def test_devices_that_are_not_there_and_questions_without_a_mesh() -> None:
    with pytest.raises(MeshError, match=r"devices=9, and this machine has 8 .* name the hardware"):
        jaxplan.auto_shard(step, "auto", devices=9)
    with pytest.raises(MeshError, match="devices=0"):
        jaxplan.auto_shard(step, devices=0, hardware="tpu-v5e")
    with pytest.raises(MeshError, match="empty"):
        jaxplan.auto_shard(step, devices=[])
    with pytest.raises(ArgumentError, match="not both"):
        jaxplan.auto_shard(step, AbstractMesh((2,), ("data",)), devices=2, hardware="tpu-v5e")
    with pytest.raises(ArgumentError, match="depends on its mesh"):
        jaxplan.auto_shard(step, devices=2, hardware="tpu-v5e").problem(*WIDE)
    with pytest.raises(ArgumentError, match="mesh_axes=4"):
        jaxplan.Options(mesh_axes=4)
    assert jaxplan.plan(step, None, *shapes(64, 64, 64), devices=2).axes == (("data", 2),)
