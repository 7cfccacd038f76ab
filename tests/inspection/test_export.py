"""The fewest constraints: none of them can be left out, and the program that they make is as good as the plan's."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxplan
from jaxplan.api import as_options, step_of_shapes, target_of
from jaxplan.inspection.audit import Auditor

SHAPES = (
    {"table": jax.ShapeDtypeStruct((512, 128), np.float32), "up": jax.ShapeDtypeStruct((128, 2048), np.float32),
     "down": jax.ShapeDtypeStruct((2048, 128), np.float32)},
    jax.ShapeDtypeStruct((64, 16), np.int32),
)  # fmt: skip
QUIET: dict[str, Any] = {"progress": False, "compare_templates": False}


def step(params: Any, tokens: Any) -> Any:
    def loss(params: Any) -> Any:
        x = params["table"][tokens]
        for _ in range(2):
            x = x + jax.nn.relu(x @ params["up"]) @ params["down"]
        scores = jax.nn.log_softmax(x @ params["table"].T)
        return -jnp.take_along_axis(scores, tokens[..., None], axis=-1).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def test_every_line_that_is_left_is_needed(mesh_4x2: Mesh) -> None:
    plan = jaxplan.plan(step, mesh_4x2, *SHAPES, hardware="h100", options=QUIET)
    found = jaxplan.export(plan, step, *SHAPES, options=QUIET)
    assert found.step_s <= found.all_s * 1.01 and found.lines < found.all_lines
    assert set(found.plan.constraints) <= set(plan.constraints)
    target = target_of(mesh_4x2, "h100")
    chosen = as_options(QUIET)
    auditor = Auditor(step_of_shapes(step, SHAPES, (), chosen).traced(target), target, chosen)
    assert auditor.of_plan(found.plan).step_s() == pytest.approx(found.step_s)
    assert auditor.of_plan(plan).step_s() == pytest.approx(found.all_s)
    assert auditor.of_plan(replace(plan, constraints=())).step_s() == pytest.approx(found.none_s)
    by_line = defaultdict(list)
    for one in found.plan.constraints:
        by_line[one.source, one.primitive, one.shape, str(one.layout.spec()), one.why].append(one)
    assert len(by_line) == found.lines
    for group in by_line.values():
        rest = tuple(one for one in found.plan.constraints if one not in group)
        without = auditor.of_plan(replace(plan, constraints=rest))
        assert without.step_s() > found.all_s * 1.01 or without.memory.peak_bytes > plan.budget_bytes


def test_what_is_exported_runs_and_says_what_it_is(mesh_4x2: Mesh) -> None:
    plan = jaxplan.plan(step, mesh_4x2, *SHAPES, options=QUIET)
    found = jaxplan.export(plan, step, *SHAPES, options=QUIET)
    text = str(found)
    assert f"{found.lines:>5} lines" in text and "Export of the plan of `step`" in text
    assert len(found.to_python()) < len(plan.to_python())
    params = jax.tree.map(lambda s: jax.random.normal(jax.random.key(0), s.shape) * 0.1, SHAPES[0])
    tokens = jax.random.randint(jax.random.key(1), (64, 16), 0, 512)
    sharded = jaxplan.auto_shard(step, mesh_4x2, options={**QUIET, "plan": found.plan})
    ours, theirs = sharded(params, tokens), jax.jit(step)(params, tokens)
    for name in params:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


def test_a_plan_of_another_program_is_refused(mesh_4x2: Mesh) -> None:
    plan = jaxplan.plan(step, mesh_4x2, *SHAPES, options=QUIET)
    with pytest.raises(jaxplan.PlanMismatchError, match="another program than `<lambda>`"):
        jaxplan.export(plan, lambda p, t: jax.tree.map(jnp.sin, step(p, t)), *SHAPES, options=QUIET)
    with pytest.raises(jaxplan.ArgumentError, match="takes a Plan, its plain step"):
        jaxplan.export(step, plan, *SHAPES)  # type: ignore[arg-type]
