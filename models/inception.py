"""Inception v3 (Szegedy et al. 2015, arXiv:1512.00567) in Flax Linen, with its auxiliary head.

Layer for layer as in torchvision, of which also the batch normalisation's epsilon and the auxiliary loss's share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from models.training import (
    TINY_ADAM_EPSILON,
    Batch,
    Metrics,
    State,
    TrainStep,
    adamw,
    apply_gradients,
    classification_loss,
    new_state,
    random_images,
)

AUXILIARY_SHARE = 0.4
"""Of the auxiliary head's loss beside the whole one's: torchvision's reference training."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """`n_blocks` before, between and after the two reductions; every width is divided by `divisor`."""

    n_blocks: tuple[int, int, int] = (3, 4, 2)
    divisor: int = 1
    auxiliary: bool = True
    image_size: int = 299
    n_classes: int = 1000
    batch_size: int = 1024
    dtype: str = "bfloat16"
    learning_rate: float = 1e-3
    adam_epsilon: float = 1e-5


# 75 pixels are the least that leave one after all windows; statistics of more than one are calmer.
_TINY = Config(
    n_blocks=(1, 1, 1),
    divisor=16,
    auxiliary=False,
    image_size=107,
    n_classes=16,
    batch_size=16,
    dtype="float32",
    adam_epsilon=TINY_ADAM_EPSILON,
)

# Dims: the paper's table 1 as torchvision has them.  Batch sizes are ours.
CONFIGS: dict[str, Config] = {
    "tiny": _TINY,
    "tiny-bf16": replace(_TINY, dtype="bfloat16"),
    "tiny-auxiliary": replace(_TINY, auxiliary=True),
    "inception-v3": Config(),
}

# The widths of the pools' branches in the first blocks, and of the factorised convolutions in the second ones.
_POOLED = (32, 64, 64)
_FACTORISED = (128, 160, 160, 192)

Unit = Callable[..., jax.Array]


class ConvUnit(nn.Module):
    """Convolution, batch normalisation, ReLU."""

    config: Config
    width: int
    window: tuple[int, int]
    stride: int
    padding: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = self.config.dtype
        stride = (self.stride, self.stride)
        width = -(-self.width // self.config.divisor)
        x = nn.Conv(width, self.window, stride, padding=self.padding, use_bias=False, dtype=dtype)(x)
        # 0.9: PyTorch's default momentum, which torchvision leaves as it is.
        norm = nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-3, dtype=dtype)
        return nn.relu(norm(x))


def average(x: jax.Array) -> jax.Array:
    return nn.avg_pool(x, (3, 3), strides=(1, 1), padding="SAME")


def halved(x: jax.Array) -> jax.Array:
    return nn.max_pool(x, (3, 3), strides=(2, 2))


def first_block(x: jax.Array, unit: Unit, index: int) -> jax.Array:
    """Figure 5: two 3 x 3 windows instead of a 5 x 5 one; as in torchvision, one branch keeps its 5 x 5."""
    five = unit(unit(x, 48), 64, 5, 5)
    threes = unit(unit(unit(x, 64), 96, 3, 3), 96, 3, 3)
    return jnp.concatenate([unit(x, 64), five, threes, unit(average(x), _POOLED[index])], axis=-1)


def first_reduction(x: jax.Array, unit: Unit) -> jax.Array:
    threes = unit(unit(unit(x, 64), 96, 3, 3), 96, 3, 3, stride=2, padding="VALID")
    return jnp.concatenate([unit(x, 384, 3, 3, stride=2, padding="VALID"), threes, halved(x)], axis=-1)


def second_block(x: jax.Array, unit: Unit, index: int) -> jax.Array:
    """Figure 6: 7 x 7 windows as 1 x 7 and 7 x 1 ones."""
    width = _FACTORISED[index]
    once = unit(unit(unit(x, width), width, 1, 7), 192, 7, 1)
    twice = unit(unit(unit(x, width), width, 7, 1), width, 1, 7)
    twice = unit(unit(twice, width, 7, 1), 192, 1, 7)
    return jnp.concatenate([unit(x, 192), once, twice, unit(average(x), 192)], axis=-1)


def second_reduction(x: jax.Array, unit: Unit) -> jax.Array:
    three = unit(unit(x, 192), 320, 3, 3, stride=2, padding="VALID")
    seven = unit(unit(unit(x, 192), 192, 1, 7), 192, 7, 1)
    seven = unit(seven, 192, 3, 3, stride=2, padding="VALID")
    return jnp.concatenate([three, seven, halved(x)], axis=-1)


def third_block(x: jax.Array, unit: Unit) -> jax.Array:
    """Figure 7: the last windows side by side."""
    one, three = unit(x, 384), unit(unit(x, 448), 384, 3, 3)
    sides = [unit(y, 384, *window) for y in (one, three) for window in ((1, 3), (3, 1))]
    return jnp.concatenate([unit(x, 320), *sides, unit(average(x), 192)], axis=-1)


class Inception(nn.Module):
    """Images [batch, size, size, 3] to logits [batch, n_classes] and the auxiliary head's, None without it."""

    config: Config

    @nn.compact
    def __call__(self, images: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        config = self.config

        def unit(
            x: jax.Array, width: int, high: int = 1, wide: int = 1, stride: int = 1, padding: str = "SAME"
        ) -> jax.Array:
            return ConvUnit(config, width, (high, wide), stride, padding)(x)

        x = unit(images, 32, 3, 3, stride=2, padding="VALID")
        x = unit(unit(x, 32, 3, 3, padding="VALID"), 64, 3, 3)
        x = unit(unit(halved(x), 80), 192, 3, 3, padding="VALID")
        x = halved(x)
        for index in range(config.n_blocks[0]):
            x = first_block(x, unit, index)
        x = first_reduction(x, unit)
        for index in range(config.n_blocks[1]):
            x = second_block(x, unit, index)
        head = partial(nn.Dense, config.n_classes, dtype=config.dtype)
        auxiliary = None
        if config.auxiliary:
            side = unit(nn.avg_pool(x, (5, 5), strides=(3, 3)), 128)
            # A window over all that is left: 5 x 5 of an image of 299.
            side = unit(side, 768, *side.shape[1:3], padding="VALID")
            auxiliary = head(name="auxiliary_head")(side.reshape(side.shape[0], -1))
        x = second_reduction(x, unit)
        for _ in range(config.n_blocks[2]):
            x = third_block(x, unit)
        return head(name="head")(jnp.mean(x, axis=(1, 2))), auxiliary


def init_state(config: Config, key: jax.Array) -> State:
    """The state at step 0; f32 parameters, optimizer moments and batch statistics."""
    images = jnp.zeros((1, config.image_size, config.image_size, 3), jnp.float32)
    variables = Inception(config).init(key, images)
    optimizer = adamw(config.learning_rate, config.adam_epsilon)
    return new_state(variables["params"], optimizer, batch_stats=variables["batch_stats"])


def make_train_step(config: Config) -> TrainStep:
    """The step of one batch; metrics: `loss` in nats, both heads', `grad_norm`, `accuracy`."""
    model = Inception(config)
    optimizer = adamw(config.learning_rate, config.adam_epsilon)

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        def loss_function(params: Any) -> tuple[jax.Array, tuple[Metrics, Any]]:
            variables = {"params": params, "batch_stats": state["batch_stats"]}
            (logits, auxiliary), changed = model.apply(variables, batch["images"], mutable=["batch_stats"])
            loss, metrics = classification_loss(logits, batch["labels"])
            if auxiliary is not None:
                loss = loss + AUXILIARY_SHARE * classification_loss(auxiliary, batch["labels"])[0]
            return loss, (metrics, changed["batch_stats"])

        gradient = jax.value_and_grad(loss_function, has_aux=True)
        (loss, (metrics, batch_stats)), gradients = gradient(state["params"])
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(gradients), **metrics}
        return apply_gradients(state, gradients, optimizer, batch_stats=batch_stats), metrics

    return train_step


def make_batch(config: Config, key: jax.Array) -> Batch:
    """`images` [batch_size, size, size, 3] f32 and `labels` [batch_size] int32."""
    shape = (config.batch_size, config.image_size, config.image_size, 3)
    return random_images(key, shape, config.n_classes)


def batch_shapes(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of `make_batch`, allocating nothing."""
    return jax.eval_shape(lambda: make_batch(config, jax.random.key(0)))
