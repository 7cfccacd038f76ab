"""The plain transformer block on which XLA's own auto-sharding was compared: 8 scanned layers, SGD, no vocabulary.

bf16 throughout, d 1024, 4096 wide inside, 8 heads, 16 x 512 tokens; the loss is the mean square of what comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class Config:
    """Layers, width, width inside, heads; sequences and their length."""

    n_layers: int = 8
    dim: int = 1024
    hidden_dim: int = 4096
    n_heads: int = 8
    batch_size: int = 16
    seq_len: int = 512
    learning_rate: float = 1e-3


def init_state(config: Config, key: jax.Array) -> dict[str, jax.Array]:
    """Stacked weights, one row a layer."""
    shapes = {
        "qkv": (config.dim, 3, config.n_heads, config.dim // config.n_heads),
        "out": (config.n_heads, config.dim // config.n_heads, config.dim),
        "up": (config.dim, config.hidden_dim),
        "down": (config.hidden_dim, config.dim),
    }
    return {
        name: 0.02 * jax.random.normal(k, (config.n_layers, *shape), jnp.bfloat16)
        for (name, shape), k in zip(shapes.items(), jax.random.split(key, len(shapes)), strict=True)
    }


def batch_shapes(config: Config) -> jax.ShapeDtypeStruct:
    """Activations that come in."""
    return jax.ShapeDtypeStruct((config.batch_size, config.seq_len, config.dim), jnp.bfloat16)


def make_train_step(config: Config) -> Callable[..., Any]:
    """`(weights, batch) -> (weights, loss)`, for one device."""

    def normed(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)

    def layer(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        q, k, v = jnp.einsum("btd,dchk->cbthk", normed(x), weights["qkv"])
        scores = jnp.einsum("bqhk,bthk->bhqt", q, k).astype(jnp.float32) / (config.dim // config.n_heads) ** 0.5
        mixed = jnp.einsum("bhqt,bthk->bqhk", jax.nn.softmax(scores).astype(x.dtype), v)
        x = x + jnp.einsum("bqhk,hkd->bqd", mixed, weights["out"])
        return x + jax.nn.gelu(normed(x) @ weights["up"]) @ weights["down"], None

    def loss(weights: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        out = jax.lax.scan(layer, batch, weights)[0].astype(jnp.float32)
        return jnp.mean(out * out)

    def train_step(weights: dict[str, jax.Array], batch: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, batch)
        return jax.tree.map(lambda w, g: w - config.learning_rate * g, weights, gradients), value

    return train_step
