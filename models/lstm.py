"""An LSTM language model in Flax Linen, scanned over time, optionally with a recurrent projection.

The recurrent projection (LSTMP) is Sak et al. 2014's, arXiv:1402.1128, without its peepholes.  Each batch
starts from a zero state.
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
    classification_loss,
    gradient_step,
    new_state,
    random_tokens,
    round_up,
    token_cross_entropy,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """`projection_dim` is the width of what a layer hands on and back; None: `hidden_dim`.

    `n_classes`: the whole text has one of so many, told from the last output; None: the next tokens are told.
    """

    n_layers: int
    embedding_dim: int
    hidden_dim: int
    projection_dim: int | None
    vocab_size: int
    seq_len: int
    batch_size: int
    n_classes: int | None = None
    vocab_multiple: int = 8
    dtype: str = "bfloat16"
    learning_rate: float = 1e-3
    adam_epsilon: float = 1e-5


_TINY = Config(
    n_layers=2,
    embedding_dim=32,
    hidden_dim=64,
    projection_dim=None,
    vocab_size=128,
    seq_len=16,
    batch_size=8,
    dtype="float32",
    learning_rate=1e-2,
    adam_epsilon=TINY_ADAM_EPSILON,
)
_PTB_LARGE = Config(
    n_layers=2,
    embedding_dim=1500,
    hidden_dim=1500,
    projection_dim=None,
    vocab_size=10000,
    seq_len=35,
    batch_size=64,
)

# Sources of the dims.  ptb-*: Zaremba et al. 2014, arXiv:1409.2329, section 4.1.  big-lstm: Jozefowicz et al.
# 2016, arXiv:1602.02410, table 1, "2-layer LSTM-8192-1024 (Big LSTM)", with the full softmax and a word
# embedding.  rnnlm and rnntc: the language model and the text classifier of FlexFlow (Jia et al. 2018,
# arXiv:1807.05358, section 8), 2 and 4 layers unrolled over 40 words.  Batch sizes are ours.
CONFIGS: dict[str, Config] = {
    "tiny": _TINY,
    "tiny-bf16": replace(_TINY, dtype="bfloat16"),
    "tiny-projected": replace(_TINY, projection_dim=32),
    "tiny-classes": replace(_TINY, n_classes=4),
    "ptb-medium": replace(_PTB_LARGE, embedding_dim=650, hidden_dim=650),
    "ptb-large": _PTB_LARGE,
    "big-lstm": Config(
        n_layers=2,
        embedding_dim=1024,
        hidden_dim=8192,
        projection_dim=1024,
        vocab_size=793471,
        seq_len=20,
        batch_size=128,
    ),
    "rnnlm": replace(_PTB_LARGE, embedding_dim=2048, hidden_dim=2048, seq_len=40),
    "rnntc": replace(
        _PTB_LARGE, n_layers=4, embedding_dim=1024, hidden_dim=1024, vocab_size=20000, seq_len=40, n_classes=2
    ),
}


class Cell(nn.Module):
    """One step in time: (cell, hidden) and the input's share of the gates [batch, 4, hidden_dim]."""

    hidden_dim: int
    projection_dim: int | None
    dtype: str

    @nn.compact
    def __call__(
        self, carry: tuple[jax.Array, jax.Array], input_gates: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        cell, hidden = carry
        recurrent = nn.DenseGeneral((4, self.hidden_dim), use_bias=False, dtype=self.dtype, name="recurrent")
        gates = input_gates + recurrent(hidden)
        write, keep, read = (nn.sigmoid(gates[:, index]) for index in range(3))
        cell = keep * cell + write * jnp.tanh(gates[:, 3])
        hidden = read * jnp.tanh(cell)
        if self.projection_dim is not None:
            hidden = nn.Dense(self.projection_dim, use_bias=False, dtype=self.dtype, name="projection")(
                hidden
            )
        return (cell, hidden), hidden


class LstmLayer(nn.Module):
    """[batch, length, width] to [batch, length, projection_dim or hidden_dim]."""

    hidden_dim: int
    projection_dim: int | None
    dtype: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # The input's share of all gates is one large matmul outside the loop.
        gates = nn.DenseGeneral((4, self.hidden_dim), dtype=self.dtype, name="input")(x)
        over_time = nn.scan(
            Cell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1
        )
        cell = jnp.zeros((x.shape[0], self.hidden_dim), gates.dtype)
        hidden = jnp.zeros((x.shape[0], self.projection_dim or self.hidden_dim), gates.dtype)
        _, outputs = over_time(self.hidden_dim, self.projection_dim, self.dtype, name="cell")(
            (cell, hidden), gates
        )
        return outputs


class LstmLanguageModel(nn.Module):
    """Tokens [batch, length] int32 to logits [batch, length, rounded vocabulary], or [batch, n_classes]."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        vocabulary = round_up(config.vocab_size, config.vocab_multiple)
        x = nn.Embed(vocabulary, config.embedding_dim, dtype=config.dtype, name="embedding")(tokens)
        for index in range(config.n_layers):
            layer = LstmLayer(config.hidden_dim, config.projection_dim, config.dtype, name=f"layer_{index}")
            x = layer(x)
        if config.n_classes is not None:
            return nn.Dense(config.n_classes, dtype=config.dtype, name="head")(x[:, -1])
        return nn.Dense(vocabulary, dtype=config.dtype, name="head")(x)


def init_state(config: Config, key: jax.Array) -> State:
    """The state at step 0; f32 parameters and optimizer moments."""
    tokens = jnp.zeros((1, config.seq_len), jnp.int32)
    return new_state(
        LstmLanguageModel(config).init(key, tokens)["params"],
        adamw(config.learning_rate, config.adam_epsilon),
    )


def make_train_step(config: Config) -> TrainStep:
    """The step of one batch; metrics: `loss` in nats a token, or a text with its `accuracy`; `grad_norm`."""
    model = LstmLanguageModel(config)

    def loss_function(params: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        logits: Any = model.apply({"params": params}, batch["inputs"])
        if config.n_classes is not None:
            return classification_loss(logits, batch["labels"])
        return token_cross_entropy(logits, batch["targets"]), {}

    return gradient_step(loss_function, adamw(config.learning_rate, config.adam_epsilon))


def make_batch(config: Config, key: jax.Array) -> Batch:
    """`inputs` and `targets`, each [batch_size, seq_len] int32; `labels` [batch_size] int32 instead of targets for
    classes."""
    tokens = random_tokens(key, config.batch_size, config.seq_len, config.vocab_size)
    if config.n_classes is None:
        return tokens
    labels = jax.random.randint(key, (config.batch_size,), 0, config.n_classes, jnp.int32)
    return {"inputs": tokens["inputs"], "labels": labels}


def batch_shapes(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of `make_batch`, allocating nothing."""
    return jax.eval_shape(lambda: make_batch(config, jax.random.key(0)))
