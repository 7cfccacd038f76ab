"""Vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929), a classifier, in Flax Linen."""

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
from models.transformer import Block, stack_layers


@dataclass(frozen=True, kw_only=True)
class Config:
    """Images of `image_size` squared and 3 channels, cut into patches of `patch_size` squared."""

    n_layers: int
    dim: int
    n_heads: int
    hidden_dim: int
    patch_size: int
    image_size: int = 224
    n_classes: int = 1000
    batch_size: int = 1024
    scan_layers: bool = False
    remat: bool = False
    dtype: str = "bfloat16"
    learning_rate: float = 1e-3
    adam_epsilon: float = 1e-5


_TINY = Config(
    n_layers=2,
    dim=64,
    n_heads=8,
    hidden_dim=256,
    patch_size=8,
    image_size=32,
    n_classes=16,
    batch_size=8,
    dtype="float32",
    adam_epsilon=TINY_ADAM_EPSILON,
)

# Dims: the paper's table 1, the patch size in the name; ViT-H/14 at its pre-training resolution of 224.
# Batch sizes are ours.
CONFIGS: dict[str, Config] = {
    "tiny": _TINY,
    "tiny-bf16": replace(_TINY, dtype="bfloat16"),
    "tiny-scan": replace(_TINY, scan_layers=True),
    "vit-b16": Config(n_layers=12, dim=768, n_heads=12, hidden_dim=3072, patch_size=16),
    "vit-l16": Config(n_layers=24, dim=1024, n_heads=16, hidden_dim=4096, patch_size=16),
    "vit-h14": Config(
        n_layers=32, dim=1280, n_heads=16, hidden_dim=5120, patch_size=14, scan_layers=True, remat=True
    ),
}


class Vit(nn.Module):
    """Images [batch, size, size, 3] to logits [batch, n_classes], read from a class token."""

    config: Config

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        config = self.config
        patch = (config.patch_size, config.patch_size)
        x = nn.Conv(config.dim, patch, strides=patch, padding="VALID", dtype=config.dtype, name="patches")(
            images
        )
        x = x.reshape(x.shape[0], -1, config.dim)
        class_token = self.param("class_token", nn.initializers.zeros, (1, 1, config.dim)).astype(
            config.dtype
        )
        x = jnp.concatenate([jnp.broadcast_to(class_token, (x.shape[0], 1, config.dim)), x], axis=1)
        # 0.02 is the standard deviation in the paper's released code (vision_transformer).
        positions = self.param("position_embedding", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        x = stack_layers(
            Block,
            x + positions.astype(config.dtype),
            depth=config.n_layers,
            scan=config.scan_layers,
            remat=config.remat,
            n_heads=config.n_heads,
            hidden_dim=config.hidden_dim,
            causal=False,
            dtype=config.dtype,
            norm_epsilon=1e-6,
        )
        x = nn.LayerNorm(1e-6, dtype=config.dtype, name="final_norm")(x[:, 0])
        return nn.Dense(config.n_classes, dtype=config.dtype, name="head")(x)


def init_state(config: Config, key: jax.Array) -> State:
    """The state at step 0; f32 parameters and optimizer moments."""
    images = jnp.zeros((1, config.image_size, config.image_size, 3), jnp.float32)
    return new_state(
        Vit(config).init(key, images)["params"], adamw(config.learning_rate, config.adam_epsilon)
    )


def make_train_step(config: Config) -> TrainStep:
    """The step of one batch; metrics: `loss` in nats, `grad_norm`, `accuracy`."""
    model = Vit(config)

    def loss_function(params: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        logits: Any = model.apply({"params": params}, batch["images"])
        return classification_loss(logits, batch["labels"])

    return gradient_step(loss_function, adamw(config.learning_rate, config.adam_epsilon))


def make_batch(config: Config, key: jax.Array) -> Batch:
    """`images` [batch_size, size, size, 3] f32 and `labels` [batch_size] int32."""
    shape = (config.batch_size, config.image_size, config.image_size, 3)
    return random_images(key, shape, config.n_classes)


def batch_shapes(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of `make_batch`, allocating nothing."""
    return jax.eval_shape(lambda: make_batch(config, jax.random.key(0)))
