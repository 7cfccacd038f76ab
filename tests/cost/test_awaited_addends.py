"""Sums of what products make: what waits for the last one's kernel on TPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxplan
from jaxplan import ShardedStep
from jaxplan.hardware import load_profile
from jaxplan.lowering import compiled_memory

DEVICES, SIDE, WIDTH = 8, 128, 256
ONE = 8 * SIDE * SIDE * WIDTH * 2  # bytes of an image's batch on a device

Product = Callable[[jax.Array, jax.Array], jax.Array]
Form = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
FORMS: dict[str, Form] = {
    "added to something else": lambda other, first, second, third: (other + first) + second,
    "three and something else": lambda other, first, second, third: ((other + first) + second) + third,
    "multiplied": lambda other, first, second, third: (first * second) + third,
}


def convolved(image: jax.Array, weight: jax.Array) -> jax.Array:
    dimensions = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(image, weight, (1, 1), "SAME", dimension_numbers=dimensions)


def multiplied(image: jax.Array, weight: jax.Array) -> jax.Array:
    return image @ weight[0, 0]


def summed(form: Form, product: Product, size: int = 1) -> tuple[ShardedStep, list[Any]]:
    def step(weights: list[jax.Array], images: jax.Array) -> jax.Array:
        rest = iter(w.astype(jnp.bfloat16) for w in weights)
        hidden = jnp.tanh(product(images.astype(jnp.bfloat16), next(rest)))
        addends = [jnp.exp(product(hidden, next(rest)))]
        for _ in range(3):
            hidden = jnp.tanh(product(hidden, next(rest)))
            addends.append(product(hidden, next(rest)))
        last = product(jnp.tanh(form(*addends)), next(rest))
        return jnp.mean(product(last, next(rest)).astype(jnp.float32) ** 2)

    weights = [jax.ShapeDtypeStruct((size, size, WIDTH, WIDTH), jnp.float32)] * 10
    images = jax.ShapeDtypeStruct((8 * DEVICES, SIDE, SIDE, WIDTH), jnp.float32)
    mesh = jaxplan.target("tpu-v5e:2x4").mesh(data=DEVICES)
    options = {"search": "data", "compare_templates": False}
    return jaxplan.auto_shard(step, mesh, hardware=load_profile("tpu-v5e"), options=options), [weights, images]


@pytest.mark.parametrize("form", FORMS)
def test_convolutions_wait_for_the_last_of_a_sum_and_products_of_matrices_do_not(form: str) -> None:
    peaks = []
    for product in (multiplied, convolved):
        sharded, shapes = summed(FORMS[form], product)
        cost = sharded.plan(*shapes).cost
        assert cost is not None
        peaks.append(cost.peak_bytes)
    waiting = {"three and something else": 3}.get(form, 2)
    assert peaks[1] - peaks[0] == pytest.approx(waiting * ONE, rel=0.05)


@pytest.mark.aot_tpu
@pytest.mark.parametrize(("product", "size"), [(multiplied, 1), (convolved, 3)])
def test_as_much_is_compiled(product: Product, size: int) -> None:
    sharded, shapes = summed(FORMS["three and something else"], product, size)
    cost = sharded.plan(*shapes).cost
    assert cost is not None
    compiled = compiled_memory(sharded.lower(*shapes).compile())
    assert cost.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.02)


def _step(count: int, dtype: Any) -> tuple[Callable[..., Any], list[Any]]:
    def loss(weights: dict[str, Any], images: jax.Array) -> jax.Array:
        hidden = jnp.tanh(convolved(images.astype(dtype), weights["in"].astype(dtype)))
        branches = [jnp.tanh(convolved(hidden, w.astype(dtype))) for w in weights["branches"]]
        out = convolved(jnp.concatenate(branches, -1), weights["out"].astype(dtype))
        return jnp.mean(out.astype(jnp.float32) ** 2)

    def step(weights: dict[str, Any], images: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, jax.grad(loss)(weights, images))

    def shaped(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    branches = [shaped(1, 1, WIDTH, 64)] * count
    weights = {"in": shaped(1, 1, WIDTH, WIDTH), "branches": branches, "out": shaped(1, 1, 64 * count, 64)}
    return step, [weights, shaped(8 * DEVICES, 64, 64, WIDTH)]


@pytest.mark.aot_tpu
def test_the_gradients_of_what_eight_convolutions_read_are_all_in_memory() -> None:
    step, shapes = _step(8, jnp.float32)
    mesh = jaxplan.target("tpu-v5e:2x4").mesh(data=DEVICES)
    options = {"search": "data", "compare_templates": False}
    sharded = jaxplan.auto_shard(step, mesh, hardware=load_profile("tpu-v5e"), donate_argnums=(0,), options=options)
    cost = sharded.plan(*shapes).cost
    assert cost is not None
    compiled = compiled_memory(sharded.lower(*shapes).compile())
    assert 0.95 < cost.peak_bytes / compiled.peak_bytes < 1.15
