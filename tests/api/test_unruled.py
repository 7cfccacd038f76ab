"""A primitive without a sharding rule: replicated, named, and its price told."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxplan

flipped = Primitive("flipped_by_no_one")
flipped.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
# A lowering of its own: what `mlir.lower_fun` makes is seen through.
mlir.register_lowering(flipped, lambda ctx, x: mlir.lower_fun(lambda x: x[::-1], multiple_results=False)(ctx, x))

ROWS = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)


def planned(step: Any, mesh: Mesh) -> jaxplan.Plan:
    return jaxplan.plan(
        step, mesh, ROWS, constraints={"x": P("data", "model"), "result": P("data", "model")},
        options={"compare_templates": False},
    )  # fmt: skip


def test_its_computation_and_the_gather_before_it_are_its_price(mesh_4x2: Mesh) -> None:
    once = planned(lambda x: flipped.bind(x) * 2, mesh_4x2)
    assert set(once.unruled_s) == {"flipped_by_no_one"}
    sent_s = sum(c.seconds_s for c in once.collectives)
    assert 0 < sent_s < once.unruled_s["flipped_by_no_one"] <= once.cost.step_s
    # Twice, with a change between that nobody can take out.
    twice = planned(lambda x: flipped.bind(jnp.sin(flipped.bind(x))) * 2, mesh_4x2)
    assert twice.unruled_s["flipped_by_no_one"] > once.unruled_s["flipped_by_no_one"]


def test_the_warning_tells_what_it_costs_and_what_to_do(mesh_4x2: Mesh) -> None:
    (warning,) = planned(lambda x: flipped.bind(x) * 2, mesh_4x2).warnings
    for words in ("`flipped_by_no_one` at ", "replicated: ", " a step", "jaxplan.register_rule"):
        assert words in warning


def test_strict_refuses_it(mesh_4x2: Mesh) -> None:
    with pytest.raises(jaxplan.RuleError, match="flipped_by_no_one"):
        jaxplan.plan(lambda x: flipped.bind(x), mesh_4x2, ROWS, options={"strict": True})


def test_where_everything_has_a_rule_there_is_nothing_to_tell(mesh_4x2: Mesh) -> None:
    plan = planned(lambda x: jnp.sin(x), mesh_4x2)
    assert plan.unruled_s == {} and plan.warnings == ()
    assert np.isfinite(plan.cost.step_s)


@pytest.mark.parametrize("hardware", ["tpu-v5e", "h100", "cpu-host"])
def test_steps_with_callbacks_are_planned_for_devices_that_are_not_here(hardware: str) -> None:
    """jax lowers a callback for its own platform's devices alone; one on a number is no matter to warn of."""

    def step(x: Any) -> Any:
        jax.debug.callback(lambda total: None, x.sum())
        same = jax.ShapeDtypeStruct((1024,), x.dtype)
        return x @ x.T, jax.pure_callback(np.sin, same, x[0]), jax.pure_callback(np.sin, same, x[1])

    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    plan = jaxplan.plan(step, mesh, ROWS, hardware=hardware, options={"compare_templates": False})
    assert len(plan.warnings) == 1 and "pure_callback" in plan.warnings[0]
