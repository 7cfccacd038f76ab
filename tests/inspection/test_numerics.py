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
    assert (
        not compared.grave and "all 3 results agree, sharded over 8 cpu devices and on one" in compared.text
    )


def test_the_first_result_that_differs_is_named(mesh_4x2: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded = jaxplan.auto_shard(step, mesh_4x2, options={"search": "fsdp"})
    # the unsharded run is of another function: as good as a sharded run that went wrong
    monkeypatch.setattr(
        sharded, "__wrapped__", lambda s, b: (step(s, b)[0] | {"weight": s["weight"]}, step(s, b)[1])
    )
    grave = [f for f in verify(sharded, *SHAPES, numerics=True).findings if f.what == "numerics"]
    assert [f.where for f in grave] == ["result/0/weight"]
    assert grave[0].grave and "leaves before it agree" in grave[0].text


def attention(state: Any, tokens: jax.Array) -> Any:
    """A bias of the keys, which moves nothing (a softmax is of differences), under Adam's first step: lr * sign(0)."""

    def loss(params: Any) -> jax.Array:
        query, key = tokens @ params["query"], tokens @ params["key"] + params["bias"]
        scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", query, key) / 4.0)
        return jnp.mean(jnp.square(scores @ (tokens @ params["value"])))

    value, grads = jax.value_and_grad(loss)(state["params"])
    state = state | {"params": jax.tree.map(_adam, state["params"], grads)}
    return state, value


def _adam(weight: jax.Array, gradient: jax.Array) -> jax.Array:
    return weight - 0.1 * (gradient / (jnp.sqrt(gradient**2) + 1e-12)).astype(weight.dtype)


def test_rounding_errors_that_an_optimizer_blows_up_are_no_difference(mesh_4x2: Mesh) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        name: jax.random.normal(k, (32, 32)) for name, k in zip(("key", "query", "value"), keys, strict=False)
    }
    state = {"params": params | {"bias": jnp.zeros(32)}}
    tokens = jax.random.normal(keys[3], (8, 16, 32))

    sharded = jaxplan.auto_shard(attention, mesh_4x2, options={"search": "fsdp"})
    (found,) = [f for f in verify(sharded, state, tokens, numerics=True).findings if f.what == "numerics"]
    assert not found.grave and "as result/0/params/bias, are rounding errors" in found.text, found

    def other(state: Any, tokens: jax.Array) -> Any:
        new, value = attention(state, tokens)
        return {"params": new["params"] | {"value": state["params"]["value"]}}, value

    sharded.__wrapped__ = other  # type: ignore[attr-defined]
    (found,) = [f for f in verify(sharded, state, tokens, numerics=True).findings if f.what == "numerics"]
    assert found.grave and found.where == "result/0/params/value", found


def test_a_step_in_bf16_may_differ_as_bf16_does(mesh_4x2: Mesh) -> None:
    def step(weight: jax.Array, tokens: jax.Array) -> jax.Array:
        hidden = jnp.tanh(tokens.astype(jnp.bfloat16) @ weight.astype(jnp.bfloat16))
        return (hidden.T @ hidden).astype(jnp.float32)

    sharded = jaxplan.auto_shard(step, mesh_4x2, options={"search": "data"})
    sharded.__wrapped__ = lambda w, t: step(w, t) * (1 + 2.0**-9)  # type: ignore[attr-defined]
    weight, tokens = (
        jax.random.normal(jax.random.key(0), (16, 16)),
        jax.random.normal(jax.random.key(1), (64, 16)),
    )
    (found,) = [f for f in verify(sharded, weight, tokens, numerics=True).findings if f.what == "numerics"]
    assert not found.grave and "all 1 results agree" in found.text, found
    sharded.__wrapped__ = lambda w, t: step(w, t) * 1.1  # type: ignore[attr-defined]
    (found,) = [f for f in verify(sharded, weight, tokens, numerics=True).findings if f.what == "numerics"]
    assert found.grave, found


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
