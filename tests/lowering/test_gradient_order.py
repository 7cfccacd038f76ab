"""What XLA for TPU makes of the order in which gradients come, compiled for devices that are not there."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxplan


@pytest.mark.aot_tpu
def test_weights_and_moments_are_updated_in_the_order_they_are_kept_in(
    tpu_topology: Callable[[str], Any],
) -> None:
    """Pinned before it was transposed, the gradient of every weight came in columns, and all of these were copied."""
    size = 512
    optimizer = optax.adam(1e-3)

    def step(state: Any, x: Any) -> Any:
        params, moments = state

        def loss(params: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)

        updates, moments = optimizer.update(jax.grad(loss)(params), moments)
        return optax.apply_updates(params, updates), moments

    weight = jax.ShapeDtypeStruct((size, size), jnp.float32)
    params = {"up": weight, "down": weight}
    state = params, jax.eval_shape(optimizer.init, params)
    mesh = jaxplan.target("tpu-v5e:2x4").mesh(data=8)
    options = {"search": "data", "compare_templates": False}
    planned = jaxplan.auto_shard(step, mesh, donate_argnums=0, options=options)
    compiled = planned.lower(state, jax.ShapeDtypeStruct((4096, size), jnp.float32)).compile()
    copied = re.findall(rf"= f32\[{size},{size}\]\{{0,1\S* copy\(", compiled.as_text())
    assert copied == []
