"""The diffusion U-Net of DDPM (Ho et al. 2020, arXiv:2006.11239): predicts the noise in an image.  Without dropout.

The step draws the noise and the times itself, from the key in the batch.
"""

from __future__ import annotations

import math
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
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Level i has `width` * `multipliers[i]` channels at `image_size` / 2**i; `attention_sizes` are sizes in pixels."""

    width: int
    multipliers: tuple[int, ...]
    n_blocks: int
    attention_sizes: tuple[int, ...]
    image_size: int
    batch_size: int
    n_groups: int = 32
    n_times: int = 1000
    dtype: str = "bfloat16"
    learning_rate: float = 2e-4
    adam_epsilon: float = 1e-5


_TINY = Config(
    width=16,
    multipliers=(1, 2),
    n_blocks=1,
    attention_sizes=(8,),
    image_size=16,
    batch_size=8,
    n_groups=8,
    dtype="float32",
    learning_rate=1e-3,
    adam_epsilon=TINY_ADAM_EPSILON,
)

# Sources: the paper's appendix B (two blocks a level, attention at 16 x 16, learning rates and batch sizes) and its
# released code (128 channels, the multipliers, 32 groups).
CONFIGS: dict[str, Config] = {
    "tiny": _TINY,
    "tiny-bf16": replace(_TINY, dtype="bfloat16"),
    "ddpm-cifar10": Config(
        width=128, multipliers=(1, 2, 2, 2), n_blocks=2, attention_sizes=(16,), image_size=32, batch_size=128
    ),
    "ddpm-256": Config(
        width=128,
        multipliers=(1, 1, 2, 2, 4, 4),
        n_blocks=2,
        attention_sizes=(16,),
        image_size=256,
        batch_size=64,
        learning_rate=2e-5,
    ),
}


def signal_shares(n_times: int) -> np.ndarray:
    """The share of the image's variance left after each noising step: [n_times] f32 (section 4's linear schedule)."""
    return np.cumprod(1.0 - np.linspace(1e-4, 0.02, n_times)).astype(np.float32)


def time_features(times: jax.Array, width: int) -> jax.Array:
    """Sinusoidal features [batch, width] f32 of times [batch]; wavelengths from 2 pi to 10000 * 2 pi."""
    half = width // 2
    rates = jnp.exp(-math.log(10000.0) / (half - 1) * jnp.arange(half, dtype=jnp.float32))
    angles = times.astype(jnp.float32)[:, None] * rates
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)


class ResidualBlock(nn.Module):
    """x + conv(swish(norm(conv(swish(norm(x))) + time))); x: [batch, size, size, channels]; time: [batch, features]."""

    width: int
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        config = self.config

        def activated(x: jax.Array, name: str) -> jax.Array:
            return nn.swish(nn.GroupNorm(config.n_groups, epsilon=1e-6, dtype=config.dtype, name=name)(x))

        y = nn.Conv(self.width, (3, 3), dtype=config.dtype, name="conv_1")(activated(x, "norm_1"))
        y = y + nn.Dense(self.width, dtype=config.dtype, name="time")(nn.swish(time))[:, None, None]
        y = nn.Conv(self.width, (3, 3), dtype=config.dtype, name="conv_2")(activated(y, "norm_2"))
        if x.shape[-1] != self.width:
            x = nn.Conv(self.width, (1, 1), dtype=config.dtype, name="conv_skip")(x)
        return x + y


class SpatialAttention(nn.Module):
    """x + attention over all pixels, with one head; [batch, size, size, channels] to the same."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        batch, height, width, channels = x.shape
        normed = nn.GroupNorm(config.n_groups, epsilon=1e-6, dtype=config.dtype, name="norm")(x)
        pixels = normed.reshape(batch, height * width, channels)

        def project(name: str) -> jax.Array:
            return nn.DenseGeneral((1, channels), dtype=config.dtype, name=name)(pixels)

        mixed = attend(project("query"), project("key"), project("value"), causal=False)
        mixed = nn.DenseGeneral(channels, axis=(-2, -1), dtype=config.dtype, name="out")(mixed)
        return x + mixed.reshape(x.shape)


class UNet(nn.Module):
    """Noisy images [batch, size, size, 3] and times [batch] to the noise in them, f32."""

    config: Config

    @nn.compact
    def __call__(self, images: jax.Array, times: jax.Array) -> jax.Array:
        config = self.config
        time = nn.Dense(4 * config.width, dtype=config.dtype, name="time_1")(
            time_features(times, config.width)
        )
        time = nn.Dense(4 * config.width, dtype=config.dtype, name="time_2")(nn.swish(time))

        def block(x: jax.Array, width: int, name: str) -> jax.Array:
            x = ResidualBlock(width, config, name=name)(x, time)
            if x.shape[1] in config.attention_sizes:
                x = SpatialAttention(config, name=f"{name}_attention")(x)
            return x

        def conv(width: int, name: str, stride: int = 1) -> nn.Conv:
            return nn.Conv(width, (3, 3), strides=stride, dtype=config.dtype, name=name)

        x = conv(config.width, "conv_in")(images)
        skips = [x]
        deepest = len(config.multipliers) - 1
        for level, multiplier in enumerate(config.multipliers):
            for index in range(config.n_blocks):
                x = block(x, config.width * multiplier, f"down_{level}_{index}")
                skips.append(x)
            if level < deepest:
                x = conv(x.shape[-1], f"down_{level}_conv", stride=2)(x)
                skips.append(x)
        x = ResidualBlock(x.shape[-1], config, name="middle_1")(x, time)
        x = SpatialAttention(config, name="middle_attention")(x)
        x = ResidualBlock(x.shape[-1], config, name="middle_2")(x, time)
        for level, multiplier in reversed(list(enumerate(config.multipliers))):
            for index in range(config.n_blocks + 1):
                joined = jnp.concatenate([x, skips.pop()], axis=-1)
                x = block(joined, config.width * multiplier, f"up_{level}_{index}")
            if level > 0:
                batch, height, width, channels = x.shape
                x = jax.image.resize(x, (batch, 2 * height, 2 * width, channels), "nearest")
                x = conv(channels, f"up_{level}_conv")(x)
        x = nn.swish(nn.GroupNorm(config.n_groups, epsilon=1e-6, dtype=config.dtype, name="norm_out")(x))
        return conv(3, "conv_out")(x).astype(jnp.float32)


def init_state(config: Config, key: jax.Array) -> State:
    """The state at step 0; f32 parameters and optimizer moments."""
    images = jnp.zeros((1, config.image_size, config.image_size, 3), jnp.float32)
    return new_state(
        UNet(config).init(key, images, jnp.zeros((1,), jnp.int32))["params"],
        adamw(config.learning_rate, config.adam_epsilon),
    )


def make_train_step(config: Config) -> TrainStep:
    """The step of one batch; metrics: `loss`, the mean squared error of the noise (equation 14), `grad_norm`."""
    model = UNet(config)

    def loss_function(params: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        images = batch["images"]
        noise_key, time_key = jax.random.split(jax.random.wrap_key_data(batch["key"]))
        noise = jax.random.normal(noise_key, images.shape, jnp.float32)
        times = jax.random.randint(time_key, images.shape[:1], 0, config.n_times)
        share = jnp.asarray(signal_shares(config.n_times))[times][:, None, None, None]
        noisy = jnp.sqrt(share) * images + jnp.sqrt(1.0 - share) * noise
        predicted: Any = model.apply({"params": params}, noisy, times)
        return jnp.mean(jnp.square(predicted - noise)), {}

    return gradient_step(loss_function, adamw(config.learning_rate, config.adam_epsilon))


def make_batch(config: Config, key: jax.Array) -> Batch:
    """`images` [batch_size, size, size, 3] f32 and `key`, the data of a PRNG key: [2] uint32."""
    image_key, noise_key = jax.random.split(key)
    shape = (config.batch_size, config.image_size, config.image_size, 3)
    return {
        "images": jax.random.normal(image_key, shape, jnp.float32),
        "key": jax.random.key_data(noise_key),
    }


def batch_shapes(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of `make_batch`, allocating nothing."""
    return jax.eval_shape(lambda: make_batch(config, jax.random.key(0)))
