"""The problem's memory rows beside the simulation of the whole step: what a budget forbids is what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxplan.api import Found, Pipeline
from jaxplan.ir import trace

BF16, F32 = jnp.bfloat16, jnp.float32


def grouped_attention(weights: Any, batch: Any) -> Any:
    """Its softmax is converted once for each product that reads it."""

    def loss(weights: Any) -> Any:
        x = batch["x"]
        for weight in weights:
            q = jnp.einsum("btd,dkgh->btkgh", x, weight)
            scores = jnp.einsum("btkgh,bskh->bkgts", q, batch["k"], preferred_element_type=F32)
            made = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores).astype(BF16), batch["k"] * jnp.mean(weight))
            x = jnp.einsum("btkgh,dkgh->btd", made, weight)
        return jnp.mean(x.astype(F32) ** 2)

    return jax.tree.map(jnp.subtract, weights, jax.grad(loss)(weights))


def separate_projections(weights: Any, batch: Any) -> Any:
    """Queries, keys and values are one product on GPU, kept for the keys."""

    def loss(weights: Any) -> Any:
        x = batch
        for weight in weights:
            q, k, v = (jnp.einsum("btd,dhk->bthk", x, weight[name]) for name in "qkv")
            scores = jnp.einsum("bthk,bshk->bhts", q, k).astype(F32)
            made = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores).astype(BF16), v)
            x = x + jnp.einsum("bthk,dhk->btd", made, weight["o"])
        return jnp.mean(x.astype(F32) ** 2)

    return jax.tree.map(jnp.subtract, weights, jax.grad(loss)(weights))


def two_recurrences(weights: Any, batch: Any) -> Any:
    """The stacks of both loops are filled before the first."""

    def loss(weights: Any) -> Any:
        x = batch
        for weight in weights:
            x = jax.lax.scan(lambda h, row, w=weight: (jnp.tanh(h @ w + row),) * 2, jnp.zeros(x.shape[1:]), x)[1]
        return jnp.mean(x**2)

    return jax.tree.map(jnp.subtract, weights, jax.grad(loss)(weights))


def pooled(weight: Any, images: Any) -> Any:
    """The gradient of a max-pooling finds the place of every largest element."""

    def loss(weight: Any) -> Any:
        made = jax.lax.conv_general_dilated(images, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        windows = jax.lax.reduce_window(jnp.exp(made), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jnp.mean(windows**2)

    return weight - jax.grad(loss)(weight)


def of(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("step", "shapes", "hardware"),
    [
        (grouped_attention, ([of(128, 4, 8, 64, dtype=BF16)] * 3,
                             {"x": of(8, 512, 128, dtype=BF16), "k": of(8, 512, 4, 64, dtype=BF16)}), "h100"),
        (separate_projections,
         ([{n: of(256, 8, 64, dtype=BF16) for n in "qkvo"}] * 4, of(512, 128, 256, dtype=BF16)), "h100"),
        (separate_projections,
         ([{n: of(256, 8, 64, dtype=BF16) for n in "qkvo"}] * 4, of(32, 1024, 256, dtype=BF16)), "tpu-v5p"),
        (two_recurrences, ((of(256, 256), of(256, 256)), of(64, 512, 256)), "h100"),
        (pooled, (of(3, 3, 16, 32), of(32, 64, 64, 16)), "h100"),
    ],
)  # fmt: skip
def test_rows_count_what_the_simulation_counts(
    step: Any, shapes: Any, hardware: str, planner_for: Callable[..., Pipeline]
) -> None:
    planner = planner_for(trace(step, shapes, {}, donate_argnums=(0,)), (4, 2), hardware)
    found = planner.search({})
    assert isinstance(found, Found)
    assert found.result.peak_bytes == pytest.approx(found.memory.peak_bytes, rel=0.03)
