"""Lines that compute along whole dimensions: reductions, products, windows, decompositions, random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax

from .moves import index
from .values import Scope, is_int, is_key, is_real, number


def reduction(s: Scope) -> bool:
    i = s.value(lambda t: t.ndim > 0 and (is_real(t) or (is_int(t) and not s.smooth)))
    if i is None:
        return False
    rank = s.types[i].ndim
    axes = tuple(sorted(s.draw(st.sets(st.integers(0, rank - 1), min_size=1))))
    d = axes[0]
    kinds: dict[str, Callable[[Any], Any]] = {}
    if is_real(s.types[i]):
        n = s.types[i].shape[d]
        kinds |= {
            f"mean {axes}": lambda x: x.mean(axes),
            f"var {axes}": lambda x: x.var(axes, keepdims=True),
            f"logsumexp {axes}": lambda x: jax.nn.logsumexp(x, axes),
            f"cumsum {d}": lambda x: lax.cumsum(x, d) / n,
            f"cumlogsumexp {d}": lambda x: lax.cumlogsumexp(x, d, reverse=True) / n,
            f"cumprod {d}": lambda x: lax.cumprod(jnp.tanh(x), d),
        }
    if not s.smooth:
        kinds |= {
            f"max {axes}": lambda x: x.max(axes),
            f"min {axes}": lambda x: x.min(axes, keepdims=True),
            f"sort {d}": lambda x: jnp.sort(x, d),
            f"cummax {d}": lambda x: lax.cummax(x, d),
            "top_k": lambda x: lax.top_k(x, min(2, x.shape[-1]))[0],
        }
    if is_int(s.types[i]):
        kinds |= {
            f"sum {axes}": lambda x: x.sum(axes, dtype=x.dtype),
            f"prod {axes}": lambda x: x.prod(axes, dtype=x.dtype),
            f"any {axes}": lambda x: (x % 3 == 0).any(axes).astype(x.dtype),
            f"all {axes}": lambda x: (x % 3 != 0).all(axes).astype(x.dtype),
            f"xor {axes}": lambda x: lax.reduce_xor(x, axes),
            f"argmax {d}": lambda x: jnp.argmax(x, d).astype(jnp.int32),
            f"argsort {d}": lambda x: jnp.argsort(x, d, stable=True).astype(jnp.int32),
            f"cumsum {d}": lambda x: lax.cumsum(x, d, reverse=True),
            f"cumprod {d}": lambda x: lax.cumprod(x, d),
            "top_k, places": lambda x: lax.top_k(x, 1)[1].astype(jnp.int32),
            f"sorted by {d}": lambda x: lax.sort((x % 4, x), dimension=d, num_keys=1, is_stable=True)[1],
        }
    name = s.choose(sorted(kinds))
    return s.add(name, kinds[name], i)


def product(s: Scope) -> bool:
    """dot_general with any dimensions contracted and batched."""
    i = number(s)
    if i is None:
        return False
    a = s.types[i]
    j = s.value(lambda t: t.dtype == a.dtype)
    assert j is not None
    b, mine, theirs, contract, batch = s.types[j], set(range(a.ndim)), set(range(s.types[j].ndim)), [], []
    for d in range(a.ndim):
        pairs = [e for e in sorted(theirs) if b.shape[e] == a.shape[d]]
        if pairs and s.integer(0, 3):
            e = s.choose(pairs)
            (contract if s.integer(0, 2) else batch).append((d, e))
            theirs.discard(e)
            mine.discard(d)
    numbers = tuple(tuple(tuple(p[side] for p in pairs) for side in (0, 1)) for pairs in (contract, batch))
    scale = math.prod(a.shape[d] for d, _ in contract)
    return s.add(
        f"dot_general{numbers}",
        lambda x, y: lax.dot_general(x, y, numbers) / scale if is_real(a) else lax.dot_general(x, y, numbers), i, j,
    )  # fmt: skip


def convolution(s: Scope) -> bool:
    i = s.value(lambda t: t.ndim in (3, 4) and (is_real(t) or (t.dtype == jnp.int32 and not s.smooth)))
    if i is None:
        return False
    a = s.types[i]
    j = s.value(lambda t: t.dtype == a.dtype)
    assert j is not None
    space = a.ndim - 2
    groups = s.choose([g for g in (1, 2, a.shape[-1]) if a.shape[-1] % g == 0])
    made = groups * s.choose([1, 2])
    kernel = (*[s.choose([1, 2, 3])] * space, a.shape[-1] // groups, made)
    strides, dilation = (s.choose([1, 2]),) * space, (s.choose([1, 1, 2]),) * space
    numbers = (("NWC", "WIO", "NWC"), ("NHWC", "HWIO", "NHWC"))[space - 1]
    scale = math.prod(kernel[:-1])
    padding = [(s.integer(0, 2), s.integer(0, 2))] * space

    def fn(x: Any, y: Any) -> Any:
        out = lax.conv_general_dilated(x, jnp.resize(y, kernel), strides, padding, lhs_dilation=dilation,
                                       dimension_numbers=numbers, feature_group_count=groups)  # fmt: skip
        return out / scale if is_real(a) else out

    return s.add(f"conv, kernel {kernel}, strides {strides}, dilated {dilation}, {groups} groups", fn, i, j)


def window(s: Scope) -> bool:
    i = s.value(lambda t: t.ndim > 1 and (is_real(t) or (t.dtype == jnp.int32 and not s.smooth)))
    if i is None:
        return False
    rank = s.types[i].ndim
    size = tuple(s.choose([1, 1, 2, 3]) for _ in range(rank))
    strides = tuple(s.choose([1, 2]) if n > 1 else 1 for n in size)
    padding = s.choose(["SAME", "VALID"])
    real = is_real(s.types[i])

    def fn(x: Any) -> Any:
        if real:
            return lax.reduce_window(x, 0.0, lax.add, size, strides, padding) / math.prod(size)
        return lax.reduce_window(x, jnp.int32(-(2**31)), lax.max, size, strides, padding)

    return s.add(f"window {size} by {strides} {padding}", fn, i)


def algebra(s: Scope) -> bool:
    i = s.value(lambda t: t.ndim > 1 and is_real(t) and t.shape[-1] <= 16)
    if i is None:
        return False

    def positive(x: Any) -> Any:
        return x @ x.mT / x.shape[-1] + 2 * jnp.eye(x.shape[-2], dtype=x.dtype)

    kinds: dict[str, Callable[[Any], Any]] = {
        "cholesky": lambda x: jnp.linalg.cholesky(positive(x)),
        "solve": lambda x: jnp.linalg.solve(positive(x), x),
        "triangular_solve": lambda x: lax.linalg.triangular_solve(
            jnp.linalg.cholesky(positive(x)), x, left_side=True, lower=True),
        "fft": lambda x: jnp.abs(jnp.fft.fft(x)[..., :1] * 0.1) ** 2 if s.smooth else jnp.fft.rfft(x).real * 0.1,
        "qr": lambda x: jnp.linalg.qr(positive(x))[0] ** 2,
    }  # fmt: skip
    name = s.choose(sorted(kinds))
    return s.add(name, kinds[name], i)


def random_numbers(s: Scope) -> bool:
    keys = [i for i, t in enumerate(s.types) if is_key(t) and t.ndim == 0]
    j = s.value(is_int)
    if not keys or j is None or s.smooth:
        return False
    i = s.choose(keys)
    shape = tuple(s.choose([1, 2, 3, 4, 8]) for _ in range(s.integer(0, 3)))
    kinds: dict[str, Callable[..., Any]] = {
        f"uniform{shape}": lambda k, y: jax.random.uniform(k, shape, jnp.float32).astype(float),
        f"bits{shape}": lambda k, y: jax.random.bits(k, shape, jnp.uint32).astype(jnp.int32),
        "split": lambda k, y: jax.random.split(k)[0],
        "fold_in": lambda k, y: jax.random.fold_in(k, index(y)),
        f"many{shape}": lambda k, y: jax.vmap(lambda q: jax.random.randint(q, shape, 0, 9, jnp.int32))(
            jax.random.split(k, 4)),
        "permutation": lambda k, y: jax.random.permutation(k, 12).astype(jnp.int32),
    }  # fmt: skip
    name = s.choose(sorted(kinds))
    return s.add(name, kinds[name], i, j)
