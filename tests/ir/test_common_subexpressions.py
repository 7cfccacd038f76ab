"""What is computed of the same operands twice is computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.ir import trace

LABELS, WEIGHTS = jax.ShapeDtypeStruct((8,), jnp.int32), jax.ShapeDtypeStruct((8, 4), jnp.float32)


def twice(labels: Any, weights: Any) -> Any:
    first = jax.nn.one_hot(labels, 4) * weights
    return first.sum() + jnp.sin(jax.nn.one_hot(labels, 4) * weights).sum()


def returned(labels: Any, weights: Any) -> Any:
    """A result of its own stays one."""
    return jnp.sin(weights), jnp.sin(weights), jnp.sin(weights) + 1, labels


def unlike(labels: Any, weights: Any) -> Any:
    """Along other dimensions, with another number, of another type."""
    sums = weights.sum(0), weights.sum(1), weights * 2, weights * 3
    return sums, labels.astype(jnp.float32), labels.astype(jnp.bfloat16), labels + 1, labels + 1.0


def computed_again(labels: Any, weights: Any) -> Any:
    """What is to be computed again on the way back is."""
    del labels
    return jax.grad(jax.checkpoint(lambda w: jnp.sin(jnp.sin(w)).sum()))(weights)


def _network(weights: Any) -> Any:
    return jax.nn.silu(jnp.sin(jax.nn.relu(jnp.sin(weights))))


def with_and_without_gradient(labels: Any, weights: Any) -> Any:
    """As a generator is run, once for the discriminator's loss and once for its own: functions with a derivative of
    their own, and jitted ones, are other calls by then."""
    del labels
    return _network(weights).sum(), jax.grad(lambda w: (_network(w) ** 2).sum())(weights)


def gradient_first(labels: Any, weights: Any) -> Any:
    return *with_and_without_gradient(labels, weights)[::-1], labels


def called_twice(labels: Any, weights: Any) -> Any:
    """Two calls of one function that is jitted; and what one returns is what the other gets."""
    twice = jax.jit(lambda w: (jnp.sin(w), w))
    made, same = twice(weights)
    return made * 2, twice(same)[0] * 3, labels


@pytest.mark.parametrize(
    ("step", "primitive", "left"),
    [
        (twice, "mul", 1),
        (twice, "eq", 1),
        (returned, "sin", 2),
        (unlike, "reduce_sum", 2),
        (unlike, "mul", 2),
        (unlike, "convert_element_type", 3),
        (computed_again, "sin", 1),
        (with_and_without_gradient, "sin", 2),
        (with_and_without_gradient, "max", 1),
        (gradient_first, "sin", 2),
        (gradient_first, "max", 1),
        (called_twice, "sin", 1),
    ],
)
def test_equal_operations_are_one(step: Callable[..., Any], primitive: str, left: int) -> None:
    traced = trace(step, (LABELS, WEIGHTS), {})
    assert [op.primitive for op in traced.graph.ops].count(primitive) == left
    given = np.arange(8, dtype=np.int32) % 4, np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    made = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *given)
    for mine, theirs in zip(made, jax.tree.leaves(step(*given)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


def test_random_numbers_of_two_keys_stay_two() -> None:
    def step(key: Any, x: Any) -> Any:
        one, other = jax.random.split(key)
        alike = jax.random.normal(one, x.shape), jax.random.normal(one, x.shape)
        return x + jnp.sin(alike[0]) * alike[1] + jax.random.normal(other, x.shape)

    traced = trace(step, (jax.random.key(0), WEIGHTS), {})
    assert [op.primitive for op in traced.graph.ops].count("random_bits") == 2
    x = np.zeros((8, 4), np.float32)
    (made,) = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, jax.random.key(1), x)
    np.testing.assert_allclose(made, step(jax.random.key(1), x), rtol=1e-6)
