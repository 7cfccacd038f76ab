"""distrax: a masked coupling flow of rational quadratic splines, as in its examples/flow.py."""

from __future__ import annotations

from typing import Any

import distrax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from .training import Case, array, new_key, params_step, shapes_of

PACKAGE = "distrax"


def coupling_flow() -> Any:
    """Eight coupling layers with MLP conditioners on 28 x 28 images."""
    shape, bins = (28, 28, 1), 4
    per_element = 3 * bins + 1

    def conditioner() -> hk.Sequential:
        return hk.Sequential(
            [
                hk.Flatten(preserve_dims=-3),
                hk.nets.MLP([512, 512], activate_final=True),
                hk.Linear(int(np.prod(shape)) * per_element, w_init=jnp.zeros, b_init=jnp.zeros),
                hk.Reshape((*shape, per_element), preserve_dims=-1),
            ]
        )

    def log_prob(images: jax.Array) -> jax.Array:
        mask = jnp.reshape(jnp.arange(np.prod(shape)) % 2, shape).astype(bool)
        layers = []
        for _ in range(8):
            layers.append(
                distrax.MaskedCoupling(
                    mask=mask,
                    bijector=lambda p: distrax.RationalQuadraticSpline(p, range_min=0.0, range_max=1.0),
                    conditioner=conditioner(),
                )
            )
            mask = jnp.logical_not(mask)
        base = distrax.Independent(
            distrax.Uniform(low=jnp.zeros(shape), high=jnp.ones(shape)), reinterpreted_batch_ndims=3
        )
        return distrax.Transformed(base, distrax.Inverse(distrax.Chain(layers))).log_prob(images)

    flow = hk.without_apply_rng(hk.transform(log_prob))
    images = array(256, *shape)
    params = shapes_of(flow.init, new_key(), images)

    def loss(params: Any, images: jax.Array, key: jax.Array) -> jax.Array:
        noisy = (images + jax.random.uniform(key, images.shape)) / 256.0
        return -jnp.mean(flow.apply(params, noisy))

    return params_step(loss, params, images, new_key())


CASES: dict[str, Case] = {"MaskedCoupling flow": coupling_flow}
