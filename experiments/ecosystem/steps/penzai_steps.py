"""penzai: a Llama-like transformer of named axes, its parameters unbound from the model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from penzai import pz
from penzai.models.transformer.variants import llamalike_common as llama

from .training import Case, integers, next_token_loss, params_step, shapes_of

PACKAGE = "penzai"


def transformer() -> Any:
    """Four blocks of 1024, 16 x 512 tokens."""
    config = llama.LlamalikeTransformerConfig(
        num_kv_heads=4, query_head_multiplier=4, embedding_dim=1024, projection_dim=64, mlp_hidden_dim=2816,
        num_decoder_blocks=4, vocab_size=32_000, mlp_variant="swiglu", tie_embedder_and_logits=False,
        activation_dtype=jnp.bfloat16,
    )  # fmt: skip
    unbound, params = pz.unbind_params(llama.build_llamalike_transformer(config, jax.random.key(0)), freeze=True)
    params = shapes_of(lambda: params)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        model = pz.bind_variables(unbound, params)
        logits = model(pz.nx.wrap(tokens).tag("batch", "seq"))
        return next_token_loss(logits.unwrap("batch", "seq", "vocabulary"), tokens)

    return params_step(loss, params, integers(16, 512))


CASES: dict[str, Case] = {"llamalike": transformer}
