"""ResNet (He et al. 2015, arXiv:1512.03385) and WideResNet (Zagoruyko and Komodakis 2016, arXiv:1605.07146) in Flax
Linen; batch statistics are part of the train state.

Version 1.5: a bottleneck's stride is on its 3 x 3 convolution, as in torchvision and NVIDIA's reference.
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


@dataclass(frozen=True, kw_only=True)
class Config:
    """`stage_sizes` blocks a stage; stage i has `width` * 2**i channels, times 4 outside a bottleneck and times `widen`
    inside it."""

    stage_sizes: tuple[int, ...]
    bottleneck: bool
    width: int = 64
    widen: int = 1
    image_size: int = 224
    n_classes: int = 1000
    batch_size: int = 1024
    dtype: str = "bfloat16"
    learning_rate: float = 1e-3
    adam_epsilon: float = 1e-5


# Small images: each ReLU is a chance that rounding flips a gradient, which a comparison would see.
_TINY = Config(
    stage_sizes=(1, 1),
    bottleneck=False,
    width=8,
    image_size=16,
    n_classes=16,
    batch_size=16,
    dtype="float32",
    adam_epsilon=TINY_ADAM_EPSILON,
)

# Dims: the paper's table 1; the wide ones as in torchvision.  Batch sizes are ours.
CONFIGS: dict[str, Config] = {
    "tiny": _TINY,
    "tiny-bf16": replace(_TINY, dtype="bfloat16"),
    "tiny-bottleneck": replace(_TINY, bottleneck=True),
    "tiny-wide": replace(_TINY, bottleneck=True, widen=2),
    "resnet18": Config(stage_sizes=(2, 2, 2, 2), bottleneck=False),
    "resnet50": Config(stage_sizes=(3, 4, 6, 3), bottleneck=True),
    "resnet101": Config(stage_sizes=(3, 4, 23, 3), bottleneck=True),
    "resnet152": Config(stage_sizes=(3, 8, 36, 3), bottleneck=True),
    "wide-resnet50-2": Config(stage_sizes=(3, 4, 6, 3), bottleneck=True, widen=2),
    "wide-resnet101-2": Config(stage_sizes=(3, 4, 23, 3), bottleneck=True, widen=2),
}


class Block(nn.Module):
    """A residual block, basic (3 x 3, 3 x 3) or bottleneck (1 x 1, 3 x 3, 1 x 1)."""

    width: int
    widen: int
    stride: int
    bottleneck: bool
    conv: Callable[..., Any]
    norm: Callable[..., Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        stride = (self.stride, self.stride)
        # Padding of 1 on each side, as published: "SAME" would pad a strided convolution on one side only.
        spatial = partial(self.conv, kernel_size=(3, 3), padding=1)
        if self.bottleneck:
            width_out = 4 * self.width
            inside = self.widen * self.width
            y = nn.relu(self.norm(name="norm_1")(self.conv(inside, (1, 1), name="conv_1")(x)))
            y = nn.relu(self.norm(name="norm_2")(spatial(inside, strides=stride, name="conv_2")(y)))
            y = self.conv(width_out, (1, 1), name="conv_3")(y)
        else:
            width_out = self.width
            y = nn.relu(self.norm(name="norm_1")(spatial(self.width, strides=stride, name="conv_1")(x)))
            y = spatial(width_out, name="conv_2")(y)
        y = self.norm(name="norm_out")(y)
        if x.shape != y.shape:
            x = self.norm(name="norm_skip")(self.conv(width_out, (1, 1), strides=stride, name="conv_skip")(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Images [batch, size, size, 3] to logits [batch, n_classes]; normalises by the batch's statistics."""

    config: Config

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        config = self.config
        conv = partial(nn.Conv, use_bias=False, dtype=config.dtype)
        # 0.9 and 1e-5: momentum and epsilon of the reference implementations named above.
        norm = partial(
            nn.BatchNorm,
            use_running_average=False,
            momentum=0.9,
            epsilon=1e-5,
            dtype=config.dtype,
        )
        x = conv(config.width, (7, 7), strides=(2, 2), padding=3, name="conv_stem")(images)
        x = nn.relu(norm(name="norm_stem")(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for stage, n_blocks in enumerate(config.stage_sizes):
            for index in range(n_blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                name = f"stage_{stage}_block_{index}"
                width = config.width * 2**stage
                x = Block(width, config.widen, stride, config.bottleneck, conv, norm, name=name)(x)
        return nn.Dense(config.n_classes, dtype=config.dtype, name="head")(jnp.mean(x, axis=(1, 2)))


def init_state(config: Config, key: jax.Array) -> State:
    """The state at step 0; f32 parameters, optimizer moments and batch statistics."""
    images = jnp.zeros((1, config.image_size, config.image_size, 3), jnp.float32)
    variables = ResNet(config).init(key, images)
    optimizer = adamw(config.learning_rate, config.adam_epsilon)
    return new_state(variables["params"], optimizer, batch_stats=variables["batch_stats"])


def make_train_step(config: Config) -> TrainStep:
    """The step of one batch; metrics: `loss` in nats, `grad_norm`, `accuracy`."""
    model = ResNet(config)
    optimizer = adamw(config.learning_rate, config.adam_epsilon)

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        def loss_function(params: Any) -> tuple[jax.Array, tuple[Metrics, Any]]:
            variables = {"params": params, "batch_stats": state["batch_stats"]}
            logits, changed = model.apply(variables, batch["images"], mutable=["batch_stats"])
            loss, metrics = classification_loss(logits, batch["labels"])
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
