"""Steps that are under `jax.jit` already, as most are: what they donate is donated, what they fix is fixed."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

import jaxplan

SIDE = 256


@functools.partial(jax.jit, donate_argnums=0, static_argnames=("mode", "power"))
def step(state: dict[str, Any], x: Any, mode: str = "mean", *, power: int = 1) -> Any:
    moved = {"w": state["w"] + (x**power).sum()}
    return moved, x.mean() if mode == "mean" else x.max()


def state() -> dict[str, Any]:
    return {"w": jnp.zeros((SIDE, SIDE))}


def test_a_jitted_step_keeps_its_donations(mesh_4x2: Mesh) -> None:
    sharded = jaxplan.auto_shard(step, mesh_4x2)
    x = np.arange(16, dtype=np.float32)
    plan = sharded.plan(state(), x)
    assert {tensor.path: tensor.donated for tensor in plan.inputs} == {"state/w": True, "x": False}
    once, _ = sharded(state(), x)
    assert float(once["w"][0, 0]) == x.sum()
    sharded(once, x)
    assert once["w"].is_deleted()
    mesh = AbstractMesh((4, 2), ("data", "model"))
    with_own = jaxplan.audit(step, mesh, state(), x, template="data", hardware="tpu-v5e")
    assert with_own.plan.inputs[0].donated


def test_a_jitted_step_keeps_its_static_arguments(mesh_4x2: Mesh) -> None:
    sharded = jaxplan.auto_shard(step, mesh_4x2)
    x = np.arange(16, dtype=np.float32)
    assert float(sharded(state(), x, "max")[1]) == 15
    assert float(sharded(state(), x, mode="max", power=2)[1]) == 15
    moved, mean = sharded(state(), x, power=2)
    assert (float(moved["w"][0, 0]), float(mean)) == ((x**2).sum(), 7.5)


def test_what_is_donated_by_position_is_not_another_argument(mesh_4x2: Mesh) -> None:
    def plain(x: Any, moments: Any) -> Any:
        return x.sum(), {"m": moments["m"] + x.mean()}

    sharded = jaxplan.auto_shard(plain, mesh_4x2, donate_argnums=1)
    x = jnp.ones((SIDE, SIDE))
    sharded(x, moments={"m": jnp.zeros((8,))})
    assert not x.is_deleted()


def test_shardings_of_an_own_jit_are_not_left_aside_in_silence(mesh_4x2: Mesh) -> None:
    cut = NamedSharding(mesh_4x2, jax.P("data"))
    product = jax.jit(lambda x, w: x @ w, in_shardings=(cut, None))
    x = jax.ShapeDtypeStruct((64, 64), "float32")
    (told,) = [line for line in jaxplan.plan(product, mesh_4x2, x, x).assumptions if "own jax.jit" in line]
    assert "<lambda>" in told
    assert not [line for line in jaxplan.plan(step, mesh_4x2, state(), x).assumptions if "own jax.jit" in line]
