"""Kernels for which a tile of up to 8 x 128 elements counts, not its bytes: compiled by `run.py`, priced by a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def _update(
    weight: jax.Array, first: jax.Array, second: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    step = weight - first * 0.1 / (jnp.sqrt(second) + 1e-8)
    return step, first * 0.9 + gradient * 0.1, second * 0.99 + gradient * gradient * 0.01


# Name -> function, and how many operands it has.
VECTOR_KERNELS: dict[str, tuple[Callable[..., Any], int]] = {
    "scale": (lambda x: x * 2, 1),
    "add": (lambda x, y: x + y, 2),
    "tanh": (jnp.tanh, 1),
    "convert": (lambda x: x.astype(jnp.float32 if x.dtype == jnp.bfloat16 else jnp.bfloat16), 1),
    "update": (_update, 4),
}
