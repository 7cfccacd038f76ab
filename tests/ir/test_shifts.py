"""What is moved along a dimension, with a constant coming in, is one operation, however it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.ir import trace

X = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
PARTS = {"slice", "split", "pad", "concatenate"}


def shifts(fn: Callable[..., Any], x: np.ndarray = X) -> tuple[list[tuple[int, int, float]], set[str]]:
    """(by, axis, fill) of each shift, and the parts that are left; what is traced still computes the same."""
    traced = trace(fn, (x,), {})
    made = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, x)
    for mine, expected in zip(made, jax.tree.leaves(fn(x)), strict=True):
        np.testing.assert_array_equal(mine, expected)
    found = [op for op in traced.graph.ops if op.primitive == "shift"]
    left = PARTS.intersection(op.primitive for op in traced.graph.ops)
    return sorted((op.params["by"], op.params["axis"], op.params["fill"]) for op in found), left


def token_shift(x: Any) -> Any:
    return jnp.pad(x, ((1, 0), (0, 0)))[:-1]


def block_before(x: Any) -> Any:
    return jnp.concatenate([jnp.zeros_like(x[:2]), x[:-2]], 0)


def taps(x: Any) -> Any:
    """A causal convolution: a field that is padded once, and read at several places."""
    wide = jnp.pad(x, ((2, 0), (0, 0)))
    return wide[:8] + 2 * wide[1:9] + 3 * wide[2:]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (token_shift, [(1, 0, 0)]),
        (block_before, [(2, 0, 0)]),
        (lambda x: jnp.pad(x[:, :-3], ((0, 0), (3, 0))), [(3, 1, 0)]),
        (lambda x: jnp.pad(x[2:], ((0, 2), (0, 0)), constant_values=-1), [(-2, 0, -1)]),
        (lambda x: jax.lax.pad(x, 1.0, ((0, 0, 0), (-1, 1, 0))), [(-1, 1, 1)]),
        (lambda x: jnp.concatenate([x[:, 1:], jnp.full((8, 1), 2.0)], 1), [(-1, 1, 2)]),
        (lambda x: jnp.pad(x, ((2, 0), (0, 0)))[1:-1], [(1, 0, 0)]),
        (lambda x: token_shift(token_shift(x)), [(2, 0, 0)]),
        (lambda x: jnp.pad(x, 1)[2:, 1:-1] + jnp.pad(x, 1)[1:-1, 1:-1], [(-1, 0, 0)]),
        (lambda x: taps(x), [(1, 0, 0), (2, 0, 0)]),
        (lambda x: jax.grad(lambda y: (token_shift(y) * y).sum())(x), [(-1, 0, 0), (1, 0, 0)]),
        (lambda x: jax.grad(lambda y: (block_before(y) * y).sum())(x), [(-2, 0, 0), (2, 0, 0)]),
        (lambda x: jax.lax.scan(lambda c, _: (c + token_shift(c), None), x, None, length=2)[0], [(1, 0, 0)]),
    ],
)
def test_shifts_are_one_operation(fn: Callable[..., Any], expected: list[tuple[int, int, float]]) -> None:
    assert shifts(fn) == (expected, set())


def test_so_are_those_of_a_gradient_that_is_summed_before_it_is_cut() -> None:
    """What is left is a slice of everything."""
    found, left = shifts(lambda x: jax.grad(lambda y: jnp.sum(taps(jnp.sin(y)) ** 2))(x))
    assert found == [(-2, 0, 0), (-1, 0, 0), (1, 0, 0), (2, 0, 0)] and left == {"slice"}


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.pad(x, ((1, 0), (0, 0)))[1:],  # nothing moved
        lambda x: jnp.pad(x, ((1, 0), (0, 0)))[:-2],
        lambda x: jnp.pad(x[1:], ((1, 0), (0, 0))),  # in place
        lambda x: jnp.pad(x[2:-1], ((3, 0), (0, 0))),  # what is cut off doesn't come back
        lambda x: jnp.pad(jnp.pad(x[:-2], ((1, 0), (0, 0))), ((1, 0), (0, 0)), constant_values=1),
        lambda x: jnp.pad(x[:, :-1], ((1, 0), (0, 0))),
        lambda x: jnp.pad(x[:-1], ((1, 0), (1, 1))),
        lambda x: jnp.pad(x[:-2:2], ((5, 0), (0, 0))),
        lambda x: jnp.pad(x[:-1], ((1, 0), (0, 0)), mode="edge"),
        lambda x: jnp.concatenate([jnp.zeros((2, 6)), x[:-1]], 0),
        lambda x: jnp.concatenate([x[:-1], jnp.zeros((1, 6))], 0),
        lambda x: jax.lax.pad(x[:-1], x[0, 0], ((1, 0, 0), (0, 0, 0))),
        lambda x: jax.lax.pad(x[:-1], 0.0, ((1, 0, 1), (0, 0, 0))),
    ],
)
def test_what_only_looks_like_one_is_left_alone(fn: Callable[..., Any]) -> None:
    assert shifts(fn)[0] == []


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.uint32, jnp.bool_])
def test_of_any_type(dtype: Any) -> None:
    assert shifts(token_shift, np.asarray(jnp.asarray(X * 9).astype(dtype))) == ([(1, 0, 0)], set())


def test_parts_that_others_read_too_stay() -> None:
    found, left = shifts(lambda x: (token_shift(x), x[:-1] * 2))
    assert (found, left) == ([(1, 0, 0)], {"slice"})
