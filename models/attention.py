"""Attention and rotary positions as pure functions, for every transformer here."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool,
    bias: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """softmax(scale * query · key + bias) · value, with the softmax in f32; scale: 1 / sqrt(head_dim) if None.

    query: [batch, length, heads, head_dim]; key and value: [batch, keys, kv_heads, head_dim], where
    `kv_heads` divides `heads` (grouped-query attention, Ainslie et al. 2023, arXiv:2305.13245); bias: [heads,
    length, keys]; `causal` only where there are as many keys as queries.  Returns query's shape and dtype.
    """
    batch, length, n_heads, head_dim = query.shape
    n_kv_heads = key.shape[2]
    grouped = query.reshape(batch, length, n_kv_heads, n_heads // n_kv_heads, head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32)
    scores = scores / math.sqrt(head_dim) if scale is None else scores * scale
    if bias is not None:
        scores = scores + bias.reshape(n_kv_heads, n_heads // n_kv_heads, *bias.shape[1:])
    if causal:
        positions = jnp.arange(length)
        visible = positions[:, None] >= positions[None, :]
        scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, value).reshape(query.shape)


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of x: [batch, length, heads, head_dim].

    Element i of the first half of a head and element i of the second are one pair, turned by
    position * theta**(-2i / head_dim), computed in f32.
    """
    length, head_dim = x.shape[1], x.shape[3]
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
