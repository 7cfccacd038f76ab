"""A decoder-only mixture-of-experts transformer in Flax Linen: Mixtral's block, GShard's dense dispatch.

Tokens are sent to experts by one-hot einsums with a fixed capacity (Lepikhin et al. 2020, arXiv:2006.16668,
section 2.2), each sequence being one group, so every shape is static: a change of sharding from groups to
experts between dispatch and the experts' matmuls is an all_to_all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

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
from models.transformer import stack_layers


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every `moe_every`-th layer has experts, the others one dense SwiGLU of the same `hidden_dim`."""

    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    n_experts: int
    top_k: int
    vocab_size: int
    seq_len: int
    batch_size: int
    moe_every: int = 1
    capacity_factor: float = 1.25
    balance_weight: float = 0.01
    rope_theta: float = 1e6
    scan_layers: bool = False
    remat: bool = False
    dtype: str = "bfloat16"
    learning_rate: float = 3e-4
    adam_epsilon: float = 1e-5

    @property
    def capacity(self) -> int:
        """The tokens of one sequence that one expert takes; those beyond it pass by the residual alone."""
        return math.ceil(self.capacity_factor * self.top_k * self.seq_len / self.n_experts)


_TINY = Config(
    n_layers=2,
    dim=64,
    n_heads=16,
    n_kv_heads=8,
    head_dim=8,
    hidden_dim=128,
    n_experts=8,
    top_k=2,
    capacity_factor=2.0,
    vocab_size=128,
    seq_len=16,
    batch_size=8,
    dtype="float32",
    learning_rate=1e-3,
    adam_epsilon=TINY_ADAM_EPSILON,
)
_MIXTRAL_8X7B = Config(
    n_layers=32,
    dim=4096,
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    hidden_dim=14336,
    n_experts=8,
    top_k=2,
    vocab_size=32000,
    seq_len=4096,
    batch_size=128,
    scan_layers=True,
    remat=True,
)

# Sources of the dims.  mixtral-*: Jiang et al. 2024, arXiv:2401.04088, table 1; 8x22b: the release's
# config.json.  switch-base: Fedus et al. 2021, arXiv:2101.03961, table 9, "Switch-Base", whose 12 encoder and
# 12 decoder layers stand here as one decoder without cross-attention; capacity factor 1.25 and loss weight
# 0.01 are that paper's too (section 2.2).  Batch sizes are ours.
CONFIGS: dict[str, Config] = {
    "tiny": _TINY,
    "tiny-bf16": replace(_TINY, dtype="bfloat16"),
    "tiny-scan": replace(_TINY, scan_layers=True),
    "tiny-alternating": replace(_TINY, moe_every=2),
    "mixtral-8x7b": _MIXTRAL_8X7B,
    "mixtral-8x22b": replace(
        _MIXTRAL_8X7B, n_layers=56, dim=6144, n_heads=48, hidden_dim=16384, vocab_size=32768, batch_size=256
    ),
    "switch-base": Config(
        n_layers=24,
        dim=768,
        n_heads=12,
        n_kv_heads=12,
        head_dim=64,
        hidden_dim=2048,
        n_experts=128,
        top_k=1,
        moe_every=2,
        vocab_size=32128,
        seq_len=512,
        batch_size=256,
        scan_layers=True,
        remat=True,
    ),
}


def route(router_logits: jax.Array, *, top_k: int, capacity: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Assigns tokens to slots of experts.

    router_logits: [group, token, expert] f32.  Returns `dispatch` [group, token, expert, capacity], 1 where a
    token takes that slot; `combine` of the same shape, the weight with which the slot's result returns to the
    token; and the load-balancing loss of Fedus et al. 2021, equation 4.  Slots are given out first to all
    first choices in token order, then to the second ones, and so on.
    """
    n_experts = router_logits.shape[-1]
    probabilities = jax.nn.softmax(router_logits, axis=-1)
    weights, chosen = jax.lax.top_k(probabilities, top_k)
    if top_k > 1:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    choices = jax.nn.one_hot(chosen, n_experts, dtype=jnp.float32)  # [group, token, choice, expert]

    before_in_choice = jnp.cumsum(choices, axis=1) - choices
    per_choice = jnp.sum(choices, axis=1)
    before_in_earlier_choices = jnp.cumsum(per_choice, axis=1) - per_choice
    before = before_in_choice + before_in_earlier_choices[:, None]
    position = jnp.sum(before * choices, axis=-1).astype(jnp.int32)
    slots = jax.nn.one_hot(position, capacity, dtype=jnp.float32)  # all zero beyond the capacity

    dispatch = jnp.einsum("gtke,gtkc->gtec", choices, slots)
    combine = jnp.einsum("gtk,gtke,gtkc->gtec", weights, choices, slots)
    load = jnp.mean(choices[:, :, 0], axis=1)
    balance_loss = n_experts * jnp.mean(jnp.sum(load * jnp.mean(probabilities, axis=1), axis=-1))
    return dispatch, combine, balance_loss


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions; [batch, length, dim] to the same."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config

        def project(n_heads: int, name: str) -> jax.Array:
            heads = (n_heads, config.head_dim)
            return nn.DenseGeneral(heads, use_bias=False, dtype=config.dtype, name=name)(x)

        query = rotate(project(config.n_heads, "query"), config.rope_theta)
        key = rotate(project(config.n_kv_heads, "key"), config.rope_theta)
        mixed = attend(query, key, project(config.n_kv_heads, "value"), causal=True)
        out = nn.DenseGeneral(config.dim, axis=(-2, -1), use_bias=False, dtype=config.dtype, name="out")
        return out(mixed)


class DenseMlp(nn.Module):
    """SwiGLU; [batch, length, dim] to the same."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config

        def linear(width: int, name: str) -> nn.Dense:
            return nn.Dense(width, use_bias=False, dtype=config.dtype, name=name)

        hidden = nn.silu(linear(config.hidden_dim, "gate")(x)) * linear(config.hidden_dim, "up")(x)
        return linear(config.dim, "down")(hidden)


class ExpertMlp(nn.Module):
    """A SwiGLU an expert; [group, token, dim] to the same, and the load-balancing loss."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = self.config
        # The router works in f32 (Fedus et al. 2021, section 2.4).
        router = nn.Dense(config.n_experts, use_bias=False, dtype="float32", name="router")
        dispatch, combine, balance_loss = route(router(x), top_k=config.top_k, capacity=config.capacity)

        def weights(name: str, n_in: int, n_out: int) -> jax.Array:
            initializer = nn.initializers.lecun_normal(batch_axis=(0,))
            return self.param(name, initializer, (config.n_experts, n_in, n_out)).astype(config.dtype)

        gate = weights("gate", config.dim, config.hidden_dim)
        up = weights("up", config.dim, config.hidden_dim)
        down = weights("down", config.hidden_dim, config.dim)
        inputs = jnp.einsum("gtec,gtd->egcd", dispatch.astype(config.dtype), x)
        hidden = nn.silu(jnp.einsum("egcd,edh->egch", inputs, gate)) * jnp.einsum(
            "egcd,edh->egch", inputs, up
        )
        outputs = jnp.einsum("egch,ehd->egcd", hidden, down)
        return jnp.einsum("gtec,egcd->gtd", combine.astype(config.dtype), outputs), balance_loss


class LayerGroup(nn.Module):
    """`moe_every` layers, the last with experts; carries the hidden state and the summed balance loss."""

    config: Config

    @nn.compact
    def __call__(self, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        config = self.config
        x, balance_loss = carry

        def norm(name: str) -> nn.RMSNorm:
            return nn.RMSNorm(epsilon=1e-5, dtype=config.dtype, name=name)

        for index in range(config.moe_every):
            x = x + Attention(config, name=f"attention_{index}")(norm(f"attention_norm_{index}")(x))
            normed = norm(f"mlp_norm_{index}")(x)
            if index < config.moe_every - 1:
                x = x + DenseMlp(config, name=f"mlp_{index}")(normed)
        mixed, loss = ExpertMlp(config, name="experts")(normed)
        return x + mixed, balance_loss + loss


class MoeTransformer(nn.Module):
    """Tokens [batch, length] int32 to logits [batch, length, vocab_size] and the mean balance loss."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = self.config
        n_groups = config.n_layers // config.moe_every
        x = nn.Embed(config.vocab_size, config.dim, dtype=config.dtype, name="embedding")(tokens)
        x, balance_loss = stack_layers(
            LayerGroup,
            (x, jnp.zeros((), jnp.float32)),
            depth=n_groups,
            scan=config.scan_layers,
            remat=config.remat,
            config=config,
        )
        x = nn.RMSNorm(epsilon=1e-5, dtype=config.dtype, name="final_norm")(x)
        head = nn.Dense(config.vocab_size, use_bias=False, dtype=config.dtype, name="head")
        return head(x), balance_loss / n_groups


def init_state(config: Config, key: jax.Array) -> State:
    """The state at step 0; f32 parameters and optimizer moments."""
    tokens = jnp.zeros((1, config.seq_len), jnp.int32)
    return new_state(
        MoeTransformer(config).init(key, tokens)["params"], adamw(config.learning_rate, config.adam_epsilon)
    )


def make_train_step(config: Config) -> TrainStep:
    """The step of one batch; metrics: `loss` in nats a token, `grad_norm`, `balance_loss` (1: balanced)."""
    model = MoeTransformer(config)

    def loss_function(params: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        outputs: Any = model.apply({"params": params}, batch["inputs"])
        logits, balance_loss = outputs
        loss = token_cross_entropy(logits, batch["targets"])
        return loss + config.balance_weight * balance_loss, {"balance_loss": balance_loss}

    return gradient_step(loss_function, adamw(config.learning_rate, config.adam_epsilon))


def make_batch(config: Config, key: jax.Array) -> Batch:
    """`inputs` and `targets`, each [batch_size, seq_len] int32."""
    return random_tokens(key, config.batch_size, config.seq_len, config.vocab_size)


def batch_shapes(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of `make_batch`, allocating nothing."""
    return jax.eval_shape(lambda: make_batch(config, jax.random.key(0)))
