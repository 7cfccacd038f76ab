"""T5 (Raffel et al. 2019, arXiv:1910.10683): encoder, decoder with cross-attention, relative position buckets.

The published first version: ReLU between the dense layers, one embedding for inputs, targets and logits, no biases.
Dropout is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from models.attention import attend
from models.training import (
    TINY_ADAM_EPSILON,
    Batch,
    Metrics,
    State,
    TrainStep,
    adamw,
    gradient_step,
    new_state,
    token_cross_entropy,
)
from models.transformer import stack_layers


@dataclass(frozen=True, kw_only=True)
class Config:
    """`n_layers` in the encoder and as many in the decoder; the heads' width is not tied to `dim`."""

    n_layers: int
    dim: int
    n_heads: int
    head_dim: int
    hidden_dim: int
    input_len: int
    target_len: int
    batch_size: int
    vocab_size: int = 32128
    n_buckets: int = 32
    max_distance: int = 128
    scan_layers: bool = False
    remat: bool = False
    dtype: str = "bfloat16"
    learning_rate: float = 1e-3
    adam_epsilon: float = 1e-5


_TINY = Config(
    n_layers=2,
    dim=64,
    n_heads=8,
    head_dim=16,
    hidden_dim=256,
    input_len=16,
    target_len=8,
    batch_size=8,
    vocab_size=128,
    n_buckets=8,
    max_distance=16,
    dtype="float32",
    adam_epsilon=TINY_ADAM_EPSILON,
)
_BASE = Config(
    n_layers=12,
    dim=768,
    n_heads=12,
    head_dim=64,
    hidden_dim=3072,
    input_len=512,
    target_len=114,
    batch_size=128,
)
_DEEP = replace(_BASE, n_layers=24, dim=1024, scan_layers=True, remat=True)

# Dims: the paper's section 3.7 ("Model size"); 32128 is the released vocabulary of 32,000 wordpieces and 100 sentinels,
# rounded up to 128.  Lengths: 512 tokens in, and 114 out, which is what its span corruption leaves of them.  Buckets
# and distance: the paper's section 2.1.  Batch: its section 3.1.2 (128 sequences of 512).
CONFIGS: dict[str, Config] = {
    "tiny": _TINY,
    "tiny-bf16": replace(_TINY, dtype="bfloat16"),
    "tiny-scan": replace(_TINY, scan_layers=True, remat=True),
    "t5-small": replace(_BASE, n_layers=6, dim=512, n_heads=8, hidden_dim=2048),
    "t5-base": _BASE,
    "t5-large": replace(_DEEP, n_heads=16, hidden_dim=4096),
    "t5-3b": replace(_DEEP, n_heads=32, head_dim=128, hidden_dim=16384),
    "t5-11b": replace(_DEEP, n_heads=128, head_dim=128, hidden_dim=65536),
}


def relative_buckets(
    n_queries: int, n_keys: int, *, n_buckets: int, max_distance: int, both_sides: bool
) -> np.ndarray:
    """The bucket of every (query, key) pair: [n_queries, n_keys] int32.

    Half of a side's buckets are single distances, the other half grows with the logarithm up to `max_distance`, beyond
    which all share the last (section 2.1; its exact form is the released code's).  `both_sides`: keys ahead have
    buckets of their own; else they count as distance 0.
    """
    distance = np.arange(n_queries)[:, None] - np.arange(n_keys)[None, :]
    side = n_buckets // 2 if both_sides else n_buckets
    first = np.where(distance < 0, side, 0) if both_sides else np.zeros_like(distance)
    distance = np.abs(distance) if both_sides else np.maximum(distance, 0)
    exact = side // 2
    logarithm = np.log(np.maximum(distance, 1) / exact) / np.log(max_distance / exact)
    far = np.minimum(exact + (logarithm * (side - exact)).astype(np.int64), side - 1)
    return (first + np.where(distance < exact, distance, far)).astype(np.int32)


def _linear(config: Config) -> Any:
    return partial(nn.DenseGeneral, use_bias=False, dtype=config.dtype)


def _norm(config: Config, name: str) -> nn.RMSNorm:
    return nn.RMSNorm(epsilon=1e-6, dtype=config.dtype, name=name)  # 1e-6: the released configurations


class Attention(nn.Module):
    """Attention from x [batch, length, dim] to `source` [batch, keys, dim]; as published, scores are not scaled."""

    config: Config

    @nn.compact
    def __call__(
        self, x: jax.Array, source: jax.Array, *, causal: bool = False, bias: jax.Array | None = None
    ) -> jax.Array:
        config = self.config
        linear, heads = _linear(config), (config.n_heads, config.head_dim)
        # The scale left out of the scores stands in the queries' initialisation (released code).
        of_queries = nn.initializers.variance_scaling(1.0 / config.head_dim, "fan_in", "normal")
        query = linear(heads, kernel_init=of_queries, name="query")(x)
        key, value = linear(heads, name="key")(source), linear(heads, name="value")(source)
        mixed = attend(query, key, value, causal=causal, bias=bias, scale=1.0)
        return linear(config.dim, axis=(-2, -1), name="out")(mixed)


class Layer(nn.Module):
    """Self-attention, in a decoder cross-attention to `encoded`, and two dense layers, each normed before and added."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array, encoded: jax.Array | None = None) -> jax.Array:
        config = self.config
        normed = _norm(config, "attention_norm")(x)
        attention = Attention(config, name="attention")
        x = x + attention(normed, normed, causal=encoded is not None, bias=bias)
        if encoded is not None:
            normed = _norm(config, "cross_norm")(x)
            x = x + Attention(config, name="cross_attention")(normed, encoded)
        hidden = nn.relu(_linear(config)(config.hidden_dim, name="up")(_norm(config, "mlp_norm")(x)))
        return x + _linear(config)(config.dim, name="down")(hidden)


class Side(nn.Module):
    """The encoder, or with `encoded` the decoder: [batch, length, dim] to the same."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, encoded: jax.Array | None = None) -> jax.Array:
        config = self.config
        table = self.param("position_bias", nn.initializers.normal(0.02), (config.n_heads, config.n_buckets))
        buckets = relative_buckets(
            x.shape[1],
            x.shape[1],
            n_buckets=config.n_buckets,
            max_distance=config.max_distance,
            both_sides=encoded is None,
        )
        x = stack_layers(
            Layer,
            x,
            depth=config.n_layers,
            scan=config.scan_layers,
            remat=config.remat,
            shared=(table[:, buckets],) if encoded is None else (table[:, buckets], encoded),
            config=config,
        )
        return _norm(config, "final_norm")(x)


class T5(nn.Module):
    """Inputs [batch, length] and shifted targets [batch, targets] int32 to logits [batch, targets, vocab_size]."""

    config: Config

    @nn.compact
    def __call__(self, inputs: jax.Array, decoder_inputs: jax.Array) -> jax.Array:
        config = self.config
        embedding = nn.Embed(
            config.vocab_size,
            config.dim,
            dtype=config.dtype,
            embedding_init=nn.initializers.normal(1.0),
            name="embedding",
        )
        encoded = Side(config, name="encoder")(embedding(inputs))
        decoded = Side(config, name="decoder")(embedding(decoder_inputs), encoded)
        # As published: with the embedding shared, the last states are scaled down before the logits.
        return embedding.attend(decoded * config.dim**-0.5)


def init_state(config: Config, key: jax.Array) -> State:
    """The state at step 0; f32 parameters and optimizer moments."""
    inputs = jnp.zeros((1, config.input_len), jnp.int32)
    targets = jnp.zeros((1, config.target_len), jnp.int32)
    return new_state(
        T5(config).init(key, inputs, targets)["params"], adamw(config.learning_rate, config.adam_epsilon)
    )


def make_train_step(config: Config) -> TrainStep:
    """The step of one batch; metrics: `loss` in nats a target token, `grad_norm`."""
    model = T5(config)

    def loss_function(params: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        targets = batch["targets"]
        # Token 0 is the padding, with which decoding starts.
        shifted = jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        logits: Any = model.apply({"params": params}, batch["inputs"], shifted)
        return token_cross_entropy(logits, targets), {}

    return gradient_step(loss_function, adamw(config.learning_rate, config.adam_epsilon))


def make_batch(config: Config, key: jax.Array) -> Batch:
    """`inputs` [batch_size, input_len] and `targets` [batch_size, target_len], int32."""
    input_key, target_key = jax.random.split(key)
    shapes = (config.batch_size, config.input_len), (config.batch_size, config.target_len)
    return {
        "inputs": jax.random.randint(input_key, shapes[0], 1, config.vocab_size, jnp.int32),
        "targets": jax.random.randint(target_key, shapes[1], 1, config.vocab_size, jnp.int32),
    }


def batch_shapes(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of `make_batch`, allocating nothing."""
    return jax.eval_shape(lambda: make_batch(config, jax.random.key(0)))
