"""Small training steps, timed whole: what of its best rates a device keeps up in a program.

The rates of `measurements.py` are those of loops that do one thing in warm caches.  A step also transposes, copies,
starts kernels and touches memory for the first time, and its products are of many shapes.  How much of the rates is
left is a property of the machine and its compiler, and is measured as such, on two kinds of network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

State = dict[str, Any]

_LAYERS = 2
_HEAD_DIM = 64
_RATE, _DECAY = 1e-4, 0.9


@dataclass(frozen=True, kw_only=True)
class Step:
    """`run(state, batch) -> state`, a training step of one device, with arguments of its own making.

    Attributes:
      state: parameters and the two moments of each, float32.
    """

    run: Callable[[State, Any], State]
    state: State
    batch: Any


def steps(*, host: bool) -> Mapping[str, Step]:
    """By name; those of a host take some ten milliseconds a device, those of an accelerator some more."""
    if host:
        return {
            "transformer": _transformer(sequences=2, tokens=96, dim=192, words=768, dtype="float32"),
            "perceptron": _perceptron(rows=48, dims=(384, 768, 768, 32), dtype="float32"),
        }
    return {
        "transformer": _transformer(sequences=8, tokens=1024, dim=2048, words=16384, dtype="bfloat16"),
        "perceptron": _perceptron(rows=8192, dims=(4096, 8192, 8192, 1024), dtype="bfloat16"),
    }


def _perceptron(*, rows: int, dims: tuple[int, ...], dtype: str) -> Step:
    weights = {f"layer_{i}": _weight(*pair) for i, pair in enumerate(pairwise(dims))}

    def loss(weights: State, batch: Any) -> jax.Array:
        x, wanted = batch
        for i in range(len(dims) - 1):
            x = x.astype(dtype) @ weights[f"layer_{i}"].astype(dtype)
            x = jax.nn.relu(x) if i + 2 < len(dims) else x
        return jnp.mean((x.astype(jnp.float32) - wanted) ** 2)

    batch = (np.full((rows, dims[0]), 0.5, np.float32), np.zeros((rows, dims[-1]), np.float32))
    return _step(loss, weights, batch)


def _transformer(*, sequences: int, tokens: int, dim: int, words: int, dtype: str) -> Step:
    heads = dim // _HEAD_DIM
    weights: State = {"embedding": _weight(words, dim), "head": _weight(dim, words)}
    for i in range(_LAYERS):
        weights[f"layer_{i}"] = {
            "qkv": _weight(dim, 3, heads, _HEAD_DIM), "out": _weight(heads, _HEAD_DIM, dim),
            "up": _weight(dim, 4 * dim), "down": _weight(4 * dim, dim),
            "scale": np.ones((2, dim), np.float32),
        }  # fmt: skip

    def layer(w: State, x: jax.Array) -> jax.Array:
        w = jax.tree.map(lambda a: a.astype(dtype), w)
        q, k, v = jnp.einsum("btd,dche->cbhte", _normed(x, w["scale"][0]), w["qkv"])
        scores = jnp.einsum("bhte,bhse->bhts", q, k).astype(jnp.float32) * _HEAD_DIM**-0.5
        seen = jnp.tril(jnp.ones((tokens, tokens), bool))
        shares = jax.nn.softmax(jnp.where(seen, scores, -1e9)).astype(dtype)
        x = x + jnp.einsum("bhte,hed->btd", jnp.einsum("bhts,bhse->bhte", shares, v), w["out"])
        return x + jax.nn.gelu(_normed(x, w["scale"][1]) @ w["up"]) @ w["down"]

    def loss(weights: State, batch: Any) -> jax.Array:
        x = weights["embedding"].astype(dtype)[batch]
        for i in range(_LAYERS):
            x = layer(weights[f"layer_{i}"], x)
        scores = (x @ weights["head"].astype(dtype)).astype(jnp.float32)
        given = jnp.take_along_axis(scores, batch[..., None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - given)

    batch = np.arange(sequences * tokens, dtype=np.int32).reshape(sequences, tokens) % words
    return _step(loss, weights, batch)


def _normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def _weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32) * np.float32(0.02)


def _step(loss: Callable[[State, Any], jax.Array], weights: State, batch: Any) -> Step:
    """Adam without its correction of the first steps."""

    def run(state: State, batch: Any) -> State:
        gradients = jax.grad(loss)(state["weights"], batch)
        mean = jax.tree.map(lambda m, g: _DECAY * m + (1 - _DECAY) * g, state["mean"], gradients)
        square = jax.tree.map(lambda v, g: _DECAY * v + (1 - _DECAY) * g * g, state["square"], gradients)
        moved = jax.tree.map(
            lambda w, m, v: w - _RATE * m * jax.lax.rsqrt(v + 1e-16), state["weights"], mean, square
        )
        return {"weights": moved, "mean": mean, "square": square}

    zeros = jax.tree.map(np.zeros_like, weights)
    return Step(run=run, state={"weights": weights, "mean": zeros, "square": zeros}, batch=batch)
