"""What the evaluator of any shardings says of sums that a loop accumulates: as often as XLA makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan.cost import collective_seconds
from jaxplan.hardware import axis_links, load_profile

STEPS, ROWS, WIDTH = 8, 512, 1024
RUNS = {"plain": 1, "divided": STEPS, "decayed": STEPS}
"""How often the compiled programs sum a gradient over devices, v5e and H100, jax 0.10.2."""


def accumulation(form: str) -> Callable[..., Any]:
    """Gradients of microbatches added up by a loop, the batch cut over the devices."""

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    def add(total: Any, gradient: Any) -> Any:
        if form == "divided":
            return total + gradient / STEPS
        return 0.9 * total + gradient if form == "decayed" else total + gradient

    def step(w: Any, batches: Any) -> Any:
        def body(total: Any, x: Any) -> Any:
            return add(total, jax.grad(loss)(w, x)), None

        return w - lax.scan(body, jnp.zeros_like(w), batches)[0]

    return step


@pytest.mark.parametrize("hardware", ["tpu-v5e", "h100"])
@pytest.mark.parametrize("form", RUNS)
def test_sums_that_a_loop_adds_up_are_made_once(form: str, hardware: str) -> None:
    shapes = (
        jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((STEPS, ROWS, WIDTH), jnp.float32),
    )
    axes = (("data", 8),)
    found = jaxplan.audit(
        accumulation(form), AbstractMesh((8,), ("data",)), *shapes, in_shardings=(P(), P(None, "data")),
        out_shardings=P(), hardware=hardware, options={"compare_templates": False},
    )  # fmt: skip
    link = axis_links(load_profile(hardware), axes)["data"]
    once_s = float(collective_seconds("all_reduce", 4 * WIDTH * WIDTH, (link,)))
    assert found.theirs.comm_s == pytest.approx(RUNS[form] * once_s, rel=0.02)
