"""A step that computes something else when sharded is found out, and one that doesn't passes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxplan
from jaxplan.errors import ArgumentError
from jaxplan.inspection import verify
from jaxplan.inspection.known_bugs import known_bugs
from jaxplan.inspection.numerics import made_up, relative_error
from jaxplan.plans import PlannedCollective


def step(state: Any, batch: Any) -> Any:
    def loss(state: Any) -> jax.Array:
        hidden = jnp.tanh(state["table"][batch["ids"]] @ state["weight"])
        return jnp.mean(hidden**2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


SHAPES = (
    {
        "table": jax.ShapeDtypeStruct((64, 32), jnp.float32),
        "weight": jax.ShapeDtypeStruct((32, 16), jnp.float32),
    },
    {"ids": jax.ShapeDtypeStruct((16,), jnp.int32)},
)


def test_a_sharded_step_computes_what_the_unsharded_one_does(mesh_4x2: Mesh) -> None:
    sharded = jaxplan.auto_shard(step, mesh_4x2, donate_argnums=0, options={"search": "fsdp"})
    found = verify(sharded, *SHAPES, numerics=True)
    (compared,) = [f for f in found.findings if f.what == "numerics"]
    assert not compared.grave and "all 3 results agree, sharded over 8 cpu devices and on one" in compared.text


def test_the_first_result_that_differs_is_named(mesh_4x2: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded = jaxplan.auto_shard(step, mesh_4x2, options={"search": "fsdp"})
    # the unsharded run is of another function: as good as a sharded run that went wrong
    monkeypatch.setattr(
        sharded, "__wrapped__", lambda s, b: (step(s, b)[0] | {"weight": s["weight"]}, step(s, b)[1])
    )
    grave = [f for f in verify(sharded, *SHAPES, numerics=True).findings if f.what == "numerics"]
    assert [f.where for f in grave] == ["result/0/weight"]
    assert grave[0].grave and "leaves before it agree" in grave[0].text


@pytest.mark.aot_tpu
def test_a_plan_for_devices_that_are_not_there_runs_on_those_that_are(tpu_topology: Any) -> None:
    mesh = jaxplan.target("tpu-v5e:2x4").mesh(data=4, model=2)
    sharded = jaxplan.auto_shard(step, mesh, donate_argnums=0, options={"search": "fsdp"})
    found = verify(sharded, *SHAPES, numerics=True)
    assert not [f for f in found.findings if f.what == "numerics" and f.grave], str(found)
    larger = jaxplan.target("tpu-v5e:4x4").mesh(data=16)
    with pytest.raises(ArgumentError, match="this machine has 8 devices for a mesh of 16"):
        verify(jaxplan.auto_shard(step, larger, options={"search": "fsdp"}), *SHAPES, numerics=True)


def test_numbers_are_made_up_for_shapes_alone_and_always_the_same() -> None:
    given = jnp.arange(4.0)
    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = ({"a": given, "b": jax.ShapeDtypeStruct((3,), jnp.bfloat16), "k": key},)
    first, second = made_up(shapes), made_up(shapes)
    assert first[0]["a"] is given
    assert (first[0]["b"] == second[0]["b"]).all() and (first[0]["b"] > 0).all()
    assert jax.dtypes.issubdtype(first[0]["k"].dtype, jax.dtypes.prng_key)


def test_differences_are_relative_and_lone_nans_are_infinite() -> None:
    assert relative_error(np.array([1.0, 100.0]), np.array([2.0, 100.0])) == 0.01
    assert relative_error(np.array([np.nan, 1.0]), np.array([np.nan, 1.0])) == 0.0
    assert relative_error(np.array([0.0, 1.0]), np.array([np.nan, 1.0])) == float("inf")
    assert relative_error(np.array([3.0 + 4.0j]), np.array([3.0 + 5.0j])) == 0.2


def test_reported_miscompiles_are_pointed_at(mesh_4x2: Mesh) -> None:
    plan = jaxplan.plan(step, mesh_4x2, *SHAPES, options={"search": "data"})
    scattered = PlannedCollective(
        kind="all_reduce", axes=("data",), bytes=64, wire_bytes=96, trips=4.0, seconds_s=1e-6, where="model.py:3 (f)",
        primitive="scatter-add",
    )  # fmt: skip
    risky = dataclasses.replace(plan, collectives=(scattered,))
    assert [f.what for f in known_bugs(risky, "tpu", "")] == ["known bug"]
    assert list(known_bugs(risky, "gpu", "")) == list(known_bugs(plan, "tpu", "")) == []
    (note,) = known_bugs(plan, "gpu", '#sdy.sharding<@mesh, [{}], unreduced={"data"}>')
    assert "xla#40034" in note.text and not note.grave
