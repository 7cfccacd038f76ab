"""What a step takes as the partitioner realises its plan is what the search decided on, to a thousandth."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import jaxplan

Made = tuple[Callable[..., Any], tuple[Any, ...], dict[str, P]]


def shape(*dims: int, dtype: Any = np.float32) -> Any:
    return jax.ShapeDtypeStruct(dims, dtype)


def recurrent(batch: int, width: int, time: int) -> Made:
    """A gated cell over time: the gradients of its weights are summed in a loop that goes along stacks of residuals."""
    model = nn.Sequential([nn.RNN(nn.GRUCell(width // 2)), nn.Dense(width)])

    def step(params: Any, xs: Any) -> Any:
        gradient = jax.grad(lambda p: ((model.apply(p, xs) - xs) ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    xs = shape(batch, time, width)
    params = jax.eval_shape(model.init, jax.random.key(0), xs)
    return step, (params, xs), {"xs": P("model")}


def inner_loop(batch: int, width: int, blocks: int) -> Made:
    """Layers with a loop inside, made again on the way back: gradients of weights wait until that loop is through."""

    def step(params: Any, xs: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            y = x @ w["a"]
            pieces = y.reshape(batch, blocks, -1, width)
            first = jnp.zeros_like(pieces[:, 0])
            _, mixed = lax.scan(lambda c, p: (c + p, jnp.tanh(c + p)), first, pieces.swapaxes(0, 1))
            return x + jax.nn.relu(mixed.swapaxes(0, 1).reshape(y.shape) @ w["b"]) @ w["c"], None

        def loss(params: Any) -> Any:
            return (lax.scan(jax.checkpoint(layer), xs, params)[0] ** 2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    sizes = {"a": (width, width), "b": (width, 4 * width), "c": (4 * width, width)}
    params = {name: shape(3, *dims) for name, dims in sizes.items()}
    parted = {f"params/{name}": P(None, ("data", "model")) for name in sizes}
    return step, (params, shape(batch, 64 * blocks, width)), {"xs": P(("data", "model")), **parted}


def chosen_rows(batch: int, width: int, tokens: int) -> Made:
    """Rows taken by index out of a dimension that is cut, and read in parts of another."""

    def step(xs: Any, index: Any, w: Any) -> Any:
        taken = jnp.tanh(jnp.take_along_axis(xs, index[..., None], axis=1))
        return taken, taken @ w

    args = shape(batch, tokens, width), shape(batch, tokens // 4, dtype=np.int32), shape(width, 8 * width)
    cut = P(None, ("data", "model"))
    return step, args, {"xs": cut, "w": P(), "index": P(), "result/0": cut, "result/1": cut}


def computed_again(batch: int, width: int, layers: int) -> Made:
    """Layers written out, made again on the way back: what they gather they gather once more behind a barrier."""

    def step(params: Any, xs: Any) -> Any:
        @jax.checkpoint
        def layer(x: Any, w: Any) -> Any:
            return x + jnp.tanh(x @ w["up"]) @ w["down"]

        def loss(params: Any) -> Any:
            return (functools.reduce(layer, params, xs) ** 2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    params = [{"up": shape(width, 4 * width), "down": shape(4 * width, width)}] * layers
    parted = {f"params/{i}/{name}": P(("data", "model")) for i in range(layers) for name in ("up", "down")}
    return step, (params, shape(batch, width)), {"xs": P(("data", "model")), **parted}


def words(batch: int, width: int, vocabulary: int) -> Made:
    """As many tokens as words: the table is cut by words, and what is looked up by sequences over that axis too."""

    def step(table: Any, tokens: Any, w: Any) -> Any:
        taken = jnp.tanh(table[tokens])
        return taken, taken @ w

    args = shape(vocabulary, width), shape(batch, vocabulary // batch, dtype=np.int32), shape(width, width)
    cut = P(("data", "model"))
    return step, args, {"table": P("model"), "tokens": P("data"), "w": P(), "result/0": cut, "result/1": cut}


STEPS = {
    "recurrent": recurrent,
    "inner loop": inner_loop,
    "chosen rows": chosen_rows,
    "computed again": computed_again,
    "words": words,
}
LARGE = {
    "recurrent": (64, 1024, 400),
    "inner loop": (64, 1024, 8),
    "chosen rows": (8, 4096, 8192),
    "computed again": (65536, 1024, 3),
    "words": (32, 768, 32768),
}
SMALL = {
    "recurrent": (8, 16, 4),
    "inner loop": (8, 16, 4),
    "chosen rows": (4, 16, 32),
    "computed again": (16, 16, 3),
    "words": (8, 16, 64),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_partitioner_makes_of_a_plan_what_was_decided(name: str) -> None:
    step, args, constraints = STEPS[name](*LARGE[name])
    plan = jaxplan.plan(
        step, AbstractMesh((4, 2), ("data", "model")), *args, hardware="tpu-v5e", constraints=constraints,
        memory_budget="200GiB", options={"compare_templates": False},
    )  # fmt: skip
    assert plan.cost.step_s == pytest.approx(plan.cost.objective_s, rel=1e-3)


@pytest.mark.parametrize("name", STEPS)
def test_and_it_computes_what_one_device_does(name: str, mesh_4x2: Mesh) -> None:
    step, shapes, constraints = STEPS[name](*SMALL[name])
    random = np.random.default_rng(0)
    args = jax.tree.map(lambda s: (4 * random.normal(size=s.shape) % 8).astype(s.dtype), shapes)
    sharded = jaxplan.auto_shard(
        step, mesh_4x2, hardware="tpu-v5e", constraints=constraints, options={"compare_templates": False}
    )
    for mine, theirs in zip(
        jax.tree.leaves(sharded(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())
