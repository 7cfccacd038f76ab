"""qwix: a Flax model trained with int8 weights and activations (QAT)."""

from __future__ import annotations

from typing import Any

import jax
import qwix
from flax import linen as nn

from .training import Case, array, integers, label_loss, new_key, params_step, shapes_of

PACKAGE = "qwix"


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (4096, 4096):
            x = nn.gelu(nn.Dense(width)(x))
        return nn.Dense(1000)(x)


def quantised() -> Any:
    rules = [qwix.QtRule(module_path=".*", weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")]
    model = qwix.quantize_model(Mlp(), qwix.QtProvider(rules))
    images, labels = array(1024, 2048), integers(1024)
    variables = shapes_of(model.init, new_key(), images)

    def loss(variables: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return label_loss(model.apply(variables, images), labels)

    return params_step(loss, variables, images, labels)


CASES: dict[str, Case] = {"QtProvider int8": quantised}
