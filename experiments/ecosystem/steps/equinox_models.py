"""Equinox: its examples' models, partitioned into arrays and the rest as its documentation says."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from .training import Case, array, integers, label_loss, new_key, shapes_of

PACKAGE = "equinox"


def _trained(make: Any, loss: Any, *batch: Any) -> Any:
    tx = optax.adam(3e-4)
    model = eqx.filter_eval_shape(make, jax.random.key(0))
    params, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def train_step(params: Any, opt_state: Any, *batch: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            return loss(eqx.combine(params, static), *batch)

        value, gradients = jax.value_and_grad(loss_of)(params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return eqx.apply_updates(params, updates), opt_state, value

    return train_step, (params, shapes_of(tx.init, params), *batch)


def mixer() -> Any:
    """MLP-Mixer, as in examples/score_based_diffusion: vmapped over patches and over the batch."""

    class Block(eqx.Module):
        across_patches: eqx.nn.MLP
        across_channels: eqx.nn.MLP
        norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]

        def __init__(self, patches: int, width: int, key: jax.Array) -> None:
            first, second = jax.random.split(key)
            self.across_patches = eqx.nn.MLP(patches, patches, 4 * patches, 1, key=first)
            self.across_channels = eqx.nn.MLP(width, width, 4 * width, 1, key=second)
            self.norms = (eqx.nn.LayerNorm((width, patches)), eqx.nn.LayerNorm((patches, width)))

        def __call__(self, y: jax.Array) -> jax.Array:
            y = y + jax.vmap(self.across_patches)(self.norms[0](y))
            turned = self.norms[1](y.T)
            return y + jax.vmap(self.across_channels)(turned).T

    class Mixer(eqx.Module):
        into: eqx.nn.Conv2d
        out: eqx.nn.ConvTranspose2d
        blocks: list[Block]

        def __init__(self, key: jax.Array) -> None:
            keys = jax.random.split(key, 6)
            self.into = eqx.nn.Conv2d(3, 256, 4, stride=4, key=keys[0])
            self.out = eqx.nn.ConvTranspose2d(256, 3, 4, stride=4, key=keys[1])
            self.blocks = [Block(256, 256, key) for key in keys[2:]]

        def __call__(self, image: jax.Array) -> jax.Array:
            y = self.into(image)
            width, height, depth = y.shape
            y = y.reshape(width, height * depth)
            for block in self.blocks:
                y = block(y)
            return self.out(y.reshape(width, height, depth))

    def loss(model: Any, images: jax.Array, key: jax.Array) -> jax.Array:
        noise = jax.random.normal(key, images.shape)
        return jnp.mean((jax.vmap(model)(images + noise) - noise) ** 2)

    return _trained(Mixer, loss, array(64, 3, 64, 64), new_key())


def attention() -> Any:
    """A classifier of eqx.nn.MultiheadAttention with dropout, as in examples/bert."""

    class Classifier(eqx.Module):
        embedding: eqx.nn.Embedding
        attention: list[eqx.nn.MultiheadAttention]
        mlps: list[eqx.nn.MLP]
        head: eqx.nn.Linear
        dropout: eqx.nn.Dropout

        def __init__(self, key: jax.Array) -> None:
            keys = jax.random.split(key, 8)
            self.embedding = eqx.nn.Embedding(30522, 512, key=keys[0])
            self.attention = [eqx.nn.MultiheadAttention(8, 512, key=k) for k in keys[1:4]]
            self.mlps = [eqx.nn.MLP(512, 512, 2048, 1, jax.nn.gelu, key=k) for k in keys[4:7]]
            self.head = eqx.nn.Linear(512, 2, key=keys[7])
            self.dropout = eqx.nn.Dropout(0.1)

        def __call__(self, tokens: jax.Array, key: jax.Array) -> jax.Array:
            x = jax.vmap(self.embedding)(tokens)
            for mixed, mlp in zip(self.attention, self.mlps, strict=True):
                key, use = jax.random.split(key)
                x = x + self.dropout(mixed(x, x, x), key=use)
                x = x + jax.vmap(mlp)(x)
            return self.head(x[0])

    def loss(model: Any, tokens: jax.Array, labels: jax.Array, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, tokens.shape[0])
        return label_loss(jax.vmap(model)(tokens, keys), labels % 2)

    return _trained(Classifier, loss, integers(32, 128), integers(32), new_key())


CASES: dict[str, Case] = {"MLP-Mixer": mixer, "MultiheadAttention classifier": attention}
