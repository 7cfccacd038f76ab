"""mamba2-jax: a state-space language model in NNX, chunk by chunk."""

from __future__ import annotations

from typing import Any

import jax
import optax
from flax import nnx
from mamba2_jax import Mamba2Config, Mamba2ForCausalLM

from .training import Case, integers, shapes_of

PACKAGE = "mamba2_jax"


def language_model() -> Any:
    """Six layers of the 130M model, 16 x 1024 tokens."""
    config = Mamba2Config(num_hidden_layers=6)
    model = nnx.eval_shape(lambda: Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    tx = optax.adamw(1e-3)

    def train_step(state: tuple[Any, Any], tokens: jax.Array) -> Any:
        params, opt_state = state

        def loss(params: Any) -> jax.Array:
            return nnx.merge(graph, params)(tokens, labels=tokens)["loss"]

        value, gradients = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return train_step, ((state, shapes_of(tx.init, state)), integers(16, 1024))


CASES: dict[str, Case] = {"Mamba2ForCausalLM": language_model}
