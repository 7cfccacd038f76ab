"""dm-haiku: its ImageNet and transformer examples, the parameters and the state as Haiku hands them out."""

from __future__ import annotations

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from .training import Case, array, integers, label_loss, new_key, next_token_loss, params_step, shapes_of

PACKAGE = "haiku"


def resnet() -> Any:
    """hk.nets.ResNet50 with its running averages."""
    forward = hk.transform_with_state(lambda images: hk.nets.ResNet50(1000)(images, is_training=True))
    images, labels = array(64, 128, 128, 3), integers(64)
    params, averages = shapes_of(forward.init, new_key(), images)
    tx = optax.sgd(0.1, momentum=0.9, nesterov=True)

    def train_step(params: Any, averages: Any, opt_state: Any, images: jax.Array, labels: jax.Array) -> Any:
        def loss_of(params: Any) -> Any:
            logits, changed = forward.apply(params, averages, None, images)
            return label_loss(logits, labels), changed

        (loss, changed), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, new_opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), changed, new_opt_state, loss

    return train_step, (params, averages, shapes_of(tx.init, params), images, labels)


def transformer() -> Any:
    """A decoder of hk.MultiHeadAttention with dropout, as its examples/transformer."""
    n_heads, width, layers, vocabulary = 8, 512, 3, 32000

    def forward(tokens: jax.Array) -> jax.Array:
        length = tokens.shape[1]
        x = hk.Embed(vocabulary, width)(tokens) + hk.get_parameter(
            "positions", (length, width), init=hk.initializers.TruncatedNormal(0.02)
        )
        mask = jnp.tril(jnp.ones((1, 1, length, length)))
        init = hk.initializers.VarianceScaling(2 / layers)
        for _ in range(layers):
            normed = hk.LayerNorm(-1, True, True)(x)
            attended = hk.MultiHeadAttention(n_heads, width // n_heads, w_init=init)(
                normed, normed, normed, mask=mask
            )
            x = x + hk.dropout(hk.next_rng_key(), 0.1, attended)
            hidden = jax.nn.gelu(hk.Linear(4 * width)(hk.LayerNorm(-1, True, True)(x)))
            x = x + hk.dropout(hk.next_rng_key(), 0.1, hk.Linear(width)(hidden))
        return hk.Linear(vocabulary)(hk.LayerNorm(-1, True, True)(x))

    network = hk.transform(forward)
    tokens = integers(16, 256)
    params = shapes_of(network.init, new_key(), tokens)

    def loss(params: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        return next_token_loss(network.apply(params, key, tokens), tokens)

    return params_step(loss, params, tokens, new_key())


CASES: dict[str, Case] = {"nets.ResNet50": resnet, "MultiHeadAttention decoder": transformer}
