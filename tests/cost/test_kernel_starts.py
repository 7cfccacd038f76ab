"""Starts of a GPU's kernels: as many as elementwise work is compiled to, each as short as kernels get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxplan.cost import traffic
from jaxplan.ir import trace
from jaxplan.sharding import graph_rules

STEPS = 16


def starts(fn: Callable[..., Any], *shapes: Any, platform: str = "gpu") -> float:
    """Of all runs of a step's elementwise kernels."""
    graph = trace(fn, shapes, {}).graph
    crossing = traffic(graph, graph_rules(graph), platform)
    return sum(share * op.trips for share, op in zip(crossing.starts, graph.ops, strict=bool(crossing.starts)))


X = jax.ShapeDtypeStruct((64, 128), jnp.float32)


def momentum(x: Any, y: Any) -> Any:
    m = 0.9 * x + y
    return x - 0.1 * m, m, x + y


def beside_a_sum(x: Any, y: Any) -> Any:
    return x * y, jnp.sum(x * y, axis=1)


def twice_around_a_product(x: Any, y: Any) -> Any:
    return jnp.tanh((x + y) @ y.T)


@pytest.mark.parametrize(
    ("step", "kernels"),
    [(momentum, 1), (beside_a_sum, 0), (twice_around_a_product, 2)],
    ids=["momentum", "beside a sum", "around a product"],
)
def test_what_is_computed_together_starts_once(step: Any, kernels: int) -> None:
    assert starts(step, X, X) == pytest.approx(kernels)


def test_a_loop_starts_its_kernels_every_time() -> None:
    """Each iteration writes its next carry and two stacks, and counts itself."""

    def step(x: Any, w: Any) -> Any:
        def body(h: Any, _: Any) -> Any:
            h = jnp.tanh(h @ w)
            return h, (h, h * 2)

        return lax.scan(body, x, None, length=STEPS)

    square = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    assert starts(step, X, square) == pytest.approx(4 * STEPS)
    assert starts(step, X, square, platform="tpu") == 0
