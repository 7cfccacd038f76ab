"""What is computed of the inside of a field, however it is sliced and put back, is computed of the whole field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxplan.ir import trace

U = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)


def primitives(fn: Callable[..., Any], *args: Any) -> tuple[set[str], set[tuple[int, ...]]]:
    """Primitives that are left, and shapes that they make; what is traced still computes the same."""
    traced = trace(fn, args, {})
    made = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *jax.tree.leaves(args))
    for mine, expected in zip(made, jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-6, atol=1e-6)
    ops = traced.graph.ops
    shapes = {traced.graph.values[v].shape for op in ops for v in op.results}
    return {op.primitive for op in ops}, {shape for shape in shapes if len(shape) == 2}


def laplacian(u: Any) -> Any:
    return u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1]


def heat(u: Any) -> Any:
    return u.at[1:-1, 1:-1].add(0.1 * laplacian(u))


def wave(u: Any, before: Any, speed: Any) -> tuple[Any, Any]:
    inside = (slice(1, -1), slice(1, -1))
    now = 2 * u[inside] - before[inside] + speed[1:-1, None] * laplacian(u)
    return u.at[inside].set(now), u


def edges(u: Any) -> Any:
    """Nothing flows over the edges."""
    wide = jnp.pad(u, 1, mode="edge")
    return u + 0.1 * (wide[2:, 1:-1] + wide[:-2, 1:-1] + wide[1:-1, 2:] + wide[1:-1, :-2] - 4 * wide[1:-1, 1:-1])


def upwind(u: Any) -> Any:
    flow = jnp.where(u[1:] > 0, u[1:] - u[:-1], jnp.clip(u[1:], -1, 1))
    return u.at[1:].add(-0.1 * flow)


def corners(u: Any) -> Any:
    return u.at[1:-1, 1:-1].set(jnp.maximum(u[2:, 2:], u[:-2, :-2]))


def slope(u: Any) -> Any:
    """Central differences, one-sided at the ends."""
    return jnp.concatenate([u[1:2] - u[:1], (u[2:] - u[:-2]) / 2, u[-1:] - u[-2:-1]], 0)


def updated(u: Any) -> Any:
    return lax.dynamic_update_slice(u, jnp.tanh(laplacian(u)), (1, 1))


def variation(u: Any) -> Any:
    """The gradient of a total variation."""
    return jax.grad(lambda u: jnp.sum(jnp.abs(u[1:] - u[:-1])) + jnp.max(jnp.square(u[:, 1:] - u[:, :-1])))(u)


def damped(u: Any) -> Any:
    return wave(u, 2 * u, jnp.arange(16.0)), u.at[:, 1:-1].add(u[:, 2:] * jnp.cos(jnp.arange(30.0)))


@pytest.mark.parametrize(
    "fn",
    [
        heat, upwind, corners, slope, updated, variation, lambda u: jnp.pad(laplacian(u), 1, constant_values=3.0),
        lambda u: u.at[2:-1, 3:].set(2.0), lambda u: lax.fori_loop(0, 3, lambda _, u: heat(u), u),
        lambda u: jax.vmap(heat)(jnp.stack([u, 2 * u])),
        lambda u: jax.grad(lambda u: (heat(heat(u)) ** 2).sum())(u),
        damped, lambda u: jnp.gradient(u),
        edges, lambda u: sum(jnp.pad(u, ((1, 1), (0, 0)), mode="wrap")[i : i + 16] * (i + 1) for i in range(3)),
        lambda u: u.at[1:-1].set((u[2:] * 7).astype(jnp.int32).astype(jnp.bfloat16).astype(jnp.float32)),
    ],
)  # fmt: skip
def test_nothing_is_sliced_or_scattered_and_all_shapes_are_the_fields(fn: Callable[..., Any]) -> None:
    left, shapes = primitives(fn, U)
    assert not left & {"scatter", "scatter-add", "gather", "dynamic_update_slice", "concatenate"}
    assert fn is damped or not left & {"slice", "pad"}  # what has one dimension is cut and padded
    assert all(shape == U.shape or 1 in shape for shape in shapes)


@pytest.mark.parametrize(
    "fn",
    [
        lambda u: u.at[1:-1, 1:-1].add(jnp.cumsum(laplacian(u), 0)),  # no elementwise work
        lambda u: (u.at[1:-1].set(d := u[2:] - u[:-2]), d),  # the inside is wanted by itself
        lambda u: jnp.concatenate([-u[:, 16:], u[:, :16]], 1),  # as in a rotary embedding
        lambda u: u.at[3:5].set(u[:2] + 1),  # little of the field
        lambda u: u.at[:, 0].set(0.0),
        lambda u: lax.dynamic_update_slice(u, u[2:] + 1, (jnp.int32(u[0, 0] > 0), 0)),  # who knows where
    ],
)
def test_what_is_no_inside_is_left_alone(fn: Callable[..., Any]) -> None:
    left, _ = primitives(fn, U)
    assert left & {"slice", "scatter", "scatter-add", "pad", "dynamic_update_slice", "concatenate"}
    assert "shift" not in left


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.uint32, jnp.bool_, jnp.complex64])
def test_of_any_type(dtype: Any) -> None:
    u = np.asarray(jnp.asarray(U * 9).astype(dtype))
    left, _ = primitives(lambda u: u.at[1:].set(jnp.where(u[1:] == u[:-1], u[1:], u[:-1])), u)
    assert not left & {"slice", "scatter"}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.uint32, jnp.bool_])
@pytest.mark.parametrize("total", [jnp.max, jnp.min, jnp.sum])
def test_totals_count_nothing_beside_the_inside(total: Callable[..., Any], dtype: Any) -> None:
    def fn(u: Any) -> Any:
        inside = jnp.where(u[1:] == u[:-1], u[1:], u[:-1])
        return total(inside), u.at[1:].set(inside)

    left, _ = primitives(fn, np.asarray(jnp.asarray(abs(U) * 9 + 1).astype(dtype)))
    assert not left & {"slice", "scatter"}
