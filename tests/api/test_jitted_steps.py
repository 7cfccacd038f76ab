"""Steps that are under `jax.jit` already, as most are: what they donate is donated, what they fix is fixed."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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


def annotated_step(mesh: Mesh, **stated: Any) -> Any:
    rows, columns = NamedSharding(mesh, jax.P("data")), NamedSharding(mesh, jax.P(None, "model"))
    settings = {"in_shardings": ({"w": columns}, rows), "out_shardings": (None, rows), **stated}

    def move(state: dict[str, Any], x: Any) -> Any:
        return {"w": state["w"] + x.sum()}, x @ state["w"]

    return jax.jit(move, **settings)


@pytest.mark.parametrize("explicit", [False, True])
def test_shardings_of_an_own_jit_are_pinned_as_jit_reads_them(explicit: bool, mesh_4x2: Mesh) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model")) if explicit else mesh_4x2
    own = annotated_step(mesh)
    sharded = jaxplan.auto_shard(own, mesh_4x2)
    x = np.ones((SIDE, SIDE), np.float32)
    moved, product = sharded(state(), x)
    plan = sharded.plan(state(), x)
    assert plan.specs["state/w"] == jax.P(None, "model") and plan.specs["x"] == jax.P("data")
    assert product.sharding.spec == jax.P("data") and moved["w"].sharding.spec == jax.P(None, "model")
    np.testing.assert_allclose(product, 0)
    (told,) = [line for line in plan.assumptions if "own jax.jit" in line]
    assert told.startswith("2 arguments and 1 result pinned as they say (3 by `move`'s own jax.jit")
    pinned, started, ignored = (
        jaxplan.plan(own, mesh_4x2, state(), x, options={"annotations": mode}, hardware="tpu-v5e").cost.objective_s
        for mode in ("pin", "start", "ignore")
    )
    assert max(started, ignored) < 0.99 * pinned


def test_state_lies_as_an_own_jit_returns_it(mesh_4x2: Mesh) -> None:
    columns = NamedSharding(mesh_4x2, jax.P(None, "model"))
    x = np.ones((SIDE, SIDE), np.float32)
    returned = annotated_step(mesh_4x2, in_shardings=None, out_shardings=({"w": columns}, None))
    assert jaxplan.plan(returned, mesh_4x2, state(), x).specs["state/w"] == jax.P(None, "model")
    rows = NamedSharding(mesh_4x2, jax.P("data"))
    turned = annotated_step(mesh_4x2, out_shardings=({"w": rows}, None))
    with pytest.raises(jaxplan.ConstraintError, match=r"state/w: .*going in and .*coming out.*`move`'s own jax.jit"):
        jaxplan.plan(turned, mesh_4x2, state(), x)
    kept = jaxplan.plan(turned, mesh_4x2, state(), x, constraints={"state/w": jax.P()})
    assert kept.specs["state/w"] == jax.P() and kept.specs["x"] == jax.P("data")


def test_an_own_jit_on_axes_that_are_not_there_is_refused(mesh_4x2: Mesh) -> None:
    other = jax.make_mesh((8,), ("devices",))
    stated = NamedSharding(other, jax.P("devices"))
    own = annotated_step(mesh_4x2, in_shardings=({"w": stated}, None), out_shardings=None)
    with pytest.raises(jaxplan.ConstraintError, match=r"(?s)state/w: .*'devices'.*`move`'s own jax.jit"):
        jaxplan.plan(own, mesh_4x2, state(), np.ones((SIDE, SIDE), np.float32))


def test_shardings_that_a_part_states_are_not_left_aside_in_silence(mesh_4x2: Mesh) -> None:
    cut = NamedSharding(mesh_4x2, jax.P("data"))
    product = jax.jit(lambda x, w: x @ w, in_shardings=(cut, None))
    x = jax.ShapeDtypeStruct((64, 64), "float32")
    plan = jaxplan.plan(lambda x: product(jnp.sin(x), x), mesh_4x2, x)
    (told,) = [line for line in plan.assumptions if "own jax.jit" in line]
    assert "<lambda>" in told and "with_sharding_constraint" in told
    assert not [line for line in jaxplan.plan(step, mesh_4x2, state(), x).assumptions if "own jax.jit" in line]
