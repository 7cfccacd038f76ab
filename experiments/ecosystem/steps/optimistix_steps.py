"""optimistix: a deep equilibrium model, whose layer is a fixed point with implicit derivatives (a lineax solve)."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
import optimistix

from .training import Case, array, integers, label_loss, params_step

PACKAGE = "optimistix"


def equilibrium() -> Any:
    """1024 wide, a batch of 512."""

    def make(key: jax.Array) -> Any:
        inner, last = jax.random.split(key)
        return eqx.nn.Linear(1024, 1024, key=inner), eqx.nn.Linear(1024, 10, key=last)

    model = eqx.filter_eval_shape(make, jax.random.key(0))
    params, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    solver = optimistix.FixedPointIteration(rtol=1e-4, atol=1e-4)
    implicit = optimistix.ImplicitAdjoint(linear_solver=lineax.GMRES(rtol=1e-3, atol=1e-3, max_steps=20))

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        layer, head = eqx.combine(params, static)

        def settled(z: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.tanh(0.5 * jax.vmap(layer)(z) + x)

        found = optimistix.fixed_point(
            settled, solver, jnp.zeros_like(x), x, adjoint=implicit, max_steps=30, throw=False
        )
        return label_loss(jax.vmap(head)(found.value), labels)

    return params_step(loss, params, array(512, 1024), integers(512))


CASES: dict[str, Case] = {"deep equilibrium": equilibrium}
