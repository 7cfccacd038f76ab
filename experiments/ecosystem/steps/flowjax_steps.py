"""flowjax: a normalising flow fitted by maximum likelihood, as in its introduction; paramax wraps parameters."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flowjax.bijections
import flowjax.distributions
import flowjax.flows
import jax
import jax.numpy as jnp
import paramax

from .training import Case, array, params_step

PACKAGE = "flowjax"


def spline_flow() -> Any:
    """Coupling layers with rational quadratic splines of 64 dimensions, 4096 samples."""

    def make(key: jax.Array) -> Any:
        return flowjax.flows.coupling_flow(
            key,
            base_dist=flowjax.distributions.Normal(jnp.zeros(64)),
            transformer=flowjax.bijections.RationalQuadraticSpline(knots=8, interval=4),
            nn_width=512,
        )

    def fixed(leaf: Any) -> bool:
        return isinstance(leaf, paramax.NonTrainable)

    flow = make(jax.random.key(0))
    params, static = eqx.partition(flow, eqx.is_inexact_array, is_leaf=fixed)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return -paramax.unwrap(eqx.combine(params, static, is_leaf=fixed)).log_prob(x).mean()

    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    return params_step(loss, shapes, array(4096, 64))


CASES: dict[str, Case] = {"spline coupling flow": spline_flow}
