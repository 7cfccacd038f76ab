"""blackjax: a step of NUTS for many chains of a logistic regression; trees grow in while loops."""

from __future__ import annotations

from typing import Any

import blackjax
import jax
import jax.numpy as jnp

from .training import Case, array, new_key, shapes_of

PACKAGE = "blackjax"


def nuts() -> Any:
    """256 chains, 128 coefficients, 8192 observations."""

    def log_density(weights: jax.Array, x: jax.Array, signs: jax.Array) -> jax.Array:
        return -jnp.logaddexp(0.0, -signs * (x @ weights)).sum() - 0.5 * (weights**2).sum()

    def step(states: Any, x: jax.Array, signs: jax.Array, key: jax.Array) -> Any:
        kernel = blackjax.nuts(
            lambda weights: log_density(weights, x, signs),
            step_size=0.01,
            inverse_mass_matrix=jnp.ones(128),
            max_num_doublings=6,
        )
        return jax.vmap(kernel.step)(jax.random.split(key, 256), states)

    x, signs = array(8192, 128), array(8192)

    def started(weights: jax.Array, x: jax.Array, signs: jax.Array) -> Any:
        return jax.vmap(lambda w: blackjax.mcmc.hmc.init(w, lambda v: log_density(v, x, signs)))(weights)

    return step, (shapes_of(started, array(256, 128), x, signs), x, signs, new_key())


CASES: dict[str, Case] = {"NUTS": nuts}
