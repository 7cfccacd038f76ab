"""Products of few summed elements on TPU: their f32 sums take time beside what is written, as XLA expects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxplan
from jaxplan.hardware import compile_for, load_profile
from jaxplan.lowering.hlo import estimated_cycles

N = 8192


def shape(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    return a @ b


def with_residual(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    return a @ b + c


def of_rows(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.max(a @ b, axis=1)


def batched(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum("bmk,bnk->bmn", a, b)


SIDES = shape(N, 128), shape(128, N)
F32 = shape(N, 128, dtype=jnp.float32), shape(128, N, dtype=jnp.float32)
CASES: dict[str, tuple[Callable[..., jax.Array], tuple[jax.ShapeDtypeStruct, ...], float]] = {
    "bf16": (product, SIDES, 0.1),
    "f32": (product, F32, 0.1),
    "bf16 with an argument": (with_residual, (*SIDES, shape(N, N)), 0.3),
    "f32 with an argument": (with_residual, (*F32, shape(N, N, dtype=jnp.float32)), 0.25),
    "rows' maxima": (of_rows, SIDES, 0.1),
    "of heads": (batched, (shape(128, 512, 128), shape(128, 512, 128)), 0.1),
    "long sums": (product, (shape(N, 1024), shape(1024, N)), 0.1),
}


@pytest.mark.aot_tpu
@pytest.mark.parametrize("name", CASES)
def test_sums_take_time_beside_what_is_written(name: str) -> None:
    step, shapes, error = CASES[name]
    mesh = jaxplan.target("tpu-v5e:1x1").mesh(data=1)
    sharded = jaxplan.auto_shard(step, mesh)
    cycles = estimated_cycles(compile_for(sharded.lower(*shapes), mesh).as_text())
    compiled_s = cycles / load_profile("tpu-v5e").clock_hz
    assert sharded.plan(*shapes).cost.compute_s == pytest.approx(compiled_s, rel=error)
