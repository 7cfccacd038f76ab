"""The pre-norm transformer block of GPT-2 and ViT in Flax Linen, and how blocks are stacked."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen as nn

from models.attention import attend


class SelfAttention(nn.Module):
    """Multi-head self-attention with biases; [batch, length, dim] to the same."""

    n_heads: int
    causal: bool
    dtype: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dim = x.shape[-1]
        heads = (3, self.n_heads, dim // self.n_heads)
        qkv = nn.DenseGeneral(heads, dtype=self.dtype, name="qkv")(x)
        query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        mixed = attend(query, key, value, causal=self.causal)
        return nn.DenseGeneral(dim, axis=(-2, -1), dtype=self.dtype, name="out")(mixed)


class Mlp(nn.Module):
    """Two dense layers with GELU between; [batch, length, dim] to the same."""

    hidden_dim: int
    dtype: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nn.gelu(nn.Dense(self.hidden_dim, dtype=self.dtype, name="up")(x))
        return nn.Dense(x.shape[-1], dtype=self.dtype, name="down")(hidden)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    n_heads: int
    hidden_dim: int
    causal: bool
    dtype: str
    norm_epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        normed = nn.LayerNorm(self.norm_epsilon, dtype=self.dtype, name="norm_1")(x)
        x = x + SelfAttention(self.n_heads, self.causal, self.dtype, name="attention")(normed)
        normed = nn.LayerNorm(self.norm_epsilon, dtype=self.dtype, name="norm_2")(x)
        return x + Mlp(self.hidden_dim, self.dtype, name="mlp")(normed)


def stack_layers(
    block: Any,
    x: Any,
    *,
    depth: int,
    scan: bool,
    remat: bool,
    shared: tuple[Any, ...] = (),
    **fields: Any,
) -> Any:
    """Applies `depth` blocks `block(**fields)` to x, an array or a pytree; call it inside a compact method.

    Each is called as `block(x, *shared)`: `shared` is what all of them read and none changes.  Unrolled, the
    parameters are `layer_0`, `layer_1`, ...; scanned, they are one `layers` with the layer as
    the first dimension of every leaf.  `remat` recomputes each block's activations in the backward pass.
    """
    if not scan:
        layers = [block(**fields, name=f"layer_{index}") for index in range(depth)]
        # One function for all layers: jax traces it once.  `nn.remat` makes one a layer, each traced by itself.
        again = jax.checkpoint(block(**fields, parent=None).apply) if remat else None
        for layer in layers:
            recomputed = again is not None and not layer.is_initializing()
            x = again(layer.variables, x, *shared) if recomputed else layer(x, *shared)
        return x
    if remat:
        # Inside a scan XLA can't undo the recomputation anyway, and barriers against it cost time.
        block = nn.remat(block, prevent_cse=False)
    scanned = nn.scan(
        lambda layer, carry, *shared: (layer(carry, *shared), None),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=nn.broadcast,
        length=depth,
    )
    x, _ = scanned(block(**fields, name="layers"), x, *shared)
    return x
