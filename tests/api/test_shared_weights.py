"""A weight that is used several times: the parts of its gradient are added up before they are summed over devices."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import jaxplan

WIDTH = 1024


def step(params: Any, batch: Any) -> Any:
    """Three branches through the same two matrices, whose gradients jax transposes before it adds them up."""

    def loss(params: Any) -> Any:
        outs = [jax.nn.gelu(batch[name] @ params["up"]) @ params["down"] for name in sorted(batch)]
        return jnp.mean(sum(jnp.abs(out) ** power for power, out in enumerate(outs, 1)))

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments(width: int, rows: int) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    params = {name: random.normal(size=(width, width)) / width for name in ("up", "down")}
    return params, {name: random.normal(size=(rows, width)) for name in "abc"}


@pytest.mark.parametrize("spec", [P(), P(None, "data"), P("data")])
def test_its_gradient_is_summed_once_as_the_search_decided(spec: P) -> None:
    """Whole or scattered; XLA's TPU compiler sends as much."""
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), arguments(WIDTH, 8192))
    plan = jaxplan.plan(
        step, AbstractMesh((8,), ("data",)), *shapes, hardware="tpu-v5e", donate_argnums=0,
        constraints={"params/*": spec, "batch/*": P("data")},
    )  # fmt: skip
    sums = Counter(c.kind for c in plan.collectives if c.bytes == 4 * WIDTH**2 and c.kind != "all_gather")
    assert sums == {"reduce_scatter": 2} or (not any(spec) and sums == {"all_reduce": 2})
    assert plan.cost.objective_s == pytest.approx(plan.cost.step_s, rel=0.02)


def averaged(state: Any, batch: Any) -> Any:
    """An optimizer reads each gradient twice: for its average and for that of its squares."""
    params, mean, square = state
    grads = jax.grad(lambda params: step(params, batch)[1])(params)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
    square = jax.tree.map(lambda s, g: 0.9 * s + 0.1 * g**2, square, grads)
    return jax.tree.map(lambda p, m, s: p - 0.1 * m / (jnp.sqrt(s) + 1e-3), params, mean, square), mean, square


def test_it_is_scattered_once_for_all_who_read_it_so() -> None:
    params, batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), arguments(WIDTH, 8192))
    plan = jaxplan.plan(
        averaged, AbstractMesh((8,), ("data",)), (params, params, params), batch, hardware="tpu-v5e",
        donate_argnums=0, constraints={"state/**": P("data"), "batch/*": P("data")},
    )  # fmt: skip
    sums = Counter(c.kind for c in plan.collectives if c.bytes == 4 * WIDTH**2 and c.kind != "all_gather")
    assert sums == {"reduce_scatter": 2}


@pytest.mark.parametrize("spec", [P(), P(None, "data"), P("data")])
def test_its_update_is_that_of_one_device(mesh_8: Mesh, spec: P) -> None:
    with jax.enable_x64(True):
        args = arguments(16, 8)
        sharded = jaxplan.auto_shard(step, mesh_8, constraints={"params/*": spec, "batch/*": P("data")})
        found, wanted = sharded(*args), jax.jit(step)(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), found, wanted)
