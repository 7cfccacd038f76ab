"""Steps on Equinox modules, as `equinox.filter_jit` users write them: functions and flags among the leaves."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh

import jaxplan

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
OPTIMIZER = optax.adam(1e-2)


class Net(eqx.Module):
    """Among its leaves: jax.nn.relu, the dropout's rate and flag, and None."""

    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    nothing: None = None

    def __call__(self, x: Any, key: Any) -> Any:
        return self.dropout(self.mlp(x), key=key)


def build() -> Net:
    return Net(eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0)), eqx.nn.Dropout(0.2))


def init() -> tuple[Net, Any]:
    net = build()
    return net, OPTIMIZER.init(eqx.filter(net, eqx.is_array))


def loss_of(net: Net, x: Any, key: Any) -> Any:
    return jnp.mean((jax.vmap(net)(x, jax.random.split(key, len(x))) - x) ** 2)


def train(net: Net, moments: Any, x: Any, key: Any) -> Any:
    loss, gradients = eqx.filter_value_and_grad(loss_of)(net, x, key)
    updates, moments = OPTIMIZER.update(gradients, moments, eqx.filter(net, eqx.is_array))
    return eqx.apply_updates(net, updates), moments, loss


def sharded(mesh: Any, fn: Any = train, **settings: Any) -> Any:
    return jaxplan.auto_shard(fn, mesh, options={"compare_templates": False}, **settings)


@pytest.mark.parametrize("wrapped", [False, True])
def test_modules_are_trained_as_under_filter_jit(wrapped: bool, mesh_4x2: Mesh) -> None:
    step = sharded(mesh_4x2, eqx.filter_jit(train) if wrapped else train, donate_argnums=(0, 1))
    reference = eqx.filter_jit(train)
    ours, theirs = init(), init()
    for seed in range(3):
        key = jax.random.key(seed)
        *ours, loss = step(*ours, X, key)
        *theirs, expected = reference(*theirs, X, key)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert ours[0].mlp.activation is theirs[0].mlp.activation and ours[0].dropout.inference is False
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if eqx.is_array(other):
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)
    (inner,) = step._of_modules.steps
    assert len(inner._variants) == 1


def test_a_flag_is_another_program(mesh_4x2: Mesh) -> None:
    def outputs(net: Net, x: Any, key: Any) -> Any:
        return jax.vmap(net)(x, jax.random.split(key, len(x)))

    predict = sharded(mesh_4x2, outputs)
    net, key = build(), jax.random.key(1)
    noisy, plain = predict(net, X, key), predict(eqx.nn.inference_mode(net), X, key)
    np.testing.assert_allclose(noisy, eqx.filter_jit(outputs)(net, X, key), rtol=1e-4, atol=1e-6)
    assert (noisy == 0).any() and not (plain == 0).all(axis=1).any()


def test_modules_are_planned_from_shapes_and_made_on_the_plans_shardings(mesh_4x2: Mesh) -> None:
    step = sharded(mesh_4x2, constraints={"net/mlp/layers/0/weight": jax.P("data")})
    plan = step.plan(*eqx.filter_eval_shape(init), X, jax.random.key(0))
    kinds = {tensor.path: tensor.kind for tensor in plan.inputs}
    assert kinds["net/mlp/layers/0/weight"] == "parameter" and "net/mlp/activation" not in kinds
    assert [tensor.path for tensor in plan.outputs if not tensor.alias] == ["result/2"]
    net, moments = step.init(init)
    assert net.mlp.layers[0].weight.sharding.spec == jax.P("data")
    np.testing.assert_array_equal(net.mlp.layers[1].weight, build().mlp.layers[1].weight)
    assert float(step(net, moments, X, jax.random.key(0))[2]) > 0


def test_what_else_takes_a_step_takes_modules(mesh_4x2: Mesh) -> None:
    verification = jaxplan.verify(sharded(mesh_4x2), *init(), X, jax.random.key(0), numerics=True)
    assert [finding.grave for finding in verification.findings if finding.what == "numerics"] == [False]
    shapes = (*eqx.filter_eval_shape(init), X, jax.random.key(0))
    mesh = AbstractMesh((4, 2), ("data", "model"))
    assert jaxplan.frontier(train, mesh, *shapes, hardware="tpu-v5e").points


class Rows(eqx.Module):
    """What it knows of its rows is no array."""

    values: Any
    count: int = eqx.field(static=True)


@pytest.mark.parametrize("by_keyword", [False, True])
def test_what_is_returned_may_depend_on_shapes(by_keyword: bool, mesh_4x2: Mesh) -> None:
    def embed(net: Net, x: Any) -> Any:
        made = jax.vmap(net.mlp)(x)
        return Rows(made.sum(0), len(x)), "many" if len(x) > 8 else "few"

    step, net = sharded(mesh_4x2, embed), build()
    for rows in (X, X[:8], X, X[:8]):
        made, word = step(net, x=rows) if by_keyword else step(net, rows)
        assert (made.count, word) == (len(rows), "many" if len(rows) > 8 else "few")
        np.testing.assert_allclose(made.values, embed(net, rows)[0].values, rtol=1e-4)


def test_what_is_returned_may_depend_on_static_arguments(mesh_4x2: Mesh) -> None:
    def embed(net: Net, x: Any, count: int) -> Any:
        return Rows(jax.vmap(net.mlp)(x).sum(0), count)

    step = sharded(mesh_4x2, embed, static_argnums=2)
    assert [step(build(), X, count).count for count in (1, 2, 1)] == [1, 2, 1]


def test_what_can_neither_be_traced_nor_hashed_is_named(mesh_4x2: Mesh) -> None:
    class Odd(eqx.Module):
        weight: Any
        names: Any

    odd = Odd(jnp.ones((8, 8)), {"a": bytearray(b"x")})
    with pytest.raises(jaxplan.ArgumentError, match="a module among the arguments holds a bytearray"):
        sharded(mesh_4x2, lambda odd, x: x @ odd.weight)(odd, X)
