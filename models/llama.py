"""Llama 2 and 3 in Flax NNX: grouped-query attention, rotary positions, SwiGLU, RMSNorm, untied head.

The train state holds the parameters as a pure dict (`params/layers/0/attention/query/kernel`, or, scanned,
`params/layers/attention/query/kernel` with the layer as first dimension); the module's static half is rebuilt
from the config, so that the step is a plain function of pytrees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx

from models.attention import attend, rotate
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


@dataclass(frozen=True, kw_only=True)
class Config:
    """`n_kv_heads` divides `n_heads`; `hidden_dim` is the width inside SwiGLU."""

    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int
    seq_len: int
    batch_size: int
    rope_theta: float = 10000.0
    scan_layers: bool = False
    remat: bool = False
    dtype: str = "bfloat16"
    learning_rate: float = 3e-4
    adam_epsilon: float = 1e-5


_TINY = Config(
    n_layers=2,
    dim=64,
    n_heads=16,
    n_kv_heads=8,
    hidden_dim=128,
    vocab_size=128,
    seq_len=16,
    batch_size=8,
    dtype="float32",
    learning_rate=1e-3,
    adam_epsilon=TINY_ADAM_EPSILON,
)
_LLAMA2_7B = Config(
    n_layers=32,
    dim=4096,
    n_heads=32,
    n_kv_heads=32,
    hidden_dim=11008,
    vocab_size=32000,
    seq_len=4096,
    batch_size=64,
    scan_layers=True,
    remat=True,
)
_LLAMA3_8B = replace(
    _LLAMA2_7B, n_kv_heads=8, hidden_dim=14336, vocab_size=128256, seq_len=8192, rope_theta=500000.0
)

# Sources of the dims.  llama2-7b: Touvron et al. 2023, arXiv:2302.13971, table 2, and arXiv:2307.09288, table
# 1 (hidden_dim, not printed there, from the released params.json).  llama3-*: Grattafiori et al. 2024,
# arXiv:2407.21783, table 3; its vocabulary of 128 K is 128256 in the release.  Batch sizes are ours: what a
# pod holds without accumulating gradients.  bytes-3m, no paper's, reads raw bytes and trains on a CPU.
CONFIGS: dict[str, Config] = {
    "tiny": _TINY,
    "tiny-bf16": replace(_TINY, dtype="bfloat16"),
    "tiny-scan": replace(_TINY, scan_layers=True),
    "tiny-scan-remat": replace(_TINY, scan_layers=True, remat=True),
    "bytes-3m": Config(
        n_layers=4,
        dim=256,
        n_heads=8,
        n_kv_heads=4,
        hidden_dim=704,
        vocab_size=256,
        seq_len=128,
        batch_size=16,
        scan_layers=True,
        dtype="float32",
        learning_rate=1e-3,
    ),
    "llama2-7b": _LLAMA2_7B,
    "llama3-8b": _LLAMA3_8B,
    "llama3-70b": replace(_LLAMA3_8B, n_layers=80, dim=8192, n_heads=64, hidden_dim=28672, batch_size=256),
}


class Attention(nnx.Module):
    """Causal grouped-query attention; [batch, length, dim] to the same."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        head_dim = config.dim // config.n_heads

        def project(n_heads: int) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(
                config.dim, (n_heads, head_dim), use_bias=False, dtype=config.dtype, rngs=rngs
            )

        self.query = project(config.n_heads)
        self.key = project(config.n_kv_heads)
        self.value = project(config.n_kv_heads)
        self.out = nnx.LinearGeneral(
            (config.n_heads, head_dim),
            config.dim,
            axis=(-2, -1),
            use_bias=False,
            dtype=config.dtype,
            rngs=rngs,
        )
        self.rope_theta = config.rope_theta

    def __call__(self, x: jax.Array) -> jax.Array:
        query = rotate(self.query(x), self.rope_theta)
        key = rotate(self.key(x), self.rope_theta)
        return self.out(attend(query, key, self.value(x), causal=True))


class SwiGlu(nnx.Module):
    """down(silu(gate(x)) * up(x)); [batch, length, dim] to the same."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        def linear(n_in: int, n_out: int) -> nnx.Linear:
            return nnx.Linear(n_in, n_out, use_bias=False, dtype=config.dtype, rngs=rngs)

        self.gate = linear(config.dim, config.hidden_dim)
        self.up = linear(config.dim, config.hidden_dim)
        self.down = linear(config.hidden_dim, config.dim)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


def _norm(config: Config, rngs: nnx.Rngs) -> nnx.RMSNorm:
    # 1e-5: norm_eps of the released params.json of Llama 2 and 3.
    return nnx.RMSNorm(config.dim, epsilon=1e-5, dtype=config.dtype, rngs=rngs)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = _norm(config, rngs)
        self.mlp = SwiGlu(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def _apply_block(block: Block, x: jax.Array) -> jax.Array:
    return block(x)


class Llama(nnx.Module):
    """Tokens [batch, length] int32 to logits [batch, length, vocab_size]."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embedding = nnx.Embed(config.vocab_size, config.dim, dtype=config.dtype, rngs=rngs)
        if config.scan_layers:

            @nnx.split_rngs(splits=config.n_layers)
            @nnx.vmap
            def stacked_blocks(rngs: nnx.Rngs) -> Block:
                return Block(config, rngs=rngs)

            self.layers: Any = stacked_blocks(rngs)
        else:
            self.layers = nnx.List([Block(config, rngs=rngs) for _ in range(config.n_layers)])
        self.final_norm = _norm(config, rngs)
        self.head = nnx.Linear(config.dim, config.vocab_size, use_bias=False, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        x = self.embedding(tokens)
        if config.scan_layers:
            # Inside a scan XLA can't undo the recomputation anyway, and barriers against it cost time.
            apply = nnx.remat(_apply_block, prevent_cse=False) if config.remat else _apply_block
            x = nnx.scan(apply, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)
        else:
            apply = nnx.remat(_apply_block) if config.remat else _apply_block
            for block in self.layers:
                x = apply(block, x)
        return self.head(self.final_norm(x))


def init_state(config: Config, key: jax.Array) -> State:
    """The state at step 0; f32 parameters and optimizer moments."""
    params = nnx.to_pure_dict(nnx.state(Llama(config, rngs=nnx.Rngs(key)), nnx.Param))
    return new_state(params, adamw(config.learning_rate, config.adam_epsilon))


def make_train_step(config: Config) -> TrainStep:
    """The step of one batch; metrics: `loss` in nats a token, `grad_norm`."""
    structure, _ = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))), nnx.Param)

    def loss_function(params: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        logits = nnx.merge(structure, nnx.State(params))(batch["inputs"])
        return token_cross_entropy(logits, batch["targets"]), {}

    return gradient_step(loss_function, adamw(config.learning_rate, config.adam_epsilon))


def make_batch(config: Config, key: jax.Array) -> Batch:
    """`inputs` and `targets`, each [batch_size, seq_len] int32."""
    return random_tokens(key, config.batch_size, config.seq_len, config.vocab_size)


def batch_shapes(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of `make_batch`, allocating nothing."""
    return jax.eval_shape(lambda: make_batch(config, jax.random.key(0)))
