"""haliax: a transformer block on named axes, as in its tutorial."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import optax

from .training import Case, integers, shapes_of

PACKAGE = "haliax"


def named_mlp() -> Any:
    """Attention and an MLP over named axes, as in haliax's tutorial."""
    batch, position = hax.Axis("batch", 16), hax.Axis("position", 256)
    key_position = position.alias("key_position")
    embed, heads, head_dim = hax.Axis("embed", 512), hax.Axis("heads", 8), hax.Axis("head_dim", 64)
    hidden, vocabulary = hax.Axis("hidden", 2048), hax.Axis("vocab", 32000)

    class Model(eqx.Module):
        embedding: hax.nn.Embedding
        query: hax.nn.Linear
        key: hax.nn.Linear
        value: hax.nn.Linear
        out: hax.nn.Linear
        up: hax.nn.Linear
        down: hax.nn.Linear

    def make(key: jax.Array) -> Model:
        keys = jax.random.split(key, 7)
        heads_of = (heads, head_dim)
        return Model(
            hax.nn.Embedding.init(vocabulary, embed, key=keys[0]),
            *(hax.nn.Linear.init(embed, heads_of, key=k) for k in keys[1:4]),
            hax.nn.Linear.init(heads_of, embed, key=keys[4]),
            hax.nn.Linear.init(embed, hidden, key=keys[5]),
            hax.nn.Linear.init(hidden, embed, key=keys[6]),
        )

    params = eqx.filter_eval_shape(make, jax.random.key(0))
    params, static = eqx.partition(params, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    tx = optax.adamw(1e-3)

    def train_step(params: Any, opt_state: Any, tokens: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            model = eqx.combine(params, static)
            named = hax.named(tokens, (batch, position))
            x = model.embedding.embed(named)
            key, value = (
                layer(x).rename({"position": "key_position"}) for layer in (model.key, model.value)
            )
            mask = hax.nn.attention.causal_mask(position, key_position)
            mixed = hax.nn.attention.dot_product_attention(
                key_position, head_dim, model.query(x), key, value, mask
            )
            x = x + model.out(mixed)
            x = x + model.down(hax.nn.gelu(model.up(x)))
            logits = model.embedding.unembed(x)
            targets = hax.nn.one_hot(hax.roll(named, -1, position), vocabulary)
            return hax.nn.cross_entropy_loss(logits, vocabulary, targets).mean().array

        value, gradients = jax.value_and_grad(loss_of)(params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return eqx.apply_updates(params, updates), opt_state, value

    return train_step, (params, shapes_of(tx.init, params), integers(16, 256))


CASES: dict[str, Case] = {"named attention": named_mlp}
