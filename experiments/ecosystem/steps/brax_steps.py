"""brax: analytic policy gradients through its physics, as training/agents/apg: a scan over simulated steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from brax import envs

from .training import Case, new_key, params_step, shapes_of

PACKAGE = "brax"


def policy_gradient() -> Any:
    """256 double pendulums, 8 steps, an MLP as policy; a single pendulum's reward is constant, its gradient none."""
    environment = envs.get_environment("inverted_double_pendulum", backend="spring")
    sizes = (environment.observation_size, 256, 256, environment.action_size)

    def make(key: jax.Array) -> Any:
        keys = jax.random.split(key, len(sizes) - 1)
        return [
            {"w": jax.random.normal(k, (a, b)) / jnp.sqrt(a), "b": jnp.zeros(b)}
            for k, a, b in zip(keys, sizes[:-1], sizes[1:], strict=True)
        ]

    def policy(params: Any, x: jax.Array) -> jax.Array:
        for layer in params[:-1]:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.tanh(x @ params[-1]["w"] + params[-1]["b"])

    def loss(params: Any, key: jax.Array) -> jax.Array:
        state = jax.vmap(environment.reset)(jax.random.split(key, 256))

        def step(state: Any, _: Any) -> Any:
            state = jax.vmap(environment.step)(state, policy(params, state.obs))
            return state, state.reward

        _, rewards = jax.lax.scan(step, state, None, length=8)
        return -jnp.mean(rewards)

    return params_step(loss, shapes_of(make, new_key()), new_key())


CASES: dict[str, Case] = {"analytic policy gradient": policy_gradient}
