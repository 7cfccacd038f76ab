"""GPT-2 and GPT-3 (decoder-only transformer, learned positions, tied embedding) in Flax Linen.

GPT-3's alternation of dense and locally banded attention is left out: every layer is dense.  Dropout too.
"""

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
    gradient_step,
    new_state,
    random_tokens,
    round_up,
    token_cross_entropy,
)
from models.transformer import Block, stack_layers


@dataclass(frozen=True, kw_only=True)
class Config:
    """`vocab_multiple` rounds the embedding's rows up, as Megatron-LM does: 50257 is 29 times a prime."""

    n_layers: int
    dim: int
    n_heads: int
    seq_len: int
    batch_size: int
    vocab_size: int = 50257
    vocab_multiple: int = 128
    scan_layers: bool = False
    remat: bool = False
    dtype: str = "bfloat16"
    learning_rate: float = 3e-4
    adam_epsilon: float = 1e-5


_TINY = Config(
    n_layers=2,
    dim=64,
    n_heads=8,
    seq_len=16,
    batch_size=8,
    vocab_size=128,
    dtype="float32",
    learning_rate=1e-3,
    adam_epsilon=TINY_ADAM_EPSILON,
)
_GPT2 = Config(n_layers=12, dim=768, n_heads=12, seq_len=1024, batch_size=64)
_GPT2_DEEP = replace(_GPT2, scan_layers=True, remat=True)
_GPT3 = Config(n_layers=96, dim=12288, n_heads=96, seq_len=2048, batch_size=512, scan_layers=True, remat=True)

# Sources of the dims.  gpt2*: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners",
# table 2, with the heads of the released checkpoints (hparams.json: 12, 16, 20, 25).  gpt3-*: Brown et al.
# 2020, arXiv:2005.14165, table 2.1.  Batch sizes are ours: what a pod holds without accumulating gradients.
CONFIGS: dict[str, Config] = {
    "tiny": _TINY,
    "tiny-bf16": replace(_TINY, dtype="bfloat16"),
    "tiny-scan": replace(_TINY, scan_layers=True),
    "tiny-scan-remat": replace(_TINY, scan_layers=True, remat=True),
    "gpt2": _GPT2,
    "gpt2-scan": replace(_GPT2, scan_layers=True),
    "gpt2-medium": replace(_GPT2, n_layers=24, dim=1024, n_heads=16),
    "gpt2-large": replace(_GPT2_DEEP, n_layers=36, dim=1280, n_heads=20),
    "gpt2-xl": replace(_GPT2_DEEP, n_layers=48, dim=1600, n_heads=25),
    "gpt3-6.7b": replace(_GPT3, n_layers=32, dim=4096, n_heads=32),
    "gpt3-175b": _GPT3,
}


class Gpt(nn.Module):
    """Tokens [batch, length] int32 to logits [batch, length, rounded vocabulary]."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        # Standard deviations of GPT-2's published code (model.py): 0.02 and 0.01.
        embedding = nn.Embed(
            round_up(config.vocab_size, config.vocab_multiple),
            config.dim,
            dtype=config.dtype,
            embedding_init=nn.initializers.normal(0.02),
            name="token_embedding",
        )
        positions = self.param(
            "position_embedding", nn.initializers.normal(0.01), (config.seq_len, config.dim)
        )
        x = embedding(tokens) + positions[: tokens.shape[1]].astype(config.dtype)
        x = stack_layers(
            Block,
            x,
            depth=config.n_layers,
            scan=config.scan_layers,
            remat=config.remat,
            n_heads=config.n_heads,
            hidden_dim=4 * config.dim,
            causal=True,
            dtype=config.dtype,
            norm_epsilon=1e-5,
        )
        x = nn.LayerNorm(1e-5, dtype=config.dtype, name="final_norm")(x)
        return embedding.attend(x)


def init_state(config: Config, key: jax.Array) -> State:
    """The state at step 0; f32 parameters and optimizer moments."""
    tokens = jnp.zeros((1, config.seq_len), jnp.int32)
    return new_state(
        Gpt(config).init(key, tokens)["params"], adamw(config.learning_rate, config.adam_epsilon)
    )


def make_train_step(config: Config) -> TrainStep:
    """The step of one batch; metrics: `loss` in nats a token, `grad_norm`."""
    model = Gpt(config)

    def loss_function(params: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        logits: Any = model.apply({"params": params}, batch["inputs"])
        return token_cross_entropy(logits, batch["targets"]), {}

    return gradient_step(loss_function, adamw(config.learning_rate, config.adam_epsilon))


def make_batch(config: Config, key: jax.Array) -> Batch:
    """`inputs` and `targets`, each [batch_size, seq_len] int32."""
    return random_tokens(key, config.batch_size, config.seq_len, config.vocab_size)


def batch_shapes(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of `make_batch`, allocating nothing."""
    return jax.eval_shape(lambda: make_batch(config, jax.random.key(0)))
