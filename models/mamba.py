"""Mamba (Gu and Dao 2023, arXiv:2312.00752): a selective state space model, its recurrence as an associative scan.

The sequence is cut into chunks: within one, the recurrence is a `lax.associative_scan`; a `lax.scan` hands the state
from chunk to chunk, so that the states of one chunk at a time are in memory.
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
    token_cross_entropy,
)
from models.transformer import stack_layers


@dataclass(frozen=True, kw_only=True)
class Config:
    """Blocks of width `expand` * `dim`, `state_dim` states a channel; `chunk` divides `seq_len`."""

    n_layers: int
    dim: int
    seq_len: int
    batch_size: int
    expand: int = 2
    state_dim: int = 16
    conv_width: int = 4
    chunk: int = 128
    vocab_size: int = 50280
    scan_layers: bool = False
    remat: bool = False
    dtype: str = "bfloat16"
    learning_rate: float = 3e-4
    adam_epsilon: float = 1e-5

    @property
    def inner_dim(self) -> int:
        """Channels inside a block."""
        return self.expand * self.dim

    @property
    def step_rank(self) -> int:
        """Rank of the projection that makes the step sizes (section 3.6): dim / 16, rounded up."""
        return -(-self.dim // 16)


_TINY = Config(
    n_layers=2,
    dim=64,
    seq_len=16,
    batch_size=8,
    state_dim=8,
    chunk=8,
    vocab_size=128,
    dtype="float32",
    learning_rate=1e-3,
    adam_epsilon=TINY_ADAM_EPSILON,
)
_130M = Config(n_layers=24, dim=768, seq_len=2048, batch_size=256, scan_layers=True, remat=True)

# Dims: the released checkpoints' configurations (state-spaces/mamba-*); state, width of the convolution and expansion:
# section 3.4 and 3.6.  Batch: 0.5M tokens of 2048, the paper's table 12.  The vocabulary is as released:
# 50277 tokens, rounded up to 8.
CONFIGS: dict[str, Config] = {
    "tiny": _TINY,
    "tiny-bf16": replace(_TINY, dtype="bfloat16"),
    "tiny-scan": replace(_TINY, scan_layers=True, remat=True),
    "mamba-130m": _130M,
    "mamba-370m": replace(_130M, n_layers=48, dim=1024),
    "mamba-790m": replace(_130M, n_layers=48, dim=1536),
    "mamba-1.4b": replace(_130M, n_layers=48, dim=2048),
    "mamba-2.8b": replace(_130M, n_layers=64, dim=2560),
}


def selective_scan(decay: jax.Array, inputs: jax.Array, readout: jax.Array, *, chunk: int) -> jax.Array:
    """y[t] = sum over states of readout[t] * h[t], where h[t] = decay[t] * h[t - 1] + inputs[t] and h[-1] = 0.

    decay, inputs: [batch, length, channel, state]; readout: [batch, length, state]; all f32, `length` a multiple of
    `chunk`.  Returns [batch, length, channel].
    """
    batch, length, channels, states = decay.shape

    def combine(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> Any:
        return left[0] * right[0], left[1] * right[0] + right[1]

    def one_chunk(state: jax.Array, parts: tuple[jax.Array, jax.Array, jax.Array]) -> Any:
        decay, inputs, readout = parts
        products, sums = jax.lax.associative_scan(combine, (decay, inputs), axis=1)
        history = products * state[:, None] + sums
        return history[:, -1], jnp.einsum("btcs,bts->btc", history, readout)

    def chunks(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(batch, length // chunk, chunk, *x.shape[2:]), 1, 0)

    start = jnp.zeros((batch, channels, states), jnp.float32)
    _, outputs = jax.lax.scan(one_chunk, start, (chunks(decay), chunks(inputs), chunks(readout)))
    return jnp.moveaxis(outputs, 0, 1).reshape(batch, length, channels)


def _log_of_counting(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """log(1), log(2), ... along the states: the S4D-Real initialisation (section 3.6) of -log of the decay rates."""
    del key
    return jnp.broadcast_to(jnp.log(jnp.arange(1, shape[-1] + 1, dtype=dtype)), shape)


def _softplus_inverse_of_steps(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """softplus^-1 of step sizes drawn log-uniformly from [0.001, 0.1] (section 3.6)."""
    steps = jnp.exp(jax.random.uniform(key, shape, dtype, jnp.log(1e-3), jnp.log(1e-1)))
    return steps + jnp.log(-jnp.expm1(-steps))


class Mixer(nn.Module):
    """The paper's block (figure 3): gated causal convolution and selective scan; [batch, length, dim] to the same."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        inner, states = config.inner_dim, config.state_dim

        def linear(width: int, name: str) -> nn.Dense:
            return nn.Dense(width, use_bias=False, dtype=config.dtype, name=name)

        u, gate = jnp.split(linear(2 * inner, "in")(x), 2, axis=-1)
        # Each channel alone, looking back only: padded on the left.
        u = nn.Conv(
            inner,
            (config.conv_width,),
            feature_group_count=inner,
            padding=((config.conv_width - 1, 0),),
            dtype=config.dtype,
            name="conv",
        )(u)
        u = nn.silu(u)
        rank = config.step_rank
        small, writing, reading = jnp.split(linear(rank + 2 * states, "select")(u), [rank, rank + states], axis=-1)
        steps = nn.Dense(inner, bias_init=_softplus_inverse_of_steps, dtype=config.dtype, name="steps")(small)
        steps = nn.softplus(steps.astype(jnp.float32))
        rates = -jnp.exp(self.param("log_rates", _log_of_counting, (inner, states)))
        wide_u = u.astype(jnp.float32)
        decay = jnp.exp(steps[..., None] * rates)
        inputs = (steps * wide_u)[..., None] * writing.astype(jnp.float32)[:, :, None]
        y = selective_scan(decay, inputs, reading.astype(jnp.float32), chunk=config.chunk)
        y = y + wide_u * self.param("skip", nn.initializers.ones, (inner,))
        return linear(config.dim, "out")(y.astype(config.dtype) * nn.silu(gate))


class Block(nn.Module):
    """x + mixer(norm(x))."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        normed = nn.RMSNorm(epsilon=1e-5, dtype=self.config.dtype, name="norm")(x)
        return x + Mixer(self.config, name="mixer")(normed)


class Mamba(nn.Module):
    """Tokens [batch, length] int32 to logits [batch, length, vocab_size]; the embedding is tied."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        embedding = nn.Embed(
            config.vocab_size,
            config.dim,
            dtype=config.dtype,
            embedding_init=nn.initializers.normal(0.02),
            name="embedding",
        )
        x = stack_layers(
            Block,
            embedding(tokens),
            depth=config.n_layers,
            scan=config.scan_layers,
            remat=config.remat,
            config=config,
        )
        return embedding.attend(nn.RMSNorm(epsilon=1e-5, dtype=config.dtype, name="final_norm")(x))


def init_state(config: Config, key: jax.Array) -> State:
    """The state at step 0; f32 parameters and optimizer moments."""
    tokens = jnp.zeros((1, config.seq_len), jnp.int32)
    return new_state(
        Mamba(config).init(key, tokens)["params"], adamw(config.learning_rate, config.adam_epsilon)
    )


def make_train_step(config: Config) -> TrainStep:
    """The step of one batch; metrics: `loss` in nats a token, `grad_norm`."""
    model = Mamba(config)

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
