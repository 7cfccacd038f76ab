"""Sums that stay in parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan.lowering.hlo import compiled_collectives
from jaxplan.lowering.pending import Held, finished, held_as
from jaxplan.sharding import Layout


@pytest.mark.parametrize("shape", [(8, 3), (0, 3)])
def test_a_sum_in_parts_is_finished_whatever_it_holds(shape: tuple[int, int], mesh_4x2: Mesh) -> None:
    value = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    layout = Layout(dims=((), ()), unreduced=("data", "model"))
    made = jax.jit(lambda x: finished(held_as(x, layout, mesh_4x2), mesh_4x2))(value)
    np.testing.assert_array_equal(made, value)


def test_a_sum_that_some_axes_scatter_is_summed_over_these_first(mesh_4x2: Mesh) -> None:
    value = jnp.arange(8 * 16, dtype=jnp.float32).reshape(8, 16)
    layout = Layout(dims=((), ()), unreduced=("data", "model"))
    read = NamedSharding(mesh_4x2, P(None, "data"))

    def step(x: jax.Array) -> jax.Array:
        parts = held_as(x, layout, mesh_4x2)
        parts = Held(parts.parts + 1, parts.axes, parts.dims)  # a sum of eight parts
        return jax.lax.with_sharding_constraint(finished(parts, mesh_4x2, read=(read,)), read)

    compiled = jax.jit(step).lower(value).compile()
    np.testing.assert_array_equal(compiled(value), value + 8)
    sent = list(compiled_collectives(compiled.as_text(), (("data", 4), ("model", 2))))
    assert {c.axes for c in sent} == {("data",), ("model",)}


PLACES = {
    "weights/a": P(("data", "model"), None),
    "weights/b": P(("model", "data"), None),
    "weights/c": P("model", "data"),
    "weights/d": P("data", "model"),
}


def weights() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(PLACES))
    return {place[-1]: jax.random.normal(key, (16, 32)) for place, key in zip(PLACES, keys, strict=True)}


def number_of_sums(step: Callable[..., Any], mesh: Mesh) -> int:
    """How many numbers the step, compiled for CPU, all_reduces; several may share one. Checks the result."""
    given = weights()
    planned = jaxplan.auto_shard(step, mesh, constraints=PLACES)
    np.testing.assert_allclose(planned(given), step(given), rtol=1e-6)
    text = planned.lower(given).compile().as_text()
    return sum(line.split(" all-reduce(")[0].count("f32[]") for line in text.splitlines() if " all-reduce(" in line)


def test_a_norm_is_summed_once_however_weights_are_cut(mesh_4x2: Mesh) -> None:
    def step(weights: dict[str, jax.Array]) -> jax.Array:
        return jnp.sqrt(sum(jnp.sum(x**2) for x in weights.values()))

    assert number_of_sums(step, mesh_4x2) == 1


def test_parts_are_no_pins_that_a_user_could_write(mesh_4x2: Mesh, tmp_path: Path) -> None:
    def step(weights: dict[str, jax.Array]) -> jax.Array:
        return jnp.sqrt(sum(jnp.sum(x**2) for x in weights.values()))

    plan = jaxplan.auto_shard(step, mesh_4x2, constraints=PLACES).plan(weights())
    assert any(not one.is_pin for one in plan.constraints)
    assert "for held" not in plan.to_python()
    plan.to_html(tmp_path / "plan.html")
    assert "pinned with" not in (tmp_path / "plan.html").read_text()


def test_numbers_that_are_added_are_summed_over_devices_once(mesh_4x2: Mesh) -> None:
    """Scaled sums among them, and a number that counts once."""

    def step(weights: dict[str, jax.Array]) -> jax.Array:
        a, b, c, d = weights.values()
        return jnp.exp(1e-3 * (0.5 * (jnp.sum(a * b) + jnp.sum(c)) + jnp.sum(d**2)) + 3)

    assert number_of_sums(step, mesh_4x2) == 1
