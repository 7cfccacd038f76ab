"""evosax: generations of evolution strategies on a population of policies."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from evosax.algorithms import CMA_ES, Open_ES

from .training import Case, array, new_key, shapes_of

PACKAGE = "evosax"


def policy() -> Any:
    """A small MLP's parameters."""
    return {"up": jnp.zeros((64, 256)), "down": jnp.zeros((256, 8))}


def strategy(kind: Any, population: int, solution: Any) -> Any:
    """Three generations in a scan."""
    es = kind(population_size=population, solution=solution)
    params = es.default_params

    def fitness(solution: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        if not isinstance(solution, dict):
            return jnp.mean((x @ solution[: x.shape[1]] - y[:, 0]) ** 2)
        return jnp.mean((jnp.tanh(x @ solution["up"]) @ solution["down"] - y) ** 2)

    def step(state: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> Any:
        def generation(state: Any, key: jax.Array) -> Any:
            ask, tell = jax.random.split(key)
            solutions, state = es.ask(ask, state, params)
            values = jax.vmap(fitness, (0, None, None))(solutions, x, y)
            state, metrics = es.tell(tell, solutions, values, state, params)
            return state, metrics["best_fitness_in_generation"]

        return jax.lax.scan(generation, state, jax.random.split(key, 3))

    state = shapes_of(lambda key: es.init(key, solution, params), new_key())
    return step, (state, array(1024, 64), array(1024, 8), new_key())


CASES: dict[str, Case] = {
    "OpenES": lambda: strategy(Open_ES, 1024, policy()),
    "CMA-ES": lambda: strategy(CMA_ES, 512, jnp.zeros(256)),
}
