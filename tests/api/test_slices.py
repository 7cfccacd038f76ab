"""Slices put into and taken out of a dimension that is cut: each device works on its piece of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan.hardware import load_profile

RANDOM = np.random.default_rng(0)
CACHE = RANDOM.normal(size=(2, 32, 4, 8)).astype(np.float32)
TPU = load_profile("tpu-v5e")
AT_ONCE = replace(
    TPU, op_overhead_s=1e-12, links=tuple(replace(link, latency_s=1e-12, launch_s=1e-12) for link in TPU.links)
)
"""Kernels and messages start at once: of so small a cache too bytes decide."""
STARTS = [np.array(at, np.int32) for at in (0, 3, 5, 17, 29, 31, 40, -1, -40)]


def rows(count: int) -> np.ndarray:
    return RANDOM.normal(size=(2, count, 4, 8)).astype(np.float32)


def put(cache: Any, update: Any, at: Any) -> Any:
    return lax.dynamic_update_slice(cache, update, (0, at, 0, 0))


def put_one(cache: Any, update: Any, at: Any) -> Any:
    """One sequence's rows: of two dimensions that are replaced in part the longer one is cut."""
    return lax.dynamic_update_slice(cache, update[:1], (at % 2, at, 0, 0))


def looped(cache: Any, update: Any, at: Any) -> Any:
    return lax.fori_loop(0, 3, lambda i, c: put(c, update * i, at + i), cache)


def small_start(cache: Any, update: Any, at: Any) -> Any:
    zero = jnp.uint8(0)
    return lax.dynamic_update_slice(cache, update, (zero, jnp.clip(at, 0, 255).astype(jnp.uint8), zero, zero))


PUTS: dict[str, Callable[..., Any]] = {"put": put, "one": put_one, "looped": looped, "small start": small_start}


@pytest.mark.parametrize("cut", [P(None, "data", "model"), P(None, ("model", "data")), P(None, "data")], ids=str)
@pytest.mark.parametrize("count", [1, 3, 6, 20, 32])
@pytest.mark.parametrize("name", PUTS)
def test_what_is_put_in_goes_to_the_devices_that_have_its_place(name: str, count: int, cut: P, mesh_4x2: Mesh) -> None:
    pinned = {"cache": cut, "update": P(), "result": cut}
    planned = jaxplan.auto_shard(
        PUTS[name], mesh_4x2, constraints=pinned, hardware="tpu-v5e", options={"compare_templates": False}
    )
    update = rows(count)
    for at in STARTS:
        np.testing.assert_array_equal(planned(CACHE, update, at), jax.jit(PUTS[name])(CACHE, update, at))
    if count < 32:
        assert not planned.plan(CACHE, update, STARTS[0]).collectives


def take(cache: Any, count: int, at: Any) -> Any:
    return lax.dynamic_slice_in_dim(cache, at, count, 1)


def take_of_one(cache: Any, count: int, at: Any) -> Any:
    return lax.dynamic_slice(cache, (at % 2, at, 0, 0), (1, count, 4, 8))


def whole_numbers(cache: Any, count: int, at: Any) -> Any:
    return take((cache * 100).astype(jnp.int8), count, at)


def added_up(cache: Any, count: int, at: Any) -> Any:
    """A sum that stays in parts through the loop."""
    return lax.fori_loop(0, 3, lambda i, s: s + take(cache, count, at + i), jnp.zeros((2, count, 4, 8)))


def first(cache: Any, count: int, at: Any) -> Any:
    return cache[:, :count] * at


def last(cache: Any, count: int, at: Any) -> Any:
    return cache[:, -count:, 2:] * at


TAKES: dict[str, Callable[..., Any]] = {
    "take": take, "one": take_of_one, "whole numbers": whole_numbers, "added up": added_up, "first": first,
    "last": last,
}  # fmt: skip


@pytest.mark.parametrize("cut", [P(None, "data", "model"), P(None, ("model", "data")), P(None, "data")], ids=str)
@pytest.mark.parametrize("count", [1, 3, 6, 15])
@pytest.mark.parametrize("name", TAKES)
def test_what_is_taken_out_is_the_sum_of_what_each_device_has(name: str, count: int, cut: P, mesh_4x2: Mesh) -> None:
    def fn(cache: Any, at: Any) -> Any:
        return TAKES[name](cache, count, at)

    planned = jaxplan.auto_shard(
        fn, mesh_4x2, constraints={"cache": cut}, hardware=AT_ONCE, options={"compare_templates": False}
    )
    for at in STARTS:
        np.testing.assert_allclose(planned(CACHE, at), jax.jit(fn)(CACHE, at), rtol=1e-6)
    sent = sum(c.wire_bytes * c.trips for c in planned.plan(CACHE, STARTS[0]).collectives)
    if count == 1 and name != "added up":
        assert sent < CACHE.nbytes / 8


@pytest.mark.aot_tpu
def test_the_tpu_compiler_gathers_no_cache_for_a_slice(tpu_topology: Callable[[str], Any]) -> None:
    """Left to XLA's partitioner the dimension is gathered for either."""
    mesh = Mesh(np.array(tpu_topology("v5e:2x4").devices).reshape(4, 2), ("data", "model"))
    cut = P(None, ("data", "model"))

    def step(cache: Any, row: Any, at: Any) -> Any:
        cache = lax.dynamic_update_slice(cache, row, (0, at, 0, 0))
        return cache, lax.dynamic_slice_in_dim(cache, at // 2, 1, 1)

    planned = jaxplan.auto_shard(
        step, mesh, donate_argnums=0, constraints={"cache": cut}, options={"compare_templates": False}
    )
    cache, row = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 4096, 8, 128), (8, 1, 8, 128)))
    compiled = planned.lower(cache, row, jax.ShapeDtypeStruct((), jnp.int32)).compile()
    assert "all-gather" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20
