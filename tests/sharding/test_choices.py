"""What a choice within a choice makes, as XLA for GPU and for TPU has it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxplan
from jaxplan.hardware import compile_for
from jaxplan.sharding import partition

S = jax.ShapeDtypeStruct

GATHERS = 2 if jax.__version_info__ < (0, 12) else 0
"""What XLA for GPU gathers: Shardy of jax 0.12 goes through an `if`, that of 0.10 doesn't (0.11 was not looked at)."""


def nested(x: Any, y: Any, first: Any, second: Any) -> Any:
    def other(x: Any, y: Any) -> Any:
        return jax.lax.cond(second, lambda x, y: jnp.cos(y @ x), lambda x, y: x, x, y)

    return jax.lax.cond(first, lambda x, y: jnp.sin(x @ y), other, x, y) * 2


def of_three(x: Any, y: Any, first: Any, second: Any) -> Any:
    def other(x: Any, y: Any) -> Any:
        return jax.lax.switch(
            second.astype(jnp.int32), [lambda x, y: jnp.cos(y @ x), lambda x, y: x, lambda x, y: y], x, y
        )

    return jax.lax.switch(
        first.astype(jnp.int32), [lambda x, y: jnp.sin(x @ y), other, lambda x, y: x + y], x, y
    ) * 2


SHAPES = (S((24, 64, 64), jnp.float32), S((24, 64, 64), jnp.float32), S((), jnp.bool_), S((), jnp.bool_))


def lowered(step: Any, mesh: Any) -> Any:
    cut, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    return jax.jit(step, in_shardings=(cut, cut, whole, whole), out_shardings=cut).lower(*SHAPES)


@pytest.mark.parametrize(
    ("step", "platform", "gathers"),
    [(nested, "cuda", GATHERS), (nested, "tpu", 0), (nested, "cpu", 0), (of_three, "cuda", 0)],
)
def test_branches_are_gathered_where_shardings_do_not_go_through(step: Any, platform: str, gathers: int) -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    found = partition(lowered(step, mesh).compiler_ir("stablehlo"), platform=platform).collectives
    assert [c.kind for c in found] == ["all_gather"] * gathers
    assert all(c.bytes == 24 * 64 * 64 * 4 for c in found)


@pytest.mark.aot_gpu
@pytest.mark.usefixtures("cuda_compiler")
@pytest.mark.parametrize(("step", "gathers"), [(nested, GATHERS), (of_three, 0)])
def test_so_they_are_compiled(step: Any, gathers: int) -> None:
    mesh = jaxplan.target("h100:1x1x8").mesh(data=8)
    text = compile_for(lowered(step, mesh), mesh).as_text()
    assert text.count(" all-gather(") + text.count(" all-gather-start(") == gathers


@pytest.mark.aot_gpu
@pytest.mark.usefixtures("cuda_compiler")
def test_plans_say_how_they_lie() -> None:
    mesh = jaxplan.target("h100:1x1x8").mesh(data=8)
    sharded = jaxplan.auto_shard(nested, mesh, hardware="h100", options={"search": "data"})
    text = compile_for(sharded.lower(*SHAPES), mesh).as_text()
    assert not sharded.plan(*SHAPES).collectives
    assert " all-gather" not in text
