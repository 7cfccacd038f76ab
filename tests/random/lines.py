"""One line of a random program: an operation, its operands and parameters drawn to fit.

Reals stay within a few units of 0 through every line, so that rounding stays far below what is compared; whole numbers
wrap around, and compare exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .dimensions import algebra, convolution, product, random_numbers, reduction, window
from .moves import broadcast, lookup, moving, part, reshape, transpose
from .values import MOST, Scope, Type, fitted, is_int, is_real, number

Add = Callable[[Scope], bool]
"""Draws a line and adds it; False where nothing fits."""

SMOOTH = {
    "sin": jnp.sin,
    "tanh": jnp.tanh,
    "erf": jax.scipy.special.erf,
    "x * exp(-x * x)": lambda x: x * jnp.exp(-x * x),
    "sqrt(1 + x * x)": lambda x: jnp.sqrt(1 + x * x),
    "log1p(x * x)": lambda x: jnp.log1p(x * x),
    "1 / (2 + x * x)": lambda x: 1 / (2 + x * x),
    "logistic": jax.nn.sigmoid,
    "tanh(x) ** 3": lambda x: jnp.tanh(x) ** 3,
    "x / 2": lambda x: x / 2,
    "softmax": lambda x: jax.nn.softmax(x, -1) if x.ndim else x,
    "stop_gradient": lax.stop_gradient,
    "rsqrt(1 + x.mean(0))": lambda x: lax.rsqrt(1.5 + jnp.tanh(x.mean(0, keepdims=True))) if x.ndim else x,
}
WHOLE = {
    "x * 3 + 1": lambda x: x * 3 + 1,
    "x % 7": lambda x: x % 7,
    "-x": lambda x: -x,
    "~x": lambda x: ~x,
    "abs": jnp.abs,
    "x * x": lambda x: x * x,
    "population_count": lax.population_count,
    "clz": lax.clz,
    "x << 2": lambda x: x << 2,
    "x >> 1": lambda x: x >> 1,
    "clip": lambda x: jnp.clip(x, 1, 5),
    "int8 and back": lambda x: x.astype(jnp.int8).astype(x.dtype),
    "float32 and back": lambda x: jnp.floor((x % 64).astype(jnp.float32) * 1.5).astype(x.dtype),
    "bytes": lambda x: lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.int32),
    "x > 2": lambda x: (x > 2).astype(x.dtype),
}


def unary(s: Scope) -> bool:
    i = s.value(is_real)
    if i is None or (not s.smooth and s.flip()):
        j = None if s.smooth else s.value(is_int)
        if j is not None:
            name = s.choose(sorted(WHOLE))
            return s.add(name, WHOLE[name], j)
    if i is None:
        return False
    name = s.choose(sorted(SMOOTH))
    return s.add(name, SMOOTH[name], i)


def binary(s: Scope) -> bool:
    i = number(s)
    if i is None:
        return False
    a = s.types[i]

    def goes(t: Any) -> bool:
        try:
            return t.dtype == a.dtype and math.prod(np.broadcast_shapes(t.shape, a.shape)) <= MOST
        except ValueError:
            return False

    j = s.value(goes)
    assert j is not None
    real = {"x + y": lambda x, y: (x + y) / 2, "x * y": lambda x, y: jnp.tanh(x) * y, "x - y": lambda x, y: (x - y) / 2,
            "x / (2 + y * y)": lambda x, y: x / (2 + y * y)}  # fmt: skip
    whole = {"x + y": jnp.add, "x * y": jnp.multiply, "x - y": jnp.subtract, "max": jnp.maximum, "min": jnp.minimum,
             "x ^ y": jnp.bitwise_xor, "x & y": jnp.bitwise_and, "x // y": lambda x, y: x // (jnp.abs(y) % 5 + 1),
             "where(x < y, x, 3 * y)": lambda x, y: jnp.where(x < y, x, 3 * y)}  # fmt: skip
    table = real if is_real(a) else whole
    name = s.choose(sorted(table))
    return s.add(name, table[name], i, j)


def mixed(s: Scope) -> bool:
    """A real value chosen by a whole one."""
    i, j = s.value(is_real), s.value(is_int)
    if i is None or j is None:
        return False
    a = s.types[i]
    chooser = Type(a.shape, jnp.int32)
    return s.add(
        "where(y % 2, x / 2, x)", lambda x, y: jnp.where(fitted(y, chooser) % 2 == 0, x, x / 2), i, j
    )


LEAVES: tuple[Add, ...] = (
    unary, unary, binary, binary, mixed, reshape, reshape, transpose, broadcast, part, moving, lookup, lookup,
    reduction, reduction, product, product, convolution, window, algebra, random_numbers,
)  # fmt: skip
