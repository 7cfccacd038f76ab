"""recurrentgemma (Linen): Griffin's recurrent and local attention blocks, as its fine-tuning tutorial trains."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import recurrentgemma.jax as griffin

from .training import Case, integers, new_key, next_token_loss, params_step, shapes_of

PACKAGE = "recurrentgemma"


def griffin_model() -> Any:
    """Two recurrent blocks and one of local attention, width 1024."""
    recurrent, attention = griffin.TemporalBlockType.RECURRENT, griffin.TemporalBlockType.ATTENTION
    config = griffin.GriffinConfig(
        vocab_size=32000,
        width=1024,
        mlp_expanded_width=3072,
        num_heads=8,
        block_types=(recurrent, recurrent, attention),
        embeddings_scale_by_sqrt_dim=True,
        attention_window_size=256,
        logits_soft_cap=30.0,
        scan_type=griffin.ScanType.ASSOCIATIVE_NATIVE,
    )
    model = griffin.Griffin(config)
    tokens = integers(16, 512)
    params = shapes_of(lambda key: model.init(key, jnp.zeros((1, 8), int), jnp.zeros((1, 8), int)), new_key())

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        logits, _ = model.apply(params, tokens, positions, return_cache=False)
        return next_token_loss(logits, tokens)

    return params_step(loss, params, tokens)


CASES: dict[str, Case] = {"Griffin": griffin_model}
