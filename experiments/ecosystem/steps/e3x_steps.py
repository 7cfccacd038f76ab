"""E3x: an equivariant message passing network for energies, as in its own example on molecules."""

from __future__ import annotations

from typing import Any

import e3x
import flax.linen as nn
import jax
import jax.numpy as jnp

from .training import Case, array, integers, new_key, params_step, shapes_of

PACKAGE = "e3x"

ATOMS, PAIRS, MOLECULES = 4096, 32768, 256


def energies() -> Any:
    """Two message passing layers of degree 2, energies summed over the atoms of each molecule."""

    class Network(nn.Module):
        @nn.compact
        def __call__(
            self, numbers: jax.Array, positions: jax.Array, targets: jax.Array, sources: jax.Array, of: jax.Array
        ) -> jax.Array:
            basis = e3x.nn.basis(
                positions[sources] - positions[targets],
                max_degree=2,
                num=8,
                radial_fn=e3x.nn.reciprocal_bernstein,
                cutoff_fn=lambda r: e3x.nn.smooth_cutoff(r, cutoff=5.0),
            )
            x = e3x.nn.Embed(num_embeddings=90, features=32)(numbers)
            for _ in range(2):
                y = e3x.nn.MessagePass(max_degree=2)(x, basis, dst_idx=targets, src_idx=sources)
                x = e3x.nn.silu(e3x.nn.Dense(32)(e3x.nn.add(x, y)))
            return jax.ops.segment_sum(nn.Dense(1)(x[:, 0, 0, :])[:, 0], of, num_segments=MOLECULES)

    model = Network()
    molecules = (integers(ATOMS), array(ATOMS, 3), integers(PAIRS), integers(PAIRS), integers(ATOMS))
    params = shapes_of(model.init, new_key(), *molecules)

    def loss(params: Any, *batch: Any) -> jax.Array:
        return jnp.mean((model.apply(params, *batch[:-1]) - batch[-1]) ** 2)

    return params_step(loss, params, *molecules, array(MOLECULES))


CASES: dict[str, Case] = {"message passing on molecules": energies}
