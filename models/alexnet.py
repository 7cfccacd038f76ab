"""AlexNet (Krizhevsky et al. 2012) in its one-tower form (Krizhevsky 2014, arXiv:1404.5997), in Flax Linen.

As in torchvision: 64 channels in the first convolution, no local response normalisation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import linen as nn

from models.training import (
    TINY_ADAM_EPSILON,
    Batch,
    State,
    TrainStep,
    adamw,
    dropout_step,
    new_state,
    random_images,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """`channels` of the five convolutions; `hidden_dim` of the two dense layers before the classes."""

    channels: tuple[int, int, int, int, int] = (64, 192, 384, 256, 256)
    hidden_dim: int = 4096
    dropout: float = 0.5
    image_size: int = 224
    n_classes: int = 1000
    batch_size: int = 1024
    dtype: str = "bfloat16"
    learning_rate: float = 1e-4
    adam_epsilon: float = 1e-5


_TINY = Config(
    channels=(8, 16, 16, 16, 8),
    hidden_dim=64,
    dropout=0.0,
    image_size=64,
    n_classes=16,
    batch_size=16,
    dtype="float32",
    adam_epsilon=TINY_ADAM_EPSILON,
)

# Dims: the paper's figure 2 as torchvision has them.  Batch sizes are ours.
CONFIGS: dict[str, Config] = {
    "tiny": _TINY,
    "tiny-bf16": replace(_TINY, dtype="bfloat16"),
    "tiny-dropout": replace(_TINY, dropout=0.5),
    "alexnet": Config(),
}


class AlexNet(nn.Module):
    """Images [batch, size, size, 3] to logits [batch, n_classes]."""

    config: Config

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        config = self.config
        x = images
        # Window, stride and padding of each convolution, and whether a pool follows.
        layers = ((11, 4, 2, True), (5, 1, 2, True), (3, 1, 1, False), (3, 1, 1, False), (3, 1, 1, True))
        for index, (width, (window, stride, padding, pooled)) in enumerate(
            zip(config.channels, layers, strict=True)
        ):
            conv = nn.Conv(
                width,
                (window, window),
                (stride, stride),
                padding=padding,
                dtype=config.dtype,
                name=f"conv_{index}",
            )
            x = nn.relu(conv(x))
            if pooled:
                x = nn.max_pool(x, (3, 3), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        for index in range(2):
            x = nn.Dropout(config.dropout, deterministic=not train)(x)
            x = nn.relu(nn.Dense(config.hidden_dim, dtype=config.dtype, name=f"dense_{index}")(x))
        return nn.Dense(config.n_classes, dtype=config.dtype, name="head")(x)


def init_state(config: Config, key: jax.Array) -> State:
    """The state at step 0; f32 parameters and optimizer moments."""
    images = jnp.zeros((1, config.image_size, config.image_size, 3), jnp.float32)
    optimizer = adamw(config.learning_rate, config.adam_epsilon)
    return new_state(AlexNet(config).init(key, images, train=False)["params"], optimizer)


def make_train_step(config: Config) -> TrainStep:
    """The step of one batch; metrics: `loss` in nats, `grad_norm`, `accuracy`."""
    return dropout_step(AlexNet(config), adamw(config.learning_rate, config.adam_epsilon))


def make_batch(config: Config, key: jax.Array) -> Batch:
    """`images` [batch_size, size, size, 3] f32 and `labels` [batch_size] int32."""
    shape = (config.batch_size, config.image_size, config.image_size, 3)
    return random_images(key, shape, config.n_classes)


def batch_shapes(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of `make_batch`, allocating nothing."""
    return jax.eval_shape(lambda: make_batch(config, jax.random.key(0)))
