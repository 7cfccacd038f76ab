"""A multilayer perceptron classifier in Flax Linen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from models.training import (
    TINY_ADAM_EPSILON,
    Batch,
    Metrics,
    State,
    TrainStep,
    adamw,
    classification_loss,
    gradient_step,
    new_state,
    random_images,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """`hidden_dims` between an input of `input_dim` values and logits of `n_classes`."""

    input_dim: int
    hidden_dims: tuple[int, ...]
    n_classes: int
    batch_size: int
    dtype: str = "bfloat16"
    learning_rate: float = 1e-3
    adam_epsilon: float = 1e-5


_TINY = Config(
    input_dim=32,
    hidden_dims=(64, 64),
    n_classes=16,
    batch_size=16,
    dtype="float32",
    adam_epsilon=TINY_ADAM_EPSILON,
)

# lenet-300-100: LeCun et al. 1998, "Gradient-Based Learning Applied to Document Recognition", section III.
# ciresan-2010: Ciresan et al. 2010, arXiv:1003.0358, table 1, row 5; its input is a 29 x 29 image.
# wide-*: no paper's; their two batch sizes stand on either side of where sharding the weights starts to pay.
CONFIGS: dict[str, Config] = {
    "tiny": _TINY,
    "tiny-bf16": replace(_TINY, dtype="bfloat16"),
    "lenet-300-100": Config(input_dim=784, hidden_dims=(300, 100), n_classes=10, batch_size=1024),
    "ciresan-2010": Config(
        input_dim=841, hidden_dims=(2500, 2000, 1500, 1000, 500), n_classes=10, batch_size=1024
    ),
    "wide-small-batch": Config(
        input_dim=8192, hidden_dims=(32768, 8192, 32768, 8192), n_classes=1024, batch_size=64
    ),
    "wide-big-batch": Config(
        input_dim=8192, hidden_dims=(8192, 8192, 8192), n_classes=1024, batch_size=262144
    ),
}


class Mlp(nn.Module):
    """[batch, input_dim] to logits [batch, n_classes]; ReLU between the layers."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        for index, width in enumerate(config.hidden_dims):
            x = nn.relu(nn.Dense(width, dtype=config.dtype, name=f"layer_{index}")(x))
        return nn.Dense(config.n_classes, dtype=config.dtype, name="head")(x)


def init_state(config: Config, key: jax.Array) -> State:
    """The state at step 0; f32 parameters and optimizer moments."""
    inputs = jnp.zeros((1, config.input_dim), jnp.float32)
    return new_state(
        Mlp(config).init(key, inputs)["params"], adamw(config.learning_rate, config.adam_epsilon)
    )


def make_train_step(config: Config) -> TrainStep:
    """The step of one batch; metrics: `loss` in nats, `grad_norm`, `accuracy`."""
    model = Mlp(config)

    def loss_function(params: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        logits: Any = model.apply({"params": params}, batch["images"])
        return classification_loss(logits, batch["labels"])

    return gradient_step(loss_function, adamw(config.learning_rate, config.adam_epsilon))


def make_batch(config: Config, key: jax.Array) -> Batch:
    """`images` [batch_size, input_dim] f32 and `labels` [batch_size] int32."""
    return random_images(key, (config.batch_size, config.input_dim), config.n_classes)


def batch_shapes(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of `make_batch`, allocating nothing."""
    return jax.eval_shape(lambda: make_batch(config, jax.random.key(0)))
