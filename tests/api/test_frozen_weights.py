"""What a step only reads: frozen and quantised weights are told from the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import jaxplan

DIM, WIDTH, RANK, ROWS = 256, 512, 8, 64
S = jax.ShapeDtypeStruct
FROZEN = {"up": S((DIM, WIDTH), jnp.bfloat16), "gain": S((WIDTH,), jnp.bfloat16), "down": S((WIDTH, DIM), jnp.bfloat16)}


def network(base: Any, x: Any) -> Any:
    return (jax.nn.gelu(x @ base["up"]) * base["gain"]) @ base["down"]


def adapters(state: Any, base: Any, batch: Any) -> Any:
    """Low-rank updates of frozen weights: gradients of the one alone, through the other."""

    def loss(state: Any) -> Any:
        own = {name: base[name] + (a @ b).astype(base[name].dtype) for name, (a, b) in state.items()}
        return jnp.mean((network({**base, **own}, batch["x"]) - batch["y"]).astype(jnp.float32) ** 2)

    return jax.tree.map(lambda p, g: p - g, state, jax.grad(loss)(state))


def preferences(state: Any, base: Any, batch: Any) -> Any:
    """Two parts of the batch go through one network together, and through a frozen one."""
    both = jnp.concatenate([batch["x"], batch["y"]])
    frozen = network(base, both)

    def loss(state: Any) -> Any:
        better, worse = jnp.split(jnp.sum((network(state, both) * frozen).astype(jnp.float32), -1), 2)
        return -jnp.mean(jax.nn.log_sigmoid(better - worse))

    return jax.tree.map(lambda p, g: p - g, state, jax.grad(loss)(state))


LOW_RANK = {"up": (S((DIM, RANK), jnp.float32), S((RANK, WIDTH), jnp.float32))}


@pytest.mark.parametrize(("step", "state"), [(adapters, LOW_RANK), (preferences, FROZEN)])
def test_frozen_weights_are_parameters(step: Callable[..., Any], state: Any) -> None:
    batch = {name: S((ROWS, DIM), jnp.bfloat16) for name in "xy"}
    plan = planned(step, state, FROZEN, batch)
    kinds = {(t.path.split("/")[0], t.kind) for t in plan.inputs}
    assert kinds == {("state", "parameter"), ("base", "parameter"), ("batch", "batch")}


def test_quantised_weights_are_parameters() -> None:
    def predict(weights: Any, x: Any) -> Any:
        for w, scale in weights:
            small = jnp.round(x / jnp.max(jnp.abs(x), -1, keepdims=True) * 127).astype(jnp.int8)
            x = jnp.matmul(small, w, preferred_element_type=jnp.int32).astype(jnp.float32) * scale
        return x

    weights = [(S(shape, jnp.int8), S(shape[1:], jnp.float32)) for shape in ((DIM, WIDTH), (WIDTH, DIM))]
    weights.append((S((DIM, 2), jnp.int8), S((), jnp.float32)))
    plan = planned(predict, weights, S((ROWS, DIM), jnp.float32))
    assert [t.kind for t in plan.inputs] == ["parameter"] * 5 + ["batch"] * 2  # a scalar is no weight


def test_frozen_stacks_in_bf16_beside_trained_ones_in_f32() -> None:
    """Both loops' weights are sent in bf16: a TPU's products round those in f32, which are converted first."""

    def through(weights: Any, x: Any) -> Any:
        layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w.astype(h.dtype)), None))
        return jax.lax.scan(layer, x, weights)[0]

    def distil(state: Any, base: Any, batch: Any) -> Any:
        def loss(state: Any) -> Any:
            return jnp.mean((through(state, batch) - through(base, batch)).astype(jnp.float32) ** 2)

        return jax.tree.map(lambda p, g: p - g, state, jax.grad(loss)(state))

    stacks = [S((4, DIM, DIM), dtype) for dtype in (jnp.float32, jnp.bfloat16)]
    plan = planned(distil, *stacks, S((ROWS, DIM), jnp.bfloat16), search="fsdp")
    gathered = [c.bytes * c.trips for c in plan.collectives if c.kind == "all_gather"]
    assert [size for size in gathered if size >= stacks[0].size] == [2 * stack.size for stack in stacks]


def planned(step: Callable[..., Any], *shapes: Any, search: str = "ilp") -> jaxplan.Plan:
    mesh = AbstractMesh((4, 2), ("data", "model"))
    return jaxplan.plan(step, mesh, *shapes, hardware="tpu-v5e", options={"search": search, "compare_templates": False})
