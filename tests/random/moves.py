"""Lines that move elements: shapes, slices, lookups by index."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax

from .values import MOST, Scope, is_int, is_real


def _prime_factors(n: int) -> list[int]:
    found, f = [], 2
    while n > 1:
        while n % f == 0:
            found.append(f)
            n //= f
        f += 1
    return found


def reshape(s: Scope) -> bool:
    i = s.value()
    if i is None:
        return False
    factors = s.draw(st.permutations(_prime_factors(math.prod(s.types[i].shape)))) or [1]
    shape: list[int] = []
    for f in factors:
        if shape and (s.flip() or len(shape) == 4):
            shape[-1] *= f
        else:
            shape.append(f)
    if len(shape) < 4 and s.integer(0, 3) == 0:
        shape.insert(s.integer(0, len(shape)), 1)
    return s.add(f"reshape({shape})", lambda x: x.reshape(shape), i)


def transpose(s: Scope) -> bool:
    i = s.value(lambda t: t.ndim > 1)
    if i is None:
        return False
    order = s.draw(st.permutations(range(s.types[i].ndim)))
    return s.add(f"transpose({order})", lambda x: jnp.transpose(x, order), i)


def broadcast(s: Scope) -> bool:
    i = s.value(lambda t: t.ndim < 4 and t.size <= MOST // 2)
    if i is None:
        return False
    d, n = s.integer(0, s.types[i].ndim), s.choose([1, 2, 3, 4, 8])
    return s.add(f"broadcast(new dim {d} of {n})", lambda x: jnp.repeat(jnp.expand_dims(x, d), n, d) if n % 2 else
                 jnp.broadcast_to(jnp.expand_dims(x, d), (*x.shape[:d], n, *x.shape[d:])), i)  # fmt: skip


def with_dim(s: Scope, least: int = 2) -> tuple[int, int, int] | None:
    """(value, dimension, extent) with an extent of at least `least`."""
    i = s.value(lambda t: any(n >= least for n in t.shape))
    if i is None:
        return None
    d = s.choose([d for d, n in enumerate(s.types[i].shape) if n >= least])
    return i, d, s.types[i].shape[d]


def part(s: Scope) -> bool:
    """Slices, pads, rolls, and other moves along one dimension."""
    found = with_dim(s)
    if found is None:
        return False
    i, d, n = found
    a, b = sorted((s.integer(0, n - 1), s.integer(1, n)))
    step = s.integer(1, 2)
    b = max(b, a + 1)
    config = [(0, 0, 0)] * s.types[i].ndim
    config[d] = (s.integer(-1, 2), s.integer(-1, 2), s.integer(0, 1))
    kinds: dict[str, Callable[[Any], Any]] = {
        f"slice {d}:{a}:{b}:{step}": lambda x: lax.slice_in_dim(x, a, b, step, d),
        f"pad {config}": lambda x: lax.pad(x, jnp.zeros((), x.dtype), config),
        f"roll {d} by {a}": lambda x: jnp.roll(x, a, d),
        f"rev {d}": lambda x: lax.rev(x, (d,)),
        f"tile {d}": lambda x: jnp.concatenate([x, x[::-1]], d),
        f"tiles {d}": lambda x: jnp.tile(x, [3 if k == d else 1 for k in range(x.ndim)]),
        f"split {d} at {a}": lambda x: [p for p in jnp.split(x, [a], d) if p.size],
        f"split {d} in two": lambda x: jnp.split(x, 2, d) if n % 2 == 0 else [x],
        f"unstack {d}": lambda x: [jnp.stack([x, x], d), lax.index_in_dim(x, a % n, d, keepdims=False)],
        f"diff {d}": lambda x: jnp.diff(x, axis=d),
    }
    name = s.choose(list(kinds))
    return s.add(name, kinds[name], i)


def moving(s: Scope) -> bool:
    """Slices whose start is known at run time only."""
    found = with_dim(s)
    j = s.value(is_int)
    if found is None or j is None:
        return False
    i, d, n = found
    width = s.integer(1, n)
    kinds: dict[str, Callable[[Any, Any], Any]] = {
        f"dynamic_slice {d}:{width}": lambda x, y: lax.dynamic_slice_in_dim(x, index(y), width, d),
        f"dynamic_index {d}": lambda x, y: lax.dynamic_index_in_dim(x, index(y), d, keepdims=False),
        f"dynamic_update {d}:{width}": lambda x, y: lax.dynamic_update_slice_in_dim(
            x, lax.slice_in_dim(x, 0, width, 1, d), index(y), d),
        f"roll {d}": lambda x, y: jnp.roll(x, index(y), d),
    }  # fmt: skip
    name = s.choose(list(kinds))
    return s.add(name, kinds[name], i, j)


def index(y: Any) -> Any:
    return y.reshape(-1)[0].astype(jnp.int32) % 5


# -- indexing -------------------------------------------------------------------------------------------------


def lookup(s: Scope) -> bool:
    """Gathers and scatters by an array of indices."""
    found = with_dim(s)
    j = s.value(lambda t: is_int(t) and t.ndim > 0 and t.size <= 64)
    if found is None or j is None:
        return False
    i, d, n = found
    real, mode = is_real(s.types[i]), s.choose(["clip", "fill", "promise_in_bounds"])

    def at(y: Any) -> Any:
        # beyond the end for "fill" and "clip" too
        return (y.astype(jnp.int32) % (n if mode == "promise_in_bounds" else n + 1)).reshape(-1)

    def updates(x: Any, y: Any) -> Any:
        some = jnp.moveaxis(jnp.take(x, at(y) // 2, d, mode="clip"), d, 0)
        return some / 2 if real else some + 1

    def rows(x: Any) -> Any:
        return jnp.moveaxis(x, d, 0)

    kinds: dict[str, Callable[[Any, Any], Any]] = {
        f"take {d}, {mode}": lambda x, y: jnp.take(x, at(y), d, mode=mode, fill_value=0),
        f"add at {d}, {mode}": lambda x, y: rows(x).at[at(y)].add(
            updates(x, y) / 8 if real else updates(x, y), mode=mode),
        f"segment_sum {d}": lambda x, y: jax.ops.segment_sum(
            rows(x) / (8 if real else 1), jnp.resize(at(y), n), 6).astype(x.dtype),
        f"one_hot {n}": lambda x, y: jax.nn.one_hot(at(y), n, dtype=x.dtype) + rows(x).reshape(n, -1)[:, 0],
        f"take_along {d}": lambda x, y: jnp.take_along_axis(x, jnp.resize(at(y) % n, x.shape), d),
    }  # fmt: skip
    if not s.smooth:
        kinds |= {
            f"min at {d}": lambda x, y: rows(x).at[at(y)].min(updates(x, y), mode=mode),
            f"max at {d}": lambda x, y: rows(x).at[at(y)].max(updates(x, y), mode=mode),
            f"multiply at {d}": lambda x, y: rows(x).at[at(y)].multiply(updates(x, y), mode=mode),
            f"set at {d}": lambda x, y: rows(x).at[jnp.argsort(jnp.resize(at(y), n), stable=True)[: n // 2]].set(7),
        }  # fmt: skip
    name = s.choose(sorted(kinds))
    return s.add(name, kinds[name], i, j)
