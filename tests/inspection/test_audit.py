"""Shardings of one's own are priced by the evaluator that prices plans, and what to change is said."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan.errors import ArgumentError, ConstraintError
from jaxplan.ir import trace
from jaxplan.lowering import compiled_work, lower_flat, price
from jaxplan.sharding import Layout, graph_rules
from tests.inspection.planted import Step

MESH = AbstractMesh((4, 2), ("data", "model"))


def step(params: Any, x: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def shapes(batch: int) -> tuple[Any, Any]:
    params = {
        "up": jax.ShapeDtypeStruct((512, 1024), jnp.float32),
        "down": jax.ShapeDtypeStruct((1024, 512), jnp.float32),
    }
    return params, jax.ShapeDtypeStruct((batch, 512), jnp.float32)


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("mlp", "tiny"),
        ("gpt", "tiny-scan"),
        pytest.param("lstm", "tiny", marks=pytest.mark.slow),
        pytest.param("resnet", "tiny", marks=pytest.mark.slow),
        pytest.param("gpt", "gpt2-scan", marks=pytest.mark.slow),
    ],
)
def test_a_plan_costs_what_the_evaluator_says(model: str, config: str) -> None:
    """The search's own prices against those of the layouts that Shardy's passes really give."""
    module = importlib.import_module(f"models.{model}")
    chosen = module.CONFIGS[config]
    state = jax.eval_shape(lambda: module.init_state(chosen, jax.random.key(0)))
    audit = jaxplan.audit(
        module.make_train_step(chosen), MESH, state, module.batch_shapes(chosen), template="megatron",
        donate_argnums=0, hardware="tpu-v5e", options={"compare_templates": False},
    )  # fmt: skip
    cost = audit.plan.cost
    assert audit.ours.compute_s == pytest.approx(cost.compute_s, rel=0.01)
    assert audit.ours.comm_s == pytest.approx(cost.comm_s, rel=1e-9)
    assert audit.ours.peak_bytes == pytest.approx(cost.peak_bytes, rel=0.02)
    assert audit.ours.flops == pytest.approx(sum(cost.flops_by_source.values()), rel=0.01)


SPECS = {
    "data parallel": ({"up": (), "down": ()}, (("data", "model"),)),
    "megatron": ({"up": (None, "model"), "down": ("model",)}, ("data",)),
    "fsdp": ({"up": (("data", "model"),), "down": (("data", "model"),)}, (("data", "model"),)),
    "a weight replicated by mistake": ({"up": (), "down": ("model",)}, ("data",)),
    "nothing cut": ({"up": (), "down": ()}, ()),
}


@pytest.mark.parametrize("name", SPECS)
def test_the_arithmetic_of_shardings_by_hand_is_what_is_compiled(name: str, mesh_4x2: Mesh) -> None:
    weights, rows = SPECS[name]
    traced = trace(step, shapes(256), {})

    def layout(entries: tuple[Any, ...], rank: int) -> Layout:
        dims = tuple(() if e is None else (e,) if isinstance(e, str) else e for e in entries)
        return Layout(dims=dims + ((),) * (rank - len(dims)))

    inputs = [layout(weights[leaf.path.split("/")[1]] if "/" in leaf.path else rows, 2) for leaf in traced.inputs]
    outputs = [*inputs[:2], Layout(dims=())]
    target = jaxplan.api.target_of(mesh_4x2)
    rules = graph_rules(traced.graph)
    priced = price(
        traced, rules, jaxplan.api.input_kinds(traced.graph, rules),
        jaxplan.api.model_of(target, jaxplan.Options()), target.abstract, inputs, outputs, platform="cpu",
    )  # fmt: skip
    compiled = lower_flat(traced, (), mesh_4x2, inputs, outputs).compile()
    work = compiled_work(compiled.as_text())
    assert work is not None
    assert sum(priced.flops.values()) == pytest.approx(sum(w.flops * w.trips for w in work))
    held = [np.prod(s.shard_shape(v.aval.shape)) * 4 for s, v in
            zip(jax.tree.leaves(compiled.input_shardings), traced.jaxpr.invars, strict=True)]  # fmt: skip
    parts = priced.memory.parts
    assert sum(parts.get(part, 0) for part in ("parameter", "optimizer", "state", "batch")) == sum(held)


def test_a_bad_choice_is_dearer_and_what_to_change_is_said(mesh_4x2: Mesh) -> None:
    """Everything replicated does all the work eight times."""
    audit = jaxplan.audit(
        step, mesh_4x2, *shapes(4096), in_shardings=P(), out_shardings=None, donate_argnums=0, compile=True
    )
    assert audit.theirs.flops == 8 * audit.ours.flops
    assert audit.theirs.step_s > 3 * audit.ours.step_s
    assert audit.theirs.comm_s == audit.theirs.compiled_comm_s == 0.0
    rows = next(change for change in audit.changes if "x" in change.paths)
    assert rows.before.spec() == P() and "data" in str(rows.after)
    text = str(audit)
    said = ("yours takes", "x the plan's time", "Where the difference is", "What to change (costs:", "test_audit.py:")
    for words in said:
        assert words in text


def test_shardings_of_the_plan_itself_leave_nothing_to_change(mesh_4x2: Mesh) -> None:
    plan = jaxplan.plan(step, mesh_4x2, *shapes(4096), donate_argnums=0)
    audit = jaxplan.audit(
        step, mesh_4x2, *shapes(4096), in_shardings=plan.in_shardings, out_shardings=plan.out_shardings,
        donate_argnums=0,
    )  # fmt: skip
    assert audit.changes == () and audit.unpriced == 0
    assert audit.theirs.inputs == audit.ours.inputs


def test_what_can_not_be_audited_says_why(mesh_4x2: Mesh) -> None:
    with pytest.raises(ArgumentError, match="either in_shardings"):
        jaxplan.audit(step, mesh_4x2, *shapes(64))
    rows = NamedSharding(mesh_4x2, P("data"))
    with pytest.raises(ConstraintError, match=r"x: .* cuts dimension 0 of float32\[6, 512\] in 4 pieces"):
        jaxplan.audit(step, mesh_4x2, *shapes(6), in_shardings=(P(), rows))
    with pytest.raises(ConstraintError, match=r"params/down: .* names axis 'tensor'; the mesh has data, model"):
        jaxplan.audit(step, mesh_4x2, *shapes(64), in_shardings=({"up": P(), "down": P("tensor")}, P()))
    with pytest.raises(ConstraintError, match="in_shardings is no prefix"):
        jaxplan.audit(step, mesh_4x2, *shapes(64), in_shardings=({"left": P()}, P()))
    with pytest.raises(ArgumentError, match="needs a mesh with devices"):
        jaxplan.audit(step, MESH, *shapes(64), template="data", hardware="tpu-v5e", compile=True)


@pytest.mark.aot_tpu
def test_both_sides_are_compiled_for_a_target(tpu_topology: Any) -> None:
    mesh = jaxplan.target("tpu-v5e:2x4").mesh(data=4, model=2)
    rows = P(("data", "model"))
    inputs = ({"params": P(), "momentum": P()}, rows)
    audit = jaxplan.audit(
        Step(), mesh, *Step().shapes(), in_shardings=inputs, out_shardings=(inputs[0], P()), donate_argnums=0,
        compile=True,
    )  # fmt: skip
    for side in (audit.theirs, audit.ours):
        # what the compiler combines starts once
        assert side.compiled_comm_s is not None and 0.7 * side.comm_s < side.compiled_comm_s < 1.01 * side.comm_s
        assert side.compiled_bytes is not None and side.compiled_bytes <= 1.2 * side.peak_bytes + 8 * 2**20


def test_loops_are_named_by_lines_of_the_program() -> None:
    def until(w: Any, x: Any) -> Any:
        return jax.lax.while_loop(lambda c: jnp.max(c) > 1, lambda c: jnp.tanh(c @ w), x)

    shape = jax.ShapeDtypeStruct((512, 512), "float32")
    mesh = AbstractMesh((4, 2), ("data", "model"))
    (warning,) = jaxplan.audit(until, mesh, shape, shape, in_shardings=(P("data"), P()), hardware="tpu-v5e").warnings
    assert "trip count" in warning and "test_audit.py" in warning and "jaxplan_in" not in warning
