"""What a loop leaves in a TPU's vector memory is read from main memory once, where XLA leaves it there."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import jaxplan
from jaxplan.cost import traffic
from jaxplan.hardware import load_profile
from jaxplan.ir import trace
from jaxplan.sharding import graph_rules

ROWS, STEPS = 32, 64


def recurrent(weights: Any, x: Any) -> Any:
    weights = weights.astype(jnp.bfloat16)
    return jax.lax.scan(
        lambda h, _: (jnp.tanh(h.astype(jnp.bfloat16) @ weights).astype(jnp.float32), None), x, None, length=STEPS
    )[0]


def shapes(width: int, rows: int = ROWS) -> tuple[Any, Any]:
    return jax.ShapeDtypeStruct((width, width), np.float32), jax.ShapeDtypeStruct((rows, width), np.float32)


def compute_s(width: int, devices: int = 1, hardware: str = "tpu-v5e", **constraints: Any) -> float:
    mesh = AbstractMesh((devices,), ("d",))
    options = {"compare_templates": False}
    plan = jaxplan.plan(
        recurrent, mesh, *shapes(width), hardware=hardware, options=options, constraints=constraints or None
    )
    return plan.cost.compute_s


def test_weights_that_fit_are_read_once() -> None:
    profile = load_profile("tpu-v5e")
    rate = profile.hbm_bytes_per_s * profile.hbm_efficiency
    fits, too_many = 5120, 8192
    assert 2 * fits**2 < profile.on_chip_bytes < 2 * too_many**2
    assert compute_s(fits) < STEPS * 2 * fits**2 / rate / 2
    assert compute_s(too_many) > STEPS * 2 * too_many**2 / rate
    whole = PartitionSpec()
    half = compute_s(too_many, 2, weights=PartitionSpec(None, "d"), x=whole)  # a piece fits
    assert half < STEPS * too_many**2 / rate / 2


def test_on_gpu_nothing_stays() -> None:
    profile = load_profile("h100")
    bytes_read = STEPS * 2 * 5120**2
    assert compute_s(5120, hardware="h100") > bytes_read / (profile.hbm_bytes_per_s * profile.hbm_efficiency)


def test_sums_that_a_loop_adds_to_stay_too_and_what_changes_does_not() -> None:
    def gradient(weights: Any, x: Any) -> Any:
        return jax.grad(lambda w: recurrent(w, x).sum())(weights)

    graph = trace(gradient, shapes(512), {}).graph
    crossing = traffic(graph, graph_rules(graph), "tpu")
    kept = {(graph.ops[op].primitive, place) for op, place in crossing.resident}
    assert ("dot_general", 1) in kept  # the weights, by h @ w
    sums = [(op, place) for op, place in crossing.resident if graph.ops[op].primitive in ("add", "add_any")]
    assert sums, kept
    for op, place in crossing.resident:
        assert crossing.resident[op, place].trips == STEPS
        assert graph.ops[op].primitive != "scan_slice"
    changing = [op for op in graph.ops if op.primitive == "tanh"]
    assert changing and not any((op.index, 0) in crossing.resident for op in changing)


def test_a_product_with_a_vector_takes_its_tiles() -> None:
    """Expected by the compiler, v5e: 58,667 cycles of [1024] @ [1024, 3072] in f32, 38,774 of [2048, 1024] @ [1024]."""
    profile, mesh = load_profile("tpu-v5e"), AbstractMesh((1,), ("d",))
    assert profile.clock_hz is not None
    for left, right, cycles in (((1024,), (1024, 3072), 58_667), ((2048, 1024), (1024,), 38_774)):
        args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in (left, right)]
        plan = jaxplan.plan(lambda x, y: x @ y, mesh, *args, hardware="tpu-v5e")
        assert plan.cost.compute_s == pytest.approx(cycles / profile.clock_hz, rel=0.2)


def test_a_vector_for_each_of_a_batch_is_the_vector_unit_s_too() -> None:
    """One query against its keys, and what its scores take of the values: 26.5 and 52.3 us expected for v5e, in f32."""
    mesh = AbstractMesh((1,), ("d",))
    for product, left, right, microseconds in (
        ("sb,sbh->bh", (64, 32), (64, 32, 1024), 26.5), ("bhd,bshd->bhs", (8, 8, 128), (8, 512, 8, 128), 52.3)
    ):  # fmt: skip
        args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in (left, right)]
        plan = jaxplan.plan(lambda x, y, way=product: jnp.einsum(way, x, y), mesh, *args, hardware="tpu-v5e")
        assert plan.cost.compute_s == pytest.approx(1e-6 * microseconds, rel=0.2)


@pytest.mark.aot_tpu
def test_the_compiler_leaves_in_vector_memory_what_is_said(tpu_topology: Callable[[str], Any]) -> None:
    mesh = Mesh(np.array(tpu_topology("v5e:2x4").devices)[:1], ("d",))
    placed = NamedSharding(mesh, PartitionSpec())
    for width, kept in ((5120, True), (8192, False)):
        text = jax.jit(recurrent, in_shardings=placed).lower(*shapes(width)).compile().as_text()
        (loop,) = [line for line in text.splitlines() if " while(" in line]
        held = re.search(rf"bf16\[{width},{width}\]{{[^}}]*}}", loop)
        assert held is not None and ("S(1)" in held[0]) == kept
