"""NumPyro: stochastic variational inference of a VAE, as in its examples/vae.py; SVI.update is the step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.example_libraries import stax

from .training import Case, array, shapes_of

PACKAGE = "numpyro"


def vae() -> Any:
    """784 pixels, 1024 hidden units, 64 latent ones."""
    hidden, latent = 1024, 64
    encode = stax.serial(
        stax.Dense(hidden),
        stax.Softplus,
        stax.FanOut(2),
        stax.parallel(stax.Dense(latent), stax.serial(stax.Dense(latent), stax.Exp)),
    )
    decode = stax.serial(stax.Dense(hidden), stax.Softplus, stax.Dense(784), stax.Sigmoid)

    def model(batch: jax.Array) -> None:
        decoder = numpyro.module("decoder", decode, (batch.shape[0], latent))
        with numpyro.plate("batch", batch.shape[0]):
            z = numpyro.sample("z", dist.Normal(0, 1).expand([latent]).to_event(1))
            numpyro.sample("obs", dist.Bernoulli(decoder(z)).to_event(1), obs=batch)

    def guide(batch: jax.Array) -> None:
        encoder = numpyro.module("encoder", encode, batch.shape)
        location, scale = encoder(batch)
        with numpyro.plate("batch", batch.shape[0]):
            numpyro.sample("z", dist.Normal(location, scale).to_event(1))

    svi = numpyro.infer.SVI(model, guide, numpyro.optim.Adam(1e-3), numpyro.infer.Trace_ELBO())
    images = array(1024, 784)
    # The first state also sets up what `svi` maps parameters with, so it is made with real arrays.
    state = svi.init(jax.random.key(0), jnp.zeros(images.shape))
    return svi.update, (shapes_of(lambda: state), images)


CASES: dict[str, Case] = {"SVI of a VAE": vae}
