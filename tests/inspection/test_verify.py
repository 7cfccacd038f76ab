"""Each planted mismatch between a plan and a compiled program is found, and its place named; the plan itself passes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan.errors import ArgumentError
from jaxplan.inspection import verify
from tests.inspection.planted import Step, over, planned, relaid

WHOLE = ((), (), ())


def both(name: str, layout: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """The layout of a leaf of the state, as argument and as result."""
    return {f"state/{name}": layout, f"result/0/{name}": layout}


def rerun(mesh: Mesh, plan: Any, changes: dict[str, tuple[Any, ...]]) -> Any:
    """The step compiled under `plan` with other layouts."""
    return planned(mesh, plan=relaid(plan, changes, changes)).lower(*Step().shapes())


def dropped_constraints(mesh: Mesh, plan: Any) -> Any:
    bare = dataclasses.replace(plan, constraints=())
    return planned(mesh, plan=bare).lower(*Step().shapes())


def another_mesh(mesh: Mesh, plan: Any) -> Any:
    turned = Mesh(mesh.devices.reshape(2, 4), ("data", "model"))
    return planned(turned).lower(*Step().shapes())


PLANTED: dict[str, tuple[Callable[[Mesh, Any], Any], str, str]] = {
    "a constraint dropped": (dropped_constraints, "collective", r"planted\.py:\d+ \(Step"),
    "a wrong spec": (
        lambda mesh, plan: rerun(mesh, plan, both("params/up", ((), ("model",), ()))),
        "sharding",
        "state/params/up: planned .*'model'.* compiled",
    ),
    "a wrong mesh axis": (
        lambda mesh, plan: rerun(mesh, plan, both("params/down", ((), ("data",), ()))),
        "sharding",
        "state/params/down: planned .*'model'.* compiled .*'data'",
    ),
    "the optimizer's state replicated": (
        lambda mesh, plan: rerun(mesh, plan, both("momentum/up", WHOLE) | both("momentum/down", WHOLE)),
        "sharding",
        "state/momentum/(up|down): .*1.00 MiB a device.*2.00 MiB",
    ),
    "the batch replicated": (
        lambda mesh, plan: rerun(mesh, plan, {"batch/x": ((), ()), "batch/y": ((), ())}),
        "sharding",
        "batch/x: .*8.00 MiB",
    ),
    "results gathered": (
        lambda mesh, plan: planned(
            mesh, plan=relaid(plan, {}, {"result/0/params/up": WHOLE, "result/0/momentum/up": WHOLE}), donate=False
        ).lower(*Step().shapes()),
        "sharding",
        "result/0/params/up: planned",
    ),
    "an extra reshard": (
        lambda mesh, plan: planned(mesh, Step(inside=over(mesh)), search="ilp").lower(*Step().shapes()),
        "collective",
        r"planted\.py:\d+ \(.*: all_gather over",
    ),
    "a donation lost": (
        lambda mesh, plan: planned(mesh, donate=False).lower(*Step().shapes()),
        "donation",
        "state/momentum/down, state/momentum/up, state/params/down, state/params/up: .*4.00 MiB more a device",
    ),
    "another dtype": (
        lambda mesh, plan: planned(mesh, Step(dtype=jnp.bfloat16)).lower(*Step(dtype=jnp.bfloat16).shapes()),
        "argument",
        r"state/params/up: planned float32\[4, 256, 512\], compiled bfloat16",
    ),
    "another batch size": (
        lambda mesh, plan: planned(mesh, Step(batch=16384)).lower(*Step(batch=16384).shapes()),
        "argument",
        r"batch/x: planned float32\[8192, 256\], compiled float32\[16384, 256\]",
    ),
    "more trips of the loop": (
        lambda mesh, plan: planned(mesh, Step(layers=6)).lower(*Step(layers=6).shapes()),
        "computation",
        r"planted\.py:\d+ \(Step.*\): planned .* \(\+50%\)",
    ),
    "rematerialisation lost": (
        lambda mesh, plan: planned(mesh, Step(remat=False)).lower(*Step().shapes()),
        "computation",
        r"\(-14%\): planted\.py:\d+ \(Step.*what was to be computed again, or twice, is kept",
    ),
    "another mesh": (another_mesh, "mesh", r"\(data=2, model=4\): the plan was made for \(data=4, model=2\)"),
}


@pytest.fixture(scope="module")
def promised(mesh_4x2: Mesh) -> Any:
    return planned(mesh_4x2).plan(*Step().shapes())


def test_what_was_planned_is_what_was_compiled(mesh_4x2: Mesh, promised: Any) -> None:
    found = verify(planned(mesh_4x2), *Step().shapes())
    assert found.ok, str(found)
    flops = next(q for q in found.quantities if q.unit == "FLOP")
    # six products forward and backward and one of the two again, each over the batch's and the tensors' parts
    assert flops.planned == flops.compiled == 7 * 2 * 8192 * 256 * 512 * 4 / 8
    arguments = next(q for q in found.quantities if q.name == "arguments")
    assert arguments.planned == arguments.compiled
    again = verify(promised, Step(), *Step().shapes(), donate_argnums=0)
    assert again.quantities == found.quantities


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mismatch_is_found_and_placed(name: str, mesh_4x2: Mesh, promised: Any) -> None:
    plant, what, said = PLANTED[name]
    found = verify(plant(mesh_4x2, promised), plan=promised)
    assert not found.ok
    grave = [str(finding) for finding in found.findings if finding.grave and finding.what == what]
    assert any(re.search(said, text) for text in grave), str(found)
    assert "NOT as planned" in str(found)


def test_a_program_compiled_by_hand_is_held_against_a_plan(mesh_8: Mesh) -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return x @ w

    shapes = (jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((1024, 512), jnp.float32))
    plan = jaxplan.plan(step, mesh_8, *shapes, constraints={"w": P(), "x": P("data"), "result": P("data")})
    rows, whole = NamedSharding(mesh_8, P("data")), NamedSharding(mesh_8, P())
    good = jax.jit(step, in_shardings=(whole, rows), out_shardings=rows).lower(*shapes)
    assert verify(good, plan=plan).ok and verify(good.compile(), plan=plan).ok
    assert verify(plan, good.compile()).ok, "the other way round"
    columns = NamedSharding(mesh_8, P(None, "data"))
    bad = jax.jit(step, in_shardings=(whole, columns), out_shardings=rows).lower(*shapes)
    grave = [finding for finding in verify(bad, plan=plan).findings if finding.grave]
    assert {"sharding", "collective"} <= {finding.what for finding in grave}
    moved = next(finding for finding in grave if finding.what == "collective")
    assert re.match(r"test_verify\.py:\d+ \(test_a_program", moved.where) and moved.seconds_s > 0


def test_a_sum_made_whole_where_a_scattered_one_was_planned_is_another_program(mesh_8: Mesh) -> None:
    """XLA does so on its own where a piece of a sum is no whole tile: twice as much is sent."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return x @ w

    shapes = (jax.ShapeDtypeStruct((8192, 1024), jnp.float32), jax.ShapeDtypeStruct((1024, 8192), jnp.float32))
    layouts = {"w": P("data"), "x": P(None, "data"), "result": P("data")}
    plan = jaxplan.plan(step, mesh_8, *shapes, constraints=layouts, hardware="tpu-v5e")
    assert [c.kind for c in plan.collectives] == ["reduce_scatter"]

    def whole(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh_8, P()))

    given = [NamedSharding(mesh_8, layouts[name]) for name in ("w", "x", "result")]
    lowered = jax.jit(whole, in_shardings=tuple(given[:2]), out_shardings=given[2]).lower(*shapes)
    found = verify(lowered, plan=plan)
    (grave,) = [finding for finding in found.findings if finding.grave]
    assert re.match(r"all_reduce over data of 4.00 MiB, where a reduce_scatter was planned", grave.text), grave
    assert grave.seconds_s > 0 and not found.ok


def test_what_can_not_be_verified_says_what_can(mesh_4x2: Mesh, promised: Any) -> None:
    with pytest.raises(ArgumentError, match="needs the step that the plan is of"):
        verify(promised)
    with pytest.raises(ArgumentError, match="pass plan="):
        verify(jax.jit(lambda x: x).lower(1.0))
    with pytest.raises(ArgumentError, match="got int"):
        verify(3)
    abstract = jax.sharding.AbstractMesh((2,), ("data",))
    step = jaxplan.auto_shard(lambda x: x + 1, abstract, hardware="tpu-v5e")
    with pytest.raises(ArgumentError, match=r"without devices.*jaxplan\.target"):
        verify(step, jax.ShapeDtypeStruct((8,), jnp.float32))


@pytest.mark.aot_tpu
@pytest.mark.parametrize("name", ["a wrong mesh axis", "an extra reshard", "a donation lost", "more trips of the loop"])
def test_mismatches_in_a_program_for_tpu_are_found_too(
    name: str, tpu_topology: Callable[[str], Any]
) -> None:
    mesh = jaxplan.target("tpu-v5e:2x4").mesh(data=4, model=2)
    plan = planned(mesh).plan(*Step().shapes())
    plant, what, said = PLANTED[name]
    found = verify(plant(mesh, plan), plan=plan)
    assert any(f.grave and f.what == what and re.search(said, str(f)) for f in found.findings), str(found)


@pytest.mark.aot_tpu
def test_what_was_planned_for_tpu_is_what_was_compiled(tpu_topology: Callable[[str], Any]) -> None:
    mesh = jaxplan.target("tpu-v5e:2x4").mesh(data=4, model=2)
    found = verify(planned(mesh), *Step().shapes())
    assert found.ok, str(found)


@pytest.mark.aot_tpu
def test_arguments_are_compared_as_they_lie_in_tiles(tpu_topology: Callable[[str], Any]) -> None:
    mesh = jaxplan.target("tpu-v5e:2x4").mesh(data=4, model=2)
    shapes = [jax.ShapeDtypeStruct((1000, 3, 5), jnp.bfloat16), jax.ShapeDtypeStruct((64, 256), jnp.float32)]
    step = jaxplan.auto_shard(lambda w, x, unused: (x.sum() * w, x), mesh, hardware="tpu-v5e")
    found = verify(step, *shapes, jax.ShapeDtypeStruct((4096, 4096), jnp.float32))
    arguments = next(q for q in found.quantities if q.name == "arguments")
    assert arguments.planned == arguments.compiled


@pytest.mark.aot_gpu
def test_what_was_planned_for_gpu_is_what_was_compiled(cuda_compiler: None) -> None:
    mesh = jaxplan.target("h100:1x1x8").mesh(data=4, model=2)
    found = verify(planned(mesh), *Step().shapes())
    assert found.ok, str(found)


def test_a_sum_that_is_partly_scattered_is_pinned_as_it_is_read() -> None:
    """Pinned whole where it is made, XLA for TPU summed it over both axes and cut it afterwards."""
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    step = jaxplan.auto_shard(
        Step(), mesh, donate_argnums=0, hardware="tpu-v5e", options={"compare_templates": False},
        constraints={"state/*/up": P(None, None, "model"), "state/*/down": P(None, "model"), "batch/*": P("data")},
    )  # fmt: skip
    plan = step.plan(*Step().shapes())
    sent = {(c.kind, c.axes) for c in plan.collectives if c.primitive == "dot_general" and c.trips > 1}
    assert {("reduce_scatter", ("model",)), ("all_reduce", ("data",))} <= sent
    sums = [c.layout for c in plan.constraints if c.why == "sum" and c.primitive == "dot_general"]
    assert sums and all(("model",) in layout.dims for layout in sums)


def test_loops_that_may_end_early_run_as_often_on_both_sides(mesh_4x2: Mesh) -> None:
    """As often as the step was planned with, which is said."""

    def search(table: Any, x: Any) -> Any:
        def going(state: tuple[Any, Any]) -> Any:
            return (state[0] < 100) & jnp.any(state[1] > 0)

        return jax.lax.while_loop(going, lambda s: (s[0] + 1, jnp.tanh(s[1] @ table)), (0, x))

    shapes = [jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((64, 256), jnp.float32)]
    step = jaxplan.auto_shard(search, mesh_4x2, hardware="cpu-host", options={"while_trips": 7})
    found = verify(step, *shapes)
    (products,) = (q for q in found.quantities if q.name == "matrix products")
    assert products.planned == products.compiled
    assert any("7 iterations are assumed" in line for line in found.assumptions)
    assert "7 iterations are assumed" in str(found)
