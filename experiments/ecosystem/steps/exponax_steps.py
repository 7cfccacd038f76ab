"""exponax: a correction of the initial state learned through a pseudo-spectral solver's rollout."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import exponax as ex
import jax
import jax.numpy as jnp

from .training import Case, array, new_key, params_step, shapes_of

PACKAGE = "exponax"

GRID, SAMPLES = 128, 32


def burgers() -> Any:
    """Twenty steps of Burgers' equation in two dimensions behind a convolution."""
    stepper = ex.stepper.Burgers(2, 1.0, GRID, 0.01)
    made = shapes_of(
        lambda key: eqx.filter(eqx.nn.Conv2d(2, 2, 5, padding="SAME", key=key), eqx.is_array), new_key()
    )
    frame = eqx.nn.Conv2d(2, 2, 5, padding="SAME", key=jax.random.key(0))

    def loss(params: Any, start: jax.Array, wanted: jax.Array) -> jax.Array:
        correction = eqx.combine(params, frame)
        final = jax.vmap(lambda u: ex.repeat(stepper, 20)(u + correction(u)))(start)
        return jnp.mean((final - wanted) ** 2)

    return params_step(loss, made, array(SAMPLES, 2, GRID, GRID), array(SAMPLES, 2, GRID, GRID))


CASES: dict[str, Case] = {"Burgers' equation": burgers}
