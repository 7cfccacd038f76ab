"""mctx: a policy improved by Gumbel MuZero's search, as in its README; the search tree lives in loops of gathers."""

from __future__ import annotations

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import mctx
import optax

from .training import Case, array, new_key, params_step, shapes_of

PACKAGE = "mctx"


def muzero() -> Any:
    """512 roots, 16 simulations, 18 actions, a model 256 wide."""

    def model(hidden: jax.Array, action: jax.Array) -> Any:
        x = jnp.concatenate([hidden, jax.nn.one_hot(action, 18)], axis=-1)
        hidden = jax.nn.relu(hk.Linear(256)(jax.nn.relu(hk.Linear(512)(x))))
        return hidden, hk.Linear(18)(hidden), hk.Linear(1)(hidden)[:, 0], hk.Linear(1)(hidden)[:, 0]

    net = hk.without_apply_rng(hk.transform(model))
    params = shapes_of(net.init, new_key(), array(512, 256), jax.ShapeDtypeStruct((512,), jnp.int32))

    def loss(params: Any, observed: jax.Array, key: jax.Array) -> jax.Array:
        def recurrent(params: Any, key: jax.Array, action: jax.Array, hidden: jax.Array) -> Any:
            hidden, logits, value, reward = net.apply(params, hidden, action)
            discount = jnp.full_like(reward, 0.99)
            return mctx.RecurrentFnOutput(reward=reward, discount=discount, prior_logits=logits, value=value), hidden

        hidden, logits, value, _ = net.apply(params, observed, jnp.zeros(512, jnp.int32))
        root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=hidden)
        found = mctx.gumbel_muzero_policy(params, key, jax.lax.stop_gradient(root), recurrent, num_simulations=16)
        wanted = jax.lax.stop_gradient(found.action_weights)
        policy = optax.softmax_cross_entropy(logits, wanted).mean()
        return policy + ((value - jax.lax.stop_gradient(found.search_tree.node_values[:, 0])) ** 2).mean()

    return params_step(loss, params, array(512, 256), new_key())


CASES: dict[str, Case] = {"Gumbel MuZero": muzero}
