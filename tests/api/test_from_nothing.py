"""Steps that make what they return of nothing: initialisers, buffers of zeros, steps without arguments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxplan

SIDE = 1024


def _state(key: jax.Array) -> dict[str, Any]:
    weights = jax.random.normal(key, (SIDE, SIDE))
    return {"weights": weights, "moments": jnp.zeros((SIDE, SIDE)), "count": jnp.zeros((), jnp.int32)}


def test_a_buffer_of_zeros_is_cut_and_counted(mesh_4x2: Mesh) -> None:
    step = jaxplan.auto_shard(_state, mesh_4x2, memory_budget=4 * SIDE * SIDE)
    key = jax.random.key(0)
    plan = step.plan(key)
    assert plan.result_specs["result/moments"] == P(("data", "model"))
    compiled = step.lower(key).compile().memory_analysis()
    pointers = 3 * 8  # of the tuple of results
    assert plan.cost.peak_parts["results"] == compiled.output_size_in_bytes - pointers == 2 * 4 * SIDE * SIDE // 8 + 4
    made = step(key)
    np.testing.assert_array_equal(made["weights"], _state(key)["weights"])
    assert not made["moments"].any()


def test_zeros_that_must_be_whole_take_their_memory(mesh_4x2: Mesh) -> None:
    with pytest.raises(jaxplan.InfeasibleError, match=r"4\.00 MiB"):
        jaxplan.plan(
            lambda: jnp.zeros((SIDE, SIDE)), mesh_4x2, memory_budget="1MiB", constraints={"result": "replicated"}
        )


@pytest.mark.parametrize("search", ["ilp", "fsdp", "ft", "mcmc"])
def test_a_step_without_arguments(search: str, mesh_4x2: Mesh) -> None:
    step = jaxplan.auto_shard(lambda: (jnp.ones((8, 4)), 2.0), mesh_4x2, options={"search": search})
    np.testing.assert_array_equal(step()[0], np.ones((8, 4)))
    assert float(step()[1]) == 2.0
