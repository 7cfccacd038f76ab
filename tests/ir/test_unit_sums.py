"""What was summed for a broadcast is not reshaped and summed once more."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec

import jaxplan
from jaxplan.ir import trace

X, BIAS = jax.ShapeDtypeStruct((8, 4, 6), jnp.float32), jax.ShapeDtypeStruct((6,), jnp.float32)


def twice(bias: Any, x: Any) -> Any:
    """Two layers with one bias."""
    return jnp.sum(jnp.sin(jnp.sin(x + bias) + bias))


def test_the_gradient_of_a_bias_is_one_sum_a_layer() -> None:
    traced = trace(jax.grad(twice), (BIAS, X), {})
    sums = [op for op in traced.graph.ops if op.primitive == "reduce_sum"]
    assert len(sums) == 2 and "reshape" not in [op.primitive for op in traced.graph.ops[sums[0].index :]]
    random = np.random.default_rng(0)
    given = [random.standard_normal(shape.shape).astype(np.float32) for shape in (BIAS, X)]
    (made,) = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *given)
    np.testing.assert_allclose(made, jax.grad(twice)(*given), rtol=1e-5, atol=1e-6)


def test_what_is_read_on_the_way_or_really_summed_stays() -> None:
    def step(x: Any) -> Any:
        rows = jnp.sum(x, axis=0)
        spread = rows.reshape(1, 4, 6)
        return jnp.sum(spread, axis=0), jnp.sin(spread), jnp.sum(rows.reshape(2, 2, 6), axis=0)

    primitives = [op.primitive for op in trace(step, (X,), {}).graph.ops]
    assert primitives.count("reduce_sum") == 3 and primitives.count("reshape") == 2


def test_a_number_that_is_summed_over_nothing_is_left_alone() -> None:
    """A transform's scalar log determinant: planning crashed."""
    traced = trace(lambda x: x + jnp.sum(jnp.ones(())), (X,), {})
    assert [op.primitive for op in traced.graph.ops][-2:] == ["reduce_sum", "add"]


def test_the_gradients_of_what_all_layers_add_are_summed_over_devices_once() -> None:
    """Four layers' relative bias: one reduce_scatter on eight H100, where four were planned."""

    def step(bias: Any, x: Any) -> Any:
        return jax.grad(twice)(bias, x)

    bias, scores = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 256, 256), (64, 4, 256, 256)))
    mesh, pins = AbstractMesh((8,), ("data",)), {"x": PartitionSpec("data")}
    plan = jaxplan.plan(step, mesh, bias, scores, hardware="h100", constraints=pins)
    sums = [c for c in plan.collectives if c.kind in ("all_reduce", "reduce_scatter") and c.bytes > 4]
    assert len(sums) == 1
