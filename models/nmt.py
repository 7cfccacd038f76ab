"""Translation by LSTMs (Sutskever et al. 2014) with global attention (Luong et al. 2015, arXiv:1508.04025).

The decoder attends after its last layer, by their "general" score, and hands nothing of that on in time.  Sentences
fill their whole length; a batch starts from a zero state.
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


@dataclass(frozen=True, kw_only=True)
class Config:
    """`n_layers` in the encoder and as many in the decoder, of `hidden_dim`, as the embeddings are."""

    n_layers: int
    hidden_dim: int
    vocab_size: int
    seq_len: int
    batch_size: int
    vocab_multiple: int = 8
    dtype: str = "bfloat16"
    learning_rate: float = 1e-3
    adam_epsilon: float = 1e-5


_TINY = Config(
    n_layers=2,
    hidden_dim=32,
    vocab_size=128,
    seq_len=12,
    batch_size=8,
    dtype="float32",
    learning_rate=1e-2,
    adam_epsilon=TINY_ADAM_EPSILON,
)
_LUONG = Config(n_layers=4, hidden_dim=1000, vocab_size=50_000, seq_len=50, batch_size=128)

# Sources of the dims.  luong-2015: section 4.1 of the paper.  flexflow: the NMT example of FlexFlow (Jia et al. 2018,
# arXiv:1807.05358), 64 sentences on each of 16 devices.
CONFIGS: dict[str, Config] = {
    "tiny": _TINY,
    "tiny-bf16": replace(_TINY, dtype="bfloat16"),
    "luong-2015": _LUONG,
    "flexflow": Config(n_layers=2, hidden_dim=2048, vocab_size=20_480, seq_len=20, batch_size=1024),
}

Carry = tuple[jax.Array, jax.Array]


class Cell(nn.Module):
    """One step in time: (cell, hidden) and the input's share of the gates [batch, 4, hidden_dim]."""

    hidden_dim: int
    dtype: str

    @nn.compact
    def __call__(self, carry: Carry, input_gates: jax.Array) -> tuple[Carry, jax.Array]:
        cell, hidden = carry
        recurrent = nn.DenseGeneral((4, self.hidden_dim), use_bias=False, dtype=self.dtype, name="recurrent")
        gates = input_gates + recurrent(hidden)
        write, keep, read = (nn.sigmoid(gates[:, index]) for index in range(3))
        cell = keep * cell + write * jnp.tanh(gates[:, 3])
        hidden = read * jnp.tanh(cell)
        return (cell, hidden), hidden


class Stack(nn.Module):
    """Tokens [batch, length] int32 and each layer's first (cell, hidden) to hidden [batch, length, hidden_dim] of the
    last layer and each layer's last (cell, hidden)."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array, carries: list[Carry]) -> tuple[jax.Array, list[Carry]]:
        config = self.config
        vocabulary = round_up(config.vocab_size, config.vocab_multiple)
        x = nn.Embed(vocabulary, config.hidden_dim, dtype=config.dtype, name="embedding")(tokens)
        over_time = nn.scan(
            Cell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1
        )
        last = []
        for index, carry in enumerate(carries):
            # The input's share of all gates is one large matmul outside the loop.
            gates = nn.DenseGeneral((4, config.hidden_dim), dtype=config.dtype, name=f"input_{index}")(x)
            carry, x = over_time(config.hidden_dim, config.dtype, name=f"cell_{index}")(carry, gates)
            last.append(carry)
        return x, last


class Attention(nn.Module):
    """tanh(W [context; query]): queries [batch, length, hidden_dim] over memory [batch, source, hidden_dim]."""

    config: Config

    @nn.compact
    def __call__(self, queries: jax.Array, memory: jax.Array) -> jax.Array:
        config = self.config
        keys = nn.Dense(config.hidden_dim, use_bias=False, dtype=config.dtype, name="score")(memory)
        scores = jnp.einsum("bth,bsh->bts", queries, keys, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores, axis=-1).astype(memory.dtype)
        context = jnp.einsum("bts,bsh->bth", weights, memory)
        both = jnp.concatenate([context, queries], axis=-1)
        return jnp.tanh(nn.Dense(config.hidden_dim, use_bias=False, dtype=config.dtype, name="combine")(both))


class Translator(nn.Module):
    """Source and shifted target [batch, length] int32 to logits [batch, length, rounded vocabulary]."""

    config: Config

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        config = self.config
        zero = jnp.zeros((source.shape[0], config.hidden_dim), config.dtype)
        memory, carries = Stack(config, name="encoder")(source, [(zero, zero)] * config.n_layers)
        decoded, _ = Stack(config, name="decoder")(target, carries)
        attended = Attention(config, name="attention")(decoded, memory)
        vocabulary = round_up(config.vocab_size, config.vocab_multiple)
        return nn.Dense(vocabulary, use_bias=False, dtype=config.dtype, name="head")(attended)


def init_state(config: Config, key: jax.Array) -> State:
    """The state at step 0; f32 parameters and optimizer moments."""
    tokens = jnp.zeros((1, config.seq_len), jnp.int32)
    params = Translator(config).init(key, tokens, tokens)["params"]
    return new_state(params, adamw(config.learning_rate, config.adam_epsilon))


def make_train_step(config: Config) -> TrainStep:
    """The step of one batch; metrics: `loss` in nats a target token, `grad_norm`."""
    model = Translator(config)

    def loss_function(params: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        logits: Any = model.apply({"params": params}, batch["source"], batch["inputs"])
        return token_cross_entropy(logits, batch["targets"]), {}

    return gradient_step(loss_function, adamw(config.learning_rate, config.adam_epsilon))


def make_batch(config: Config, key: jax.Array) -> Batch:
    """`source`, and the translation as `inputs` and, one position ahead, `targets`: [batch_size, seq_len] int32."""
    source_key, target_key = jax.random.split(key)
    source = random_tokens(source_key, config.batch_size, config.seq_len, config.vocab_size)["inputs"]
    return {
        "source": source,
        **random_tokens(target_key, config.batch_size, config.seq_len, config.vocab_size),
    }


def batch_shapes(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of `make_batch`, allocating nothing."""
    return jax.eval_shape(lambda: make_batch(config, jax.random.key(0)))
