"""Loops' stacks that XLA for GPU transposes for what a loop sums."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxplan.cost import traffic
from jaxplan.ir import trace
from jaxplan.sharding import graph_rules


@pytest.mark.parametrize(("decays", "twice"), [("rows", True), ("heads", False)])
def test_states_that_are_summed_on_both_sides_of_a_decays_dimensions_are_transposed_for_that(
    decays: str, twice: bool
) -> None:
    """Of eight rows of twelve heads, 64 words: 206 MB compiled for H100 with a decay a row of a state, 109 with one a
    head (jax 0.10.2), 101 of them the states."""

    def step(decay: Any, x: Any) -> Any:
        def loss(decay: Any) -> Any:
            def word(state: Any, x: Any) -> Any:
                read = jnp.einsum("bhi,bhij->bhj", x, state)
                return decay * state + x[..., :, None] * x[..., None, :], read

            return jnp.sum(jax.lax.scan(word, jnp.zeros((8, 12, 16, 16)), x)[1])

        return jax.grad(loss)(decay)

    decay = jax.ShapeDtypeStruct((12, 16, 1) if decays == "rows" else (12, 1, 1), jnp.float32)
    graph = trace(step, (decay, jax.ShapeDtypeStruct((64, 8, 12, 16), jnp.float32)), {}).graph
    stacks = traffic(graph, graph_rules(graph), "gpu").second_stacks
    assert [graph.values[stack.value].shape for stack in stacks] == [(8, 12, 16, 16)] * twice
