"""Programs that XLA does not compile: `verify` and `audit` say what it says, beside what was planned."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxplan
from jaxplan.cli import commands

SIDE = 60_000


def twice(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sin(x @ y) @ x


SQUARES = (jax.ShapeDtypeStruct((SIDE, SIDE), jnp.bfloat16),) * 2


def no_room() -> tuple[Any, jaxplan.Plan]:
    """A step on a mesh of v5e's, and a plan that copies both matrices, of 7.2 GB each, to every one of them."""
    mesh = jaxplan.target("tpu-v5e:2x2").mesh(d=4)
    whole = {"x": jax.P(), "y": jax.P(), "result": jax.P()}
    step = jaxplan.auto_shard(twice, mesh, constraints=whole, memory_budget=1 << 40)
    return step, step.plan(*SQUARES)


@pytest.mark.aot_tpu
def test_a_plan_that_xla_has_no_room_for_is_told_with_both_numbers(tpu_topology: Any) -> None:
    step, plan = no_room()
    with pytest.raises(jaxplan.CompilerError) as refused:
        jaxplan.verify(step, *SQUARES)
    said = str(refused.value)
    assert said.startswith("XLA has no room for `twice` as planned: it takes ")
    assert f"where {plan.cost.peak_bytes / 2**30:.1f} GiB are planned, of a budget of 1.00 TiB" in said
    assert "memory_budget=" in said and isinstance(refused.value.__cause__, jax.errors.JaxRuntimeError)


@pytest.mark.aot_tpu
def test_shardings_that_xla_has_no_room_for_are_audited_all_the_same(tpu_topology: Any) -> None:
    mesh = jaxplan.target("tpu-v5e:2x2").mesh(d=4)
    audit = jaxplan.audit(twice, mesh, *SQUARES, in_shardings=jax.P(), out_shardings=jax.P(), compile=True)
    assert audit.theirs.compiled_bytes is not None and audit.theirs.compiled_bytes > 3 * 2 * SIDE**2
    assert audit.theirs.compiled_comm_s is None
    assert "refused: no room" in str(audit)


def failing(*_: Any, **__: Any) -> Any:
    raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure (creator.cc:1) of sums\nmore")


def test_a_compiler_that_fails_is_quoted(mesh_4x2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small = (jax.ShapeDtypeStruct((64, 64), jnp.float32),) * 2
    step = jaxplan.auto_shard(twice, mesh_4x2)
    monkeypatch.setattr(jax.stages.Lowered, "compile", failing)
    with pytest.raises(jaxplan.CompilerError, match=r"fails on `twice` as planned \(INTERNAL: .* of sums\)\. Plan"):
        jaxplan.verify(step, *small)
    with pytest.raises(jaxplan.CompilerError, match=r"fails on `twice` with template data's shardings \(INTERNAL"):
        jaxplan.audit(twice, mesh_4x2, *small, template="data", compile=True)


@pytest.mark.aot_tpu
def test_the_command_says_so_in_a_line(
    tpu_topology: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jax.stages.Lowered, "compile", failing)
    code = commands.main(["verify", "models.gpt:tiny", "--target", "tpu-v5e:2x2", "--mesh", "d=4"])
    assert code == commands.EXIT_NOT_AS_PLANNED
    assert "CompilerError: XLA's compiler fails on" in capsys.readouterr().err
