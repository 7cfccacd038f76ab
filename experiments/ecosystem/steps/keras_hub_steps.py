"""KerasHub on the JAX backend: its causal language models, from a configuration, trained statelessly."""

from __future__ import annotations

import os
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import keras_hub

from .keras3 import trained
from .training import Case, integers, next_token_loss

PACKAGE = "keras_hub"


def gemma() -> Any:
    """Gemma's backbone: RMSNorm, rotary positions, one key head for eight queries, tied embedding; 3 layers."""
    backbone = keras_hub.models.GemmaBackbone(
        vocabulary_size=32000,
        num_layers=3,
        num_query_heads=8,
        num_key_value_heads=1,
        hidden_dim=1024,
        intermediate_dim=8192,
        head_dim=128,
    )
    model = keras_hub.models.GemmaCausalLM(backbone=backbone)
    tokens = integers(16, 256)
    return trained(model, next_token_loss_of, {"token_ids": tokens, "padding_mask": tokens}, tokens)


def next_token_loss_of(targets: Any, logits: Any) -> Any:
    """As Keras calls a loss: targets first."""
    return next_token_loss(logits, targets)


CASES: dict[str, Case] = {"GemmaCausalLM": gemma}
