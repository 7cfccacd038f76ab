"""Whisper (Radford et al. 2022, arXiv:2212.04356): convolutions over a log-mel spectrogram, encoder, text decoder."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    random_tokens,
    round_up,
    token_cross_entropy,
)
from models.transformer import Mlp, stack_layers


@dataclass(frozen=True, kw_only=True)
class Config:
    """`n_layers` in the encoder and as many in the decoder; `vocab_multiple` rounds the embedding's rows up."""

    n_layers: int
    dim: int
    n_heads: int
    n_mels: int = 80
    n_frames: int = 3000
    text_len: int = 448
    vocab_size: int = 51865
    vocab_multiple: int = 128
    batch_size: int = 256
    scan_layers: bool = False
    remat: bool = False
    dtype: str = "bfloat16"
    learning_rate: float = 1e-3
    adam_epsilon: float = 1e-5


_TINY = Config(
    n_layers=2,
    dim=64,
    n_heads=8,
    n_mels=16,
    n_frames=32,
    text_len=8,
    vocab_size=128,
    batch_size=8,
    dtype="float32",
    adam_epsilon=TINY_ADAM_EPSILON,
)
_WHISPER_TINY = Config(n_layers=4, dim=384, n_heads=6)
_DEEP = replace(_WHISPER_TINY, scan_layers=True, remat=True)

# Dims: the paper's table 1; spectrogram: its section 2.2 (80 mels, 30 s in frames of 10 ms); text context, vocabulary
# (multilingual) and batch size: the released checkpoints and the paper's table 17.
CONFIGS: dict[str, Config] = {
    "tiny": _TINY,
    "tiny-bf16": replace(_TINY, dtype="bfloat16"),
    "tiny-scan": replace(_TINY, scan_layers=True, remat=True),
    "whisper-tiny": _WHISPER_TINY,
    "whisper-base": replace(_WHISPER_TINY, n_layers=6, dim=512, n_heads=8),
    "whisper-small": replace(_DEEP, n_layers=12, dim=768, n_heads=12),
    "whisper-medium": replace(_DEEP, n_layers=24, dim=1024, n_heads=16),
    "whisper-large": replace(_DEEP, n_layers=32, dim=1280, n_heads=20),
}


def sinusoids(length: int, dim: int) -> np.ndarray:
    """Fixed positions [length, dim] f32: sines, then cosines, of wavelengths from 2 pi to 10000 * 2 pi."""
    rates = np.exp(-np.log(10000.0) / (dim // 2 - 1) * np.arange(dim // 2))
    angles = np.arange(length)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


class Attention(nn.Module):
    """Attention from x [batch, length, dim] to `source` [batch, keys, dim]; keys have no bias."""

    config: Config
    causal: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, source: jax.Array) -> jax.Array:
        config = self.config
        heads = (config.n_heads, config.dim // config.n_heads)
        query = nn.DenseGeneral(heads, dtype=config.dtype, name="query")(x)
        key = nn.DenseGeneral(heads, use_bias=False, dtype=config.dtype, name="key")(source)
        value = nn.DenseGeneral(heads, dtype=config.dtype, name="value")(source)
        mixed = attend(query, key, value, causal=self.causal)
        return nn.DenseGeneral(config.dim, axis=(-2, -1), dtype=config.dtype, name="out")(mixed)


class Layer(nn.Module):
    """An encoder's layer, or with `encoded` a decoder's: pre-norm attention, cross-attention, dense layers."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, encoded: jax.Array | None = None) -> jax.Array:
        config = self.config

        def normed(name: str) -> jax.Array:
            return nn.LayerNorm(1e-5, dtype=config.dtype, name=name)(x)

        y = normed("attention_norm")
        x = x + Attention(config, causal=encoded is not None, name="attention")(y, y)
        if encoded is not None:
            x = x + Attention(config, name="cross_attention")(normed("cross_norm"), encoded)
        return x + Mlp(4 * config.dim, config.dtype, name="mlp")(normed("mlp_norm"))


class Side(nn.Module):
    """The encoder's layers, or with `encoded` the decoder's: [batch, length, dim] to the same."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, encoded: jax.Array | None = None) -> jax.Array:
        config = self.config
        x = stack_layers(
            Layer,
            x,
            depth=config.n_layers,
            scan=config.scan_layers,
            remat=config.remat,
            shared=() if encoded is None else (encoded,),
            config=config,
        )
        return nn.LayerNorm(1e-5, dtype=config.dtype, name="final_norm")(x)


class Whisper(nn.Module):
    """Spectrogram [batch, frames, mels] and tokens [batch, length] to logits [batch, length, rounded vocabulary]."""

    config: Config

    @nn.compact
    def __call__(self, spectrogram: jax.Array, tokens: jax.Array) -> jax.Array:
        config = self.config
        x = nn.gelu(nn.Conv(config.dim, (3,), padding=1, dtype=config.dtype, name="conv_1")(spectrogram))
        x = nn.gelu(nn.Conv(config.dim, (3,), strides=2, padding=1, dtype=config.dtype, name="conv_2")(x))
        encoded = Side(config, name="encoder")(x + sinusoids(x.shape[1], config.dim).astype(config.dtype))
        embedding = nn.Embed(
            round_up(config.vocab_size, config.vocab_multiple),
            config.dim,
            dtype=config.dtype,
            embedding_init=nn.initializers.normal(0.02),
            name="token_embedding",
        )
        positions = self.param(
            "position_embedding", nn.initializers.normal(0.01), (config.text_len, config.dim)
        )
        y = embedding(tokens) + positions[: tokens.shape[1]].astype(config.dtype)
        return embedding.attend(Side(config, name="decoder")(y, encoded))


def init_state(config: Config, key: jax.Array) -> State:
    """The state at step 0; f32 parameters and optimizer moments."""
    spectrogram = jnp.zeros((1, config.n_frames, config.n_mels), jnp.float32)
    tokens = jnp.zeros((1, config.text_len), jnp.int32)
    return new_state(
        Whisper(config).init(key, spectrogram, tokens)["params"],
        adamw(config.learning_rate, config.adam_epsilon),
    )


def make_train_step(config: Config) -> TrainStep:
    """The step of one batch; metrics: `loss` in nats a token, `grad_norm`."""
    model = Whisper(config)

    def loss_function(params: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        logits: Any = model.apply({"params": params}, batch["spectrogram"], batch["inputs"])
        return token_cross_entropy(logits, batch["targets"]), {}

    return gradient_step(loss_function, adamw(config.learning_rate, config.adam_epsilon))


def make_batch(config: Config, key: jax.Array) -> Batch:
    """`spectrogram` [batch_size, n_frames, n_mels] f32; `inputs` and `targets`, each [batch_size, text_len] int32."""
    sound_key, text_key = jax.random.split(key)
    shape = (config.batch_size, config.n_frames, config.n_mels)
    text = random_tokens(text_key, config.batch_size, config.text_len, config.vocab_size)
    return {"spectrogram": jax.random.normal(sound_key, shape, jnp.float32), **text}


def batch_shapes(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of `make_batch`, allocating nothing."""
    return jax.eval_shape(lambda: make_batch(config, jax.random.key(0)))
