"""What is moved around a dimension is one operation, however it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.ir import trace

X = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)


def rolls(fn: Callable[..., Any]) -> list[tuple[int, int]]:
    """(shift, axis) of each roll; what is traced still computes the same."""
    traced = trace(fn, (X,), {})
    made = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, X)
    for mine, expected in zip(made, jax.tree.leaves(fn(X)), strict=True):
        np.testing.assert_array_equal(mine, expected)
    parts = {"slice", "split", "pad", "concatenate"}
    left = parts.intersection(op.primitive for op in traced.graph.ops)
    found = [(op.params["shift"], op.params["axis"]) for op in traced.graph.ops if op.primitive == "roll"]
    assert not (found and left)
    return found


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: jnp.roll(x, 3, 0), [(3, 0)]),
        (lambda x: jnp.roll(x, -1, 0), [(7, 0)]),
        (lambda x: jnp.roll(x, (3, -2), (0, 1)), [(3, 0), (4, 1)]),
        (lambda x: jnp.concatenate([x[6:], x[:6]]), [(2, 0)]),
        (lambda x: jnp.roll(x, (0, 6), (0, 1)) + 1, [(0, 0), (0, 1)]),
        (lambda x: jax.lax.scan(lambda c, _: (jnp.roll(c, 1, 1), None), x, None, length=2)[0], [(1, 1)]),
        (lambda x: jax.vjp(lambda y: jnp.roll(y, 3, 0), x)[1](x), [(5, 0)]),
        (lambda x: jax.grad(lambda y: (jnp.roll(y, 3, 0) * y).sum())(x), [(3, 0), (5, 0)]),
    ],
)
def test_rolls_are_one_operation(fn: Callable[..., Any], expected: list[tuple[int, int]]) -> None:
    assert sorted(rolls(fn)) == expected


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.concatenate([x[:2], x[2:]]),  # in place
        lambda x: jnp.concatenate([x[:0], x]),
        lambda x: jnp.concatenate([x[5:], x[:6]]),  # a row twice
        lambda x: jnp.concatenate([x[6:], jnp.sin(x)[:6]]),  # of two values
        lambda x: jnp.concatenate([x[6:, 1:], x[:6, 1:]]),  # of a part
        lambda x: jnp.concatenate([x[7::-1], x[:0]]),
        lambda x: jnp.pad(x[:2], ((6, 0), (0, 0)), constant_values=1.0) + jnp.pad(x[2:], ((0, 2), (0, 0))),
        lambda x: jnp.concatenate([x[1:], jnp.zeros((1, 6))]),
        lambda x: jnp.pad((1j * x)[:2], ((6, 0), (0, 0))) + jnp.pad(jnp.fft.fft(x)[2:], ((0, 2), (0, 0))),
    ],
)
def test_what_only_looks_like_one_is_left_alone(fn: Callable[..., Any]) -> None:
    assert rolls(fn) == []


def test_parts_that_others_read_too_stay() -> None:
    traced = trace(lambda x: (jnp.concatenate([x[6:], x[:6]]), x[6:] * 2), (X,), {})
    assert sorted(op.primitive for op in traced.graph.ops) == ["mul", "roll", "slice"]
