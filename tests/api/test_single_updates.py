"""A row put into a dimension that is cut, by one index: the device that has it puts it in, and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxplan

RANDOM = np.random.default_rng(0)
CACHE, ROW = (RANDOM.normal(size=shape).astype(np.float32) for shape in ((2, 32, 4, 8), (2, 4, 8)))


def looped(cache: Any, row: Any, at: Any) -> Any:
    return jax.lax.scan(lambda c, i: (c.at[:, at + i].set(row * i), c[0, 0, 0, 0]), cache, jnp.arange(3))[0]


UPDATES: dict[str, Callable[..., Any]] = {
    "set": lambda cache, row, at: cache.at[:, at].set(row),
    "add": lambda cache, row, at: (cache * 2).at[:, at].add(row),
    "clipped": lambda cache, row, at: cache.at[:, at].max(row, mode="clip"),
    "known": lambda cache, row, at: cache.at[:, 3].set(row),
    "two dimensions": lambda cache, row, at: cache.at[:, at, 1].set(row[:, 0]),
    "looped": looped,
}


@pytest.mark.parametrize("cut", [P(None, "data", "model"), P(None, ("model", "data"))], ids=str)
@pytest.mark.parametrize("name", UPDATES)
def test_it_goes_where_one_device_puts_it(name: str, cut: P, mesh_4x2: Mesh) -> None:
    pinned = {"cache": cut, "result": cut}
    planned = jaxplan.auto_shard(
        UPDATES[name], mesh_4x2, constraints=pinned, hardware="tpu-v5e", options={"compare_templates": False}
    )
    for at in map(np.int32, (0, 5, 17, 31, 40, -1, -40)):
        np.testing.assert_array_equal(planned(CACHE, ROW, at), jax.jit(UPDATES[name])(CACHE, ROW, at))
    sent = planned.plan(CACHE, ROW, np.int32(0)).collectives
    # Of two dimensions that an index goes into, one is cut while it is put in.
    across = name == "two dimensions" and len(cut) == 3
    assert {c.axes for c in sent} == ({("model",)} if across else set())


@pytest.mark.aot_tpu
def test_the_tpu_compiler_gathers_no_cache_for_a_row(tpu_topology: Callable[[str], Any]) -> None:
    """Left to XLA's partitioner it gathers the dimension, to take what stands where the row goes."""
    mesh = Mesh(np.array(tpu_topology("v5e:2x4").devices).reshape(4, 2), ("data", "model"))
    pinned = {"cache": P(None, "data", "model"), "result": P(None, "data", "model")}
    planned = jaxplan.auto_shard(
        UPDATES["set"], mesh, donate_argnums=0, constraints=pinned, options={"compare_templates": False}
    )
    cache, row = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 4096, 8, 128), (8, 8, 128)))
    compiled = planned.lower(cache, row, jax.ShapeDtypeStruct((), jnp.int32)).compile()
    assert "all-gather" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20


@pytest.mark.parametrize("cut", [P(None, "data"), P(None, ("model", "data"))], ids=str)
@pytest.mark.parametrize("at", [0, 17, 20000, 1 << 15, -1])
def test_the_gradient_of_a_single_element_is_read_on_the_device_that_has_it(at: int, cut: P, mesh_4x2: Mesh) -> None:
    """One number of a field that is cut: XLA for GPU gathered the field."""

    def step(field: Any, added: Any, at: Any) -> Any:
        return jax.grad(lambda u: jnp.sum(jnp.sin(field.at[1, at, 2, 3].add(u)) * field))(added)

    planned = jaxplan.auto_shard(
        step, mesh_4x2, constraints={"field": cut}, hardware="h100", options={"compare_templates": False}
    )
    field = RANDOM.normal(size=(2, 1 << 15, 4, 8)).astype(np.float32)
    given = field, np.float32(0.5), np.int32(at)
    np.testing.assert_allclose(planned(*given), jax.jit(step)(*given), rtol=1e-6)
    assert "all_gather" not in {c.kind for c in planned.plan(*given).collectives}
