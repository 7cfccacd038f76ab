"""VGG (Simonyan and Zisserman 2014, arXiv:1409.1556) in Flax Linen: 3 x 3 convolutions and wide dense layers."""

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
    """`n_convolutions` of each stage, of `widths` channels; a pool halves the image after each stage."""

    n_convolutions: tuple[int, ...]
    widths: tuple[int, ...] = (64, 128, 256, 512, 512)
    hidden_dim: int = 4096
    dropout: float = 0.5
    image_size: int = 224
    n_classes: int = 1000
    batch_size: int = 512
    dtype: str = "bfloat16"
    learning_rate: float = 1e-4
    adam_epsilon: float = 1e-5


_TINY = Config(
    n_convolutions=(1, 2),
    widths=(8, 16),
    hidden_dim=64,
    dropout=0.0,
    image_size=8,
    n_classes=16,
    batch_size=16,
    dtype="float32",
    learning_rate=1e-3,
    adam_epsilon=TINY_ADAM_EPSILON,
)

# Dims: the paper's table 1, configurations A, D and E.  Batch sizes are ours.
CONFIGS: dict[str, Config] = {
    "tiny": _TINY,
    "tiny-bf16": replace(_TINY, dtype="bfloat16"),
    "tiny-dropout": replace(_TINY, dropout=0.5),
    "vgg11": Config(n_convolutions=(1, 1, 2, 2, 2)),
    "vgg16": Config(n_convolutions=(2, 2, 3, 3, 3)),
    "vgg19": Config(n_convolutions=(2, 2, 4, 4, 4)),
}


class Vgg(nn.Module):
    """Images [batch, size, size, 3] to logits [batch, n_classes]."""

    config: Config

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        config = self.config
        x = images
        for stage, (n_convolutions, width) in enumerate(
            zip(config.n_convolutions, config.widths, strict=True)
        ):
            for index in range(n_convolutions):
                name = f"stage_{stage}_conv_{index}"
                x = nn.relu(nn.Conv(width, (3, 3), padding=1, dtype=config.dtype, name=name)(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        for index in range(2):
            x = nn.relu(nn.Dense(config.hidden_dim, dtype=config.dtype, name=f"dense_{index}")(x))
            x = nn.Dropout(config.dropout, deterministic=not train)(x)
        return nn.Dense(config.n_classes, dtype=config.dtype, name="head")(x)


def init_state(config: Config, key: jax.Array) -> State:
    """The state at step 0; f32 parameters and optimizer moments."""
    images = jnp.zeros((1, config.image_size, config.image_size, 3), jnp.float32)
    optimizer = adamw(config.learning_rate, config.adam_epsilon)
    return new_state(Vgg(config).init(key, images, train=False)["params"], optimizer)


def make_train_step(config: Config) -> TrainStep:
    """The step of one batch; metrics: `loss` in nats, `grad_norm`, `accuracy`."""
    return dropout_step(Vgg(config), adamw(config.learning_rate, config.adam_epsilon))


def make_batch(config: Config, key: jax.Array) -> Batch:
    """`images` [batch_size, size, size, 3] f32 and `labels` [batch_size] int32."""
    shape = (config.batch_size, config.image_size, config.image_size, 3)
    return random_images(key, shape, config.n_classes)


def batch_shapes(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of `make_batch`, allocating nothing."""
    return jax.eval_shape(lambda: make_batch(config, jax.random.key(0)))
