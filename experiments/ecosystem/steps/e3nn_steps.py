"""e3nn-jax: equivariant message passing with spherical harmonics, as in its tetris example, on random graphs."""

from __future__ import annotations

from typing import Any

import e3nn_jax as e3nn
import flax.linen as nn
import jax
import jax.numpy as jnp

from .training import Case, array, integers, label_loss, new_key, params_step, shapes_of

PACKAGE = "e3nn_jax"


def tetris() -> Any:
    """Two layers of tensor products along 16384 edges."""

    class Layer(nn.Module):
        target: e3nn.Irreps

        @nn.compact
        def __call__(self, features: Any, positions: jax.Array, senders: jax.Array, receivers: jax.Array) -> Any:
            harmonics = e3nn.spherical_harmonics(
                [1, 2, 3], e3nn.IrrepsArray("1o", positions[receivers] - positions[senders]), True
            )
            messages = e3nn.concatenate(
                [features[senders], e3nn.tensor_product(features[senders], harmonics)]
            ).regroup()
            messages = messages.filter(["0e", "0o", "1o", "1e", "2e", "2o"])
            sums = e3nn.scatter_sum(messages, dst=receivers, output_size=features.shape[0]) / 1.5
            features = e3nn.flax.Linear(self.target)(sums)
            return e3nn.gate(features)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, positions: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
            features = e3nn.IrrepsArray("0e", jnp.ones((positions.shape[0], 1)))
            for target in ("64x0e + 64x0o + 16x1o + 16x1e", "64x0e + 64x0o + 8x1o"):
                features = Layer(e3nn.Irreps(target))(features, positions, senders, receivers)
            return e3nn.flax.Linear("8x0e")(features).array

    model = Model()
    graph = (array(4096, 3), integers(16384), integers(16384))
    params = shapes_of(model.init, new_key(), *graph)

    def loss(params: Any, positions: Any, senders: Any, receivers: Any, labels: Any) -> jax.Array:
        return label_loss(model.apply(params, positions, senders, receivers), labels)

    return params_step(loss, params, *graph, integers(4096))


CASES: dict[str, Case] = {"equivariant message passing": tetris}
