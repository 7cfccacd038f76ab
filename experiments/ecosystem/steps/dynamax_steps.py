"""dynamax: a hidden Markov model fitted by gradients, and a linear Gaussian one by EM with a parallel scan."""

from __future__ import annotations

from typing import Any

import jax
from dynamax.hidden_markov_model import GaussianHMM
from dynamax.linear_gaussian_ssm import LinearGaussianSSM
from dynamax.parameters import from_unconstrained, to_unconstrained

from .training import Case, array, params_step, shapes_of

PACKAGE = "dynamax"


def hidden_markov() -> Any:
    """64 states, 128 sequences of 500 observations of 16 numbers."""
    hmm = GaussianHMM(64, 16)
    params, props = hmm.initialize(jax.random.key(0))
    free = shapes_of(lambda: to_unconstrained(params, props))

    def loss(free: Any, emissions: jax.Array) -> jax.Array:
        params = from_unconstrained(free, props)
        return -jax.vmap(lambda e: hmm.marginal_log_prob(params, e))(emissions).sum() / emissions.size

    return params_step(loss, free, array(128, 500, 16))


def expectation_maximisation() -> Any:
    """A step of EM on 64 sequences of 256."""
    ssm = LinearGaussianSSM(32, 64)
    params, props = ssm.initialize(jax.random.key(0))

    def step(params: Any, emissions: jax.Array) -> Any:
        stats, likelihoods = jax.vmap(lambda e: ssm.e_step(params, e))(emissions)
        new, _ = ssm.m_step(params, props, stats, None)
        return new, likelihoods.sum()

    return step, (shapes_of(lambda: params), array(64, 256, 64))


CASES: dict[str, Case] = {"GaussianHMM": hidden_markov, "LinearGaussianSSM EM": expectation_maximisation}
