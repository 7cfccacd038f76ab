"""Products that are only read transposed are made with their operands exchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.ir import Traced, trace

A = jax.ShapeDtypeStruct


def primitives(traced: Traced) -> list[str]:
    return [op.primitive for op in traced.graph.ops]


def dense(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.sin(x @ w))


def heads(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.sin(jnp.einsum("bsd,dhk->bshk", x, w)))


def experts(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.sin(jnp.einsum("ecd,edf->ecf", x, w)))


def looped(w: Any, x: Any) -> Any:
    def layer(h: Any, part: Any) -> tuple[Any, None]:
        return jnp.sin(h @ part), None

    return jnp.sum(jax.lax.scan(layer, x, w)[0])


@pytest.mark.parametrize(
    ("loss", "w", "x"),
    [
        (dense, (6, 4), (8, 6)),
        (heads, (6, 2, 3), (4, 5, 6)),
        (experts, (2, 6, 4), (2, 5, 6)),
        (looped, (3, 6, 6), (8, 6)),
        (jax.checkpoint(dense), (6, 4), (8, 6)),
    ],
)
def test_gradients_of_weights_come_in_the_order_of_the_weights(
    loss: Callable[..., Any], w: tuple[int, ...], x: tuple[int, ...]
) -> None:
    traced = trace(jax.grad(loss), (A(w, jnp.float32), A(x, jnp.float32)), {})
    assert "transpose" not in primitives(traced)
    random = np.random.default_rng(0)
    given = [random.standard_normal(shape).astype(np.float32) for shape in (w, x)]
    (made,) = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *given)
    np.testing.assert_allclose(made, jax.grad(loss)(*given), rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_turned_twice_is_a_product_alone() -> None:
    """A tied embedding's, of its head: turned once, it was summed over devices apart from what is looked up."""
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(x @ w.T))

    traced = trace(jax.grad(loss), (A((5, 6), jnp.float32), A((8, 6), jnp.float32)), {})
    graph = traced.graph
    assert graph.ops[graph.producers()[graph.outputs[0]]].primitive == "dot_general"
    random = np.random.default_rng(0)
    given = [random.standard_normal(shape).astype(np.float32) for shape in ((5, 6), (8, 6))]
    (made,) = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *given)
    np.testing.assert_allclose(made, jax.grad(loss)(*given), rtol=1e-5, atol=1e-6)


def test_a_product_that_is_also_read_as_it_is_keeps_its_transposition() -> None:
    def step(a: Any, b: Any) -> Any:
        product = a @ b
        return jnp.sin(product.T), jnp.cos(product)

    assert "transpose" in primitives(trace(step, (A((4, 6), jnp.float32), A((6, 5), jnp.float32)), {}))


def test_a_returned_product_keeps_its_transposition() -> None:
    def step(a: Any, b: Any) -> Any:
        product = a @ b
        return product.T, product

    assert "transpose" in primitives(trace(step, (A((4, 6), jnp.float32), A((6, 5), jnp.float32)), {}))


def test_another_permutation_stays() -> None:
    def step(a: Any, b: Any) -> Any:
        return jnp.einsum("nab,nbc->nac", a, b).transpose(1, 0, 2)

    traced = trace(step, (A((2, 4, 6), jnp.float32), A((2, 6, 5), jnp.float32)), {})
    assert "transpose" in primitives(traced)


def test_precisions_go_with_their_operands() -> None:
    def step(a: Any, b: Any) -> Any:
        return jax.lax.dot(a, b, precision=("highest", "default")).T

    traced = trace(step, (A((4, 6), jnp.float32), A((6, 5), jnp.float32)), {})
    (product,) = traced.graph.ops
    assert [str(p) for p in product.params["precision"]] == ["DEFAULT", "HIGHEST"]
