"""What is copied because a collective goes along another dimension than the first (H100, jax 0.10.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.cost.gathered_orders import GatheredOrder, copied_bytes, gathered_orders
from jaxplan.ir import trace

AXES = (("data", 4), ("model", 2))
BF16 = jnp.bfloat16
X = jax.ShapeDtypeStruct((512, 64), BF16)
HEADS = jax.ShapeDtypeStruct((64, 3, 8, 16), BF16)
BYTES = 64 * 3 * 8 * 16 * 2


def orders(step: Callable[..., Any], *shapes: Any) -> dict[tuple[str, tuple[int, ...]], GatheredOrder]:
    """By operation and what it reads, of several the first."""
    graph = trace(step, shapes, {}).graph
    found: dict[tuple[str, tuple[int, ...]], GatheredOrder] = {}
    for (op, _), order in gathered_orders(graph, graph.producers()):
        found.setdefault((graph.ops[op].primitive, order.shape), order)
    return found


def copies(order: GatheredOrder, tail: list[int], head: list[int]) -> list[tuple[float, bool]]:
    found = copied_bytes(order, np.array([tail], np.int8), np.array([head], np.int8), AXES)
    return [(float(size[0, 0]), each) for size, each in found if size[0, 0] > 0]


def queries(x: Any, w: Any) -> Any:
    return jnp.einsum("td,dqhk->tqhk", x, w)


@pytest.mark.parametrize(("dim", "copied"), [(0, []), (1, [BYTES]), (2, [BYTES]), (3, [BYTES])])
def test_a_weight_is_transposed_where_its_heads_are_outermost(dim: int, copied: list[float]) -> None:
    order = orders(queries, X, HEADS)["dot_general", HEADS.shape]
    assert copies(order, [dim, dim], [-1, -1]) == [(size, True) for size in copied]


def test_a_product_reads_a_matrix_in_either_order() -> None:
    order = orders(jnp.matmul, X, jax.ShapeDtypeStruct((64, 256), BF16))["dot_general", (64, 256)]
    assert copies(order, [1, 1], [-1, -1]) == copies(order, [0, 0], [-1, -1]) == []


def test_between_two_gathers_is_a_transposition_of_what_the_first_has_gathered() -> None:
    order = orders(jnp.matmul, X, jax.ShapeDtypeStruct((64, 256), BF16))["dot_general", (64, 256)]
    assert copies(order, [0, 1], [-1, -1]) == [(64 * 256 * 2 / 2, True)]
    assert copies(order, [0, 1], [-1, 1]) == []


@pytest.mark.parametrize(("dim", "copied"), [(0, []), (2, [BYTES])])
def test_a_gradient_is_transposed_before_it_is_scattered_along_its_heads(dim: int, copied: list[float]) -> None:
    def step(x: Any, w: Any) -> Any:
        return w - jax.grad(lambda w: queries(x, w).sum())(w)

    order = orders(step, X, HEADS)["sub", HEADS.shape]
    assert copies(order, [-2, -2], [dim, dim]) == [(size, True) for size in copied]


def test_in_loops_stacks_are_transposed_all_at_once() -> None:
    """Weights in f32, of which each layer's is gathered in bf16 and kept so for the way back."""

    def step(layers: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> tuple[Any, None]:
            return jnp.tanh(x @ w.astype(BF16)), None

        return jax.grad(lambda layers: jax.lax.scan(layer, x, layers)[0].astype(jnp.float32).sum())(layers)

    found = orders(step, jax.ShapeDtypeStruct((4, 64, 64), jnp.float32), X)
    read, kept = found["dot_general", (64, 64)], found["scan_stack", (64, 64)]
    matrix = 64 * 64
    assert copies(read.beside(kept), [1, 1], [-1, -1]) == [(2 * matrix, False), (4 * matrix / 8, False)]
    assert copies(read.beside(kept), [0, 0], [-1, -1]) == []
