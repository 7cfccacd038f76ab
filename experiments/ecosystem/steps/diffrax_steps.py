"""diffrax: a neural ordinary differential equation, as in its examples/neural_ode; the solver is a while loop."""

from __future__ import annotations

from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from .training import Case, array, shapes_of

PACKAGE = "diffrax"


def neural_ode() -> Any:
    """An MLP as vector field, Tsit5 with adaptive steps, a batch of 512 series."""

    class Field(eqx.Module):
        mlp: eqx.nn.MLP

        def __call__(self, t: Any, y: jax.Array, args: Any) -> jax.Array:
            return self.mlp(y)

    def make(key: jax.Array) -> Field:
        return Field(eqx.nn.MLP(64, 64, 512, 2, activation=jax.nn.softplus, key=key))

    model = eqx.filter_eval_shape(make, jax.random.key(0))
    params, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    tx = optax.adabelief(3e-3)

    def train_step(params: Any, opt_state: Any, times: jax.Array, series: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            field = eqx.combine(params, static)

            def solved(start: jax.Array) -> jax.Array:
                return diffrax.diffeqsolve(
                    diffrax.ODETerm(field),
                    diffrax.Tsit5(),
                    t0=times[0],
                    t1=times[-1],
                    dt0=times[1] - times[0],
                    y0=start,
                    stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
                    saveat=diffrax.SaveAt(ts=times),
                ).ys

            return jnp.mean((series - jax.vmap(solved)(series[:, 0])) ** 2)

        value, gradients = jax.value_and_grad(loss_of)(params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return eqx.apply_updates(params, updates), opt_state, value

    return train_step, (params, shapes_of(tx.init, params), array(32), array(512, 32, 64))


CASES: dict[str, Case] = {"neural ODE": neural_ode}
