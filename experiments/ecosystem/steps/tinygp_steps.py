"""tinygp: marginal likelihood of an exact Gaussian process, by Cholesky."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from tinygp import GaussianProcess, kernels

from .training import Case, array, params_step

PACKAGE = "tinygp"


def exact() -> Any:
    """32 processes of 1024 points each."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def one(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            kernel = jnp.exp(p["amplitude"]) * kernels.Matern52(jnp.exp(p["scale"]))
            return -GaussianProcess(kernel, x, diag=jnp.exp(p["noise"])).log_probability(y)

        return jax.vmap(one)(params, x, y).mean()

    params = {name: array(32) for name in ("amplitude", "scale", "noise")}
    return params_step(loss, params, array(32, 1024), array(32, 1024))


CASES: dict[str, Case] = {"exact": exact}
