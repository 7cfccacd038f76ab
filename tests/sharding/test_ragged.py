"""Products of ragged groups: what the partitioner sends for them, as planned and as compiled for TPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan.lowering import compiled_collectives
from jaxplan.sharding import partition

ROWS, WIDTH, OUT, GROUPS = 4096, 512, 1024, 8
SHAPES = [
    jax.ShapeDtypeStruct(shape, dtype)
    for shape, dtype in (((ROWS, WIDTH), jnp.bfloat16), ((GROUPS, WIDTH, OUT), jnp.bfloat16), ((GROUPS,), jnp.int32))
]

CASES = {
    "columns": (P(), P(None, None, "data"), P(None, "data"), []),
    "sum": (P(None, "data"), P(None, "data"), P(), [("all_reduce", ROWS * OUT)]),
    "scattered sum": (P(None, "data"), P(None, "data"), P(None, "data"), [("reduce_scatter", ROWS * OUT)]),
    "ragged rows": (P("data"), P(), P("data"), [("all_gather", ROWS * WIDTH)]),
    "groups": (P(), P("data"), P(), [("all_gather", GROUPS * WIDTH * OUT)]),
}
"""Layouts of rows, matrices and results, and what is sent: kinds and elements."""


def product(x: Any, w: Any, sizes: Any) -> Any:
    return lax.ragged_dot(x, w, sizes)


def lowered(case: str, mesh: Any) -> Any:
    rows, matrices, result, _ = CASES[case]
    there = [NamedSharding(mesh, spec) for spec in (rows, matrices, P())]
    jitted = jax.jit(product, in_shardings=there, out_shardings=NamedSharding(mesh, result))
    return jitted.trace(*SHAPES).lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("case", CASES)
def test_ragged_rows_and_groups_are_gathered_and_the_rest_is_cut(case: str) -> None:
    found = partition(lowered(case, AbstractMesh((4, 2), ("data", "model"))).compiler_ir("stablehlo")).collectives
    assert [(c.kind, c.bytes // 2) for c in found if c.kind != "all_slice"] == CASES[case][3]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_so_they_are_compiled_for_tpu(case: str, tpu_topology: Callable[[str], Any]) -> None:
    mesh = Mesh(np.array(tpu_topology("v5e:2x4").devices).reshape(4, 2), ("data", "model"))
    found = compiled_collectives(lowered(case, mesh).compile().as_text(), (("data", 4), ("model", 2)))
    assert [(c.kind, c.bytes // 2) for c in found] == CASES[case][3]


def test_what_is_priced_is_what_was_searched() -> None:
    """Experts cut by columns and rows: the sum over their pieces was missing from the plan, and from its price."""

    def step(weights: Any, x: Any, sizes: Any) -> Any:
        def loss(weights: Any) -> Any:
            hidden = jnp.tanh(lax.ragged_dot(x, weights[0], sizes))
            return jnp.mean(lax.ragged_dot(hidden, weights[1], sizes).astype(jnp.float32) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    mesh = AbstractMesh((4, 2), ("data", "model"))
    up, down = SHAPES[1], jax.ShapeDtypeStruct((GROUPS, OUT, WIDTH), jnp.bfloat16)
    constraints = {"weights/0": P(None, None, ("data", "model")), "weights/1": P(None, ("data", "model"))}
    settings = {"hardware": "tpu-v5e", "constraints": constraints, "options": {"compare_templates": False}}
    plan = jaxplan.plan(step, mesh, (up, down), SHAPES[0], SHAPES[2], **settings)
    assert any(c.kind in ("all_reduce", "reduce_scatter") and c.bytes == 2 * ROWS * WIDTH for c in plan.collectives)
    assert plan.cost.step_s == pytest.approx(plan.cost.objective_s, rel=0.02)
