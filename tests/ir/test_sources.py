"""An operation is placed on the user's own line, with the library's beside it, and none is placed nowhere."""

from __future__ import annotations

import inspect
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import models
from jaxplan.ir import Graph, trace, users_line


def line_of(function: object, text: str) -> int:
    """The number of the one line of a function that holds a text."""
    lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
    (found,) = [first + i for i, line in enumerate(lines) if text in line]
    return found


def sources(graph: Graph, primitive: str) -> set[str]:
    return {op.source for op in graph.ops if op.primitive == primitive}


def by_hand(x: jax.Array) -> jax.Array:
    y = jnp.where(x > 0, x, 0.0)
    return jnp.cumsum(y)


def by_flax(params: object, x: jax.Array) -> jax.Array:
    return nn.Dense(4).apply(params, x)


def by_optax(w: jax.Array) -> jax.Array:
    optimizer = optax.adam(1e-2)
    updates, _ = optimizer.update(w, optimizer.init(w))
    return updates


def in_loop(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, _: (jnp.where(c > 1, jnp.sin(c), c), None), x, None, length=3)[0]


def test_what_jax_jits_itself_belongs_to_the_line_that_calls_it() -> None:
    """Traced elsewhere first: jax keeps such functions' jaxprs, and with them nothing of who called."""
    jnp.where(jnp.ones(8) > 0, 1.0, 0.0), jnp.cumsum(jnp.ones(8))
    graph = trace(by_hand, (np.ones(8, np.float32),), {}).graph
    assert sources(graph, "select_n") == {f"test_sources.py:{line_of(by_hand, 'jnp.where')} (by_hand)"}
    assert sources(graph, "cumsum") == {f"test_sources.py:{line_of(by_hand, 'jnp.cumsum')} (by_hand)"}


def test_a_library_s_line_stands_beside_the_user_s() -> None:
    x = jnp.ones((2, 8))
    graph = trace(by_flax, (nn.Dense(4).init(jax.random.key(0), x), x), {}).graph
    (found,) = sources(graph, "dot_general")
    mine = f"test_sources.py:{line_of(by_flax, 'nn.Dense')} (by_flax)"
    assert re.fullmatch(rf"{re.escape(mine)} via linear\.py:\d+", found)
    assert users_line(found) == mine
    found_of_optax = sources(trace(by_optax, (x,), {}).graph, "sqrt")
    assert {users_line(one) for one in found_of_optax} == {
        f"test_sources.py:{line_of(by_optax, 'optimizer.update')} (by_optax)"
    }


def test_inside_a_loop() -> None:
    graph = trace(in_loop, (np.ones(8, np.float32),), {}).graph
    line = line_of(in_loop, "jax.lax.scan")
    assert {op.source for op in graph.ops} == {
        f"test_sources.py:{line} (in_loop)",
        f"test_sources.py:{line} (in_loop.<locals>.<lambda>)",
    }


@pytest.mark.parametrize("name", models.names())
def test_no_operation_of_a_model_is_nowhere(name: str) -> None:
    """Every line is one of the models' own files: none begins in Flax, optax or jax."""
    state, batch = models.abstract_arguments(name, "tiny")
    step = models.get(name).make_train_step(models.get_config(name, "tiny"))
    graph = trace(step, (state, batch), {}).graph
    files = {op.source.partition(":")[0] for op in graph.ops}
    own = {f"{module}.py" for module in (*models.names(), "attention", "training", "transformer")}
    assert files <= own
