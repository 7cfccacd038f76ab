"""Products too large for vector memory: in which windows the compiler makes them, and what it expects those to take."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

# What is summed, rows, columns, the operands' types, and how many f32 arrays of its result's shape the product updates.
PRODUCTS = (
    (8192, 8192, 8192, "bfloat16", "bfloat16", 3),
    (8192, 16384, 8192, "float32", "bfloat16", 3),
    (8192, 8192, 16384, "float32", "float32", 3),
    (16384, 8192, 8192, "bfloat16", "bfloat16", 2),
    (8192, 8192, 16384, "float32", "bfloat16", 2),
    (16384, 8192, 8192, "float32", "float32", 1),
    (8192, 16384, 8192, "float32", "bfloat16", 1),
    (8192, 8192, 16384, "float32", "float32", 0),
    (8192, 16384, 8192, "float32", "bfloat16", 0),
)


def _step(state: list[jax.Array], x: jax.Array, y: jax.Array) -> list[jax.Array]:
    x, y = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
    gradient = jax.lax.dot_general(x, y, (((0,), (0,)), ((), ()))).astype(jnp.float32)
    moments = [0.9 * moment + 0.1 * gradient for moment in state[1:]]
    return [state[0] - 0.1 * sum(moments, gradient), *moments] if state else [gradient]


def windows(sharding: jax.sharding.Sharding, clock_hz: float) -> Iterator[dict[str, Any]]:
    """Of each product in how many windows it is made, their bytes, and the rate at which they are read and written.

    A window of the result is the sum of products of windows of the operands, which are read once for every column of
    result windows and once for every row.  What is summed in one window is left out: one operand is read but once then.
    """

    def argument(shape: tuple[int, int], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    placed = jax.jit(_step, donate_argnums=0, out_shardings=sharding)
    for product in PRODUCTS:
        summed, rows, columns, left, right, count = product
        state = [argument((rows, columns), "float32")] * count
        lowered = placed.lower(state, argument((summed, rows), left), argument((summed, columns), right))
        text = lowered.compile().as_text()
        (kernel,) = (line for line in text.splitlines() if "kind=kOutput" in line and "estimated_cycles" in line)
        (bounds,) = re.findall(r'"iteration_bounds":\["(\d+)","(\d+)","(\d+)"\]', kernel)
        across, down, deep = map(int, bounds)
        if deep == 1:
            continue
        seconds = int(re.findall(r'"estimated_cycles":"(\d+)"', kernel)[0]) / clock_hz
        element_bytes = 4 * max(2 * count, 1)
        read = summed * (rows * across * jnp.dtype(left).itemsize + columns * down * jnp.dtype(right).itemsize)
        yield {
            "product": list(product),
            "windows": [down, across],
            # each twice, to be read and written while the other one is computed with, and the f32 sum
            "window_bytes": round((2 * element_bytes + 4) * rows * columns / (down * across)),
            "bytes_per_s": float(f"{(read + element_bytes * rows * columns) / seconds:.3g}"),
        }
