"""flashbax: deep Q-learning whose replay buffer is state."""

from __future__ import annotations

from typing import Any

import flashbax as fbx
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from .training import Case, array, integers, new_key, shapes_of

PACKAGE = "flashbax"


class Q(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (1024, 1024):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(18)(x)


def prioritised() -> Any:
    """Adds what 256 environments saw, samples 4096 transitions, learns, and writes the priorities back."""
    model, tx = Q(), optax.adam(1e-4)
    buffer = fbx.make_prioritised_flat_buffer(
        max_length=65_536, min_length=4096, sample_batch_size=4096, add_batch_size=256, priority_exponent=0.6
    )
    one = {"obs": jnp.zeros(128), "action": jnp.zeros((), jnp.int32), "reward": jnp.zeros(())}
    params = shapes_of(model.init, new_key(), array(1, 128))

    def train_step(state: Any, seen: Any, key: jax.Array) -> Any:
        params, target, opt_state, memory = state
        memory = buffer.add(memory, seen)
        sample = buffer.sample(memory, key)
        first, second = sample.experience.first, sample.experience.second

        def loss(params: Any) -> Any:
            q = jnp.take_along_axis(model.apply(params, first["obs"]), first["action"][:, None], 1)[:, 0]
            goal = first["reward"] + 0.99 * model.apply(target, second["obs"]).max(-1)
            error = q - jax.lax.stop_gradient(goal)
            return jnp.mean(error**2), jnp.abs(error) + 1e-6

        (value, priorities), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        memory = buffer.set_priorities(memory, sample.indices, priorities)
        updates, opt_state = tx.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        target = optax.incremental_update(params, target, 5e-3)
        return (params, target, opt_state, memory), value

    seen = {"obs": array(256, 128), "action": integers(256), "reward": array(256)}
    return train_step, ((params, params, shapes_of(tx.init, params), shapes_of(buffer.init, one)), seen, new_key())


CASES: dict[str, Case] = {"prioritised replay": prioritised}
