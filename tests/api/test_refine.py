"""Refining: what is kept is the fastest of what was compiled, each line says what was tried, nothing else changes."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxplan
from jaxplan.api import refine
from jaxplan.lowering import CompiledPrice


def step(params: Any, x: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


PARAMS = {"up": np.full((64, 128), 0.01, np.float32), "down": np.full((128, 64), 0.01, np.float32)}
X = np.ones((32, 64), np.float32)


def test_the_fastest_as_compiled_is_kept(mesh_4x2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A yardstick that likes one template alone: that one is returned, and runs."""
    asked: list[str] = []
    compiled = refine._compiled

    def partial(pipeline: Any, candidate: Any) -> tuple[CompiledPrice, int]:
        price, peak_bytes = compiled(pipeline, candidate)
        assert price.step_s > 0 and peak_bytes > 0
        asked.append(candidate.name)
        seconds = 1e-6 if candidate.name == "data" else 1.0
        return CompiledPrice(compute_s=seconds, comm_s=0.0, rule="liking"), peak_bytes

    monkeypatch.setattr(refine, "_compiled", partial)
    sharded = jaxplan.auto_shard(step, mesh_4x2, options={"refine": 9})
    plan = sharded.plan(PARAMS, X)
    tried = [line for line in plan.assumptions if line.startswith("refined: ")]
    assert asked[0] not in asked[1:] and "data" in asked and len(tried) == len(asked)
    assert plan.search == "data" and not any(axis for axis in plan.specs["params/up"])
    new, loss = sharded(PARAMS, X)
    expected, expected_loss = step(PARAMS, X)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(new["up"], expected["up"], rtol=1e-5)


def test_no_more_are_compiled_than_asked_for(mesh_8: Any) -> None:
    plan = jaxplan.plan(step, mesh_8, PARAMS, X, options={"refine": 2})
    tried = [re.match(r"refined: (\w+) as compiled", line) for line in plan.assumptions]
    assert 1 <= sum(found is not None for found in tried) <= 2


def test_refining_needs_devices() -> None:
    with pytest.raises(
        jaxplan.ArgumentError, match=r"options\.refine compiles plans, and an AbstractMesh has no dev"
    ):
        jaxplan.plan(
            step,
            jax.sharding.AbstractMesh((8,), ("d",)),
            PARAMS,
            X,
            hardware="tpu-v5e",
            options={"refine": 1},
        )
    with pytest.raises(jaxplan.ArgumentError, match=r"options\.refine=-1 must be a number of plans"):
        jaxplan.Options(refine=-1)
