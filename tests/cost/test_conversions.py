"""What XLA for TPU converts in a kernel of its own because the result is moved (v5e, jax 0.10.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.cost import CostModel, traffic, turnings
from jaxplan.cost.turned import Turning, together
from jaxplan.hardware import axis_links, load_profile
from jaxplan.ir import trace
from jaxplan.sharding import NONE, graph_rules

AXES = (("data", 8),)
X, W = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 8192), jnp.float32)


def product(x: Any, w: Any) -> Any:
    return x @ w.astype(jnp.bfloat16)


def moves(fn: Callable[..., Any], *shapes: Any, platform: str = "tpu") -> dict[tuple[int, int], Turning]:
    graph = trace(fn, shapes, {}).graph
    crossing = traffic(graph, graph_rules(graph), platform)
    return turnings(graph, crossing.updates, crossing.conversions)[0]


def seconds(turning: Turning, made: int, wanted: int) -> float:
    profile = load_profile("tpu-v5e")
    model = CostModel(profile=profile, axes=AXES, links=(axis_links(profile, AXES)["data"],))
    return float(model.turned_seconds(turning, np.array([[made]], np.int8), np.array([[wanted]], np.int8))[0, 0])


def test_a_weight_that_is_gathered_in_bf16_is_converted_first() -> None:
    """The compiler expects 84 us for a device's f32[4096, 1024], 673 us for whole f32[8192, 4096] that are cut."""
    (turning,) = moves(product, X, W).values()
    assert seconds(turning, 1, NONE) == pytest.approx(84e-6, rel=0.3)
    assert seconds(turning, NONE, 1) == pytest.approx(673e-6, rel=0.3)


def test_what_is_read_where_it_lies_is_converted_as_it_is_read() -> None:
    (turning,) = moves(product, X, W).values()
    assert seconds(turning, 1, 1) == seconds(turning, NONE, NONE) == 0


def test_what_several_products_read_is_converted_once() -> None:
    def twice(x: Any, w: Any) -> Any:
        half = w.astype(jnp.bfloat16)
        return jnp.tanh(x @ half) @ half.T

    found = moves(twice, X, W)
    both = together(found.values())
    assert both is not None
    assert seconds(both, 1, NONE) == seconds(next(iter(found.values())), 1, NONE) > 0


def test_what_is_no_argument_or_needs_no_conversion_is_in_memory_anyway() -> None:
    assert moves(lambda x, w: x @ w, X, jax.ShapeDtypeStruct(W.shape, jnp.bfloat16)) == {}
    assert moves(lambda x, w: x @ jnp.tanh(w).astype(jnp.bfloat16), X, W) == {}
    assert moves(product, X, W, platform="gpu") == {}
