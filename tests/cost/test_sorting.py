"""What sorting needs beside its operands, and what it does not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.cost import CostModel, step_memory, traffic
from jaxplan.cost.sorting import sorting_scratch
from jaxplan.hardware import load_profile
from jaxplan.ir import Graph, trace
from jaxplan.sharding import graph_rules

MIB, WHOLE = 2**20, np.array([-1], np.int8)


def graph_of(f: Any, *shapes: tuple[Any, ...], dtype: Any = jnp.float32) -> Graph:
    return trace(f, tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes), {}).graph


def peak_mib(f: Any, platform: str, *shapes: tuple[Any, ...], dtype: Any = jnp.bfloat16) -> float:
    """Of one device that has everything whole."""
    graph = graph_of(f, *shapes, dtype=dtype)
    profile = load_profile({"tpu": "tpu-v5e", "gpu": "h100"}[platform])
    crossing = traffic(graph, graph_rules(graph), platform)
    row = np.zeros(0, np.int8)
    values = {v.index: row for v in graph.values if not v.constant}
    reads = {(op.index, place): row for op in graph.ops for place, v in enumerate(op.operands) if v in values}
    model, kinds = CostModel(profile=profile, axes=(), links=()), ["batch"] * len(graph.inputs)
    return step_memory(graph, (), model, crossing, kinds, values, reads, {}).peak_bytes / MIB


@pytest.mark.parametrize(
    ("platform", "k", "n", "sorts"),
    [
        ("gpu", 16, 4096, False), ("gpu", 17, 4096, True), ("gpu", 8, 1024, False), ("gpu", 8, 1023, True),
        ("tpu", 8, 1024, False), ("tpu", 16, 1024, True), ("tpu", 48, 4096, False), ("tpu", 64, 4096, True),
        ("tpu", 512, 2**20, False), ("tpu", 8, 256, True),
    ],
)  # fmt: skip
def test_what_no_kernel_finds_is_sorted(platform: str, k: int, n: int, sorts: bool) -> None:
    """As compiled for H100 and v5e: a `sort` or none, and one integer for each element beside it."""
    graph = graph_of(lambda x: jax.lax.top_k(jnp.tanh(x), k), (64, n))
    (op,) = [op for op in graph.ops if op.primitive == "top_k"]
    found = sorting_scratch(graph, (("data", 1),), {(op.index, 0): WHOLE}, platform)
    padded = -(-n // 128) * 128 if platform == "tpu" else n
    assert found == ({op.index: 4 * 64 * padded} if sorts else {})


def test_pieces_of_what_is_cut_are_as_long_as_they_are() -> None:
    graph = graph_of(lambda x: jax.lax.top_k(jnp.tanh(x), 16), (64, 4096))
    (op,) = [op for op in graph.ops if op.primitive == "top_k"]
    cut = np.array([1], np.int8)
    assert not sorting_scratch(graph, (("data", 4),), {(op.index, 0): cut}, "gpu")
    assert sorting_scratch(graph, (("data", 8),), {(op.index, 0): cut}, "gpu") == {op.index: 4 * 64 * 512}


def nearest(x: Any, keys: Any) -> Any:
    return jax.lax.top_k((x @ keys).astype(jnp.float32), 32)


def test_scores_are_selected_from_as_they_are_and_sorted_where_they_are_compared() -> None:
    """Compiled: 160.5 MiB for v5e, the scores in bf16; 544.5 for H100, in f32 and with their places."""
    shapes = (1024, 256), (256, 65536)
    assert peak_mib(nearest, "tpu", *shapes) == pytest.approx(160.8, abs=2)
    assert peak_mib(nearest, "gpu", *shapes) == pytest.approx(544.75, abs=1)


def test_what_is_sorted_lies_in_the_place_of_its_operands() -> None:
    """Compiled: 544.6 MiB on both, the scores in f32 and the places beside them."""

    def order(x: Any, keys: Any) -> Any:
        return jnp.argsort((x @ keys).astype(jnp.float32), axis=1)[:, :32]

    for platform in ("tpu", "gpu"):
        assert peak_mib(order, platform, (1024, 256), (256, 65536)) == pytest.approx(544.7, abs=2)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize(
    ("f", "compiled"),
    [
        (lambda x: jnp.sum(jnp.sort(x @ x.T, axis=0), axis=1), 512),
        (lambda x: jnp.sum(jax.vmap(jnp.sort)(x @ x.T), axis=1), 512),
        (lambda x: jnp.sum(jax.lax.sort(x @ x.T, is_stable=False), axis=1), 256),
        (lambda x: jnp.sum(jnp.argsort(x @ x.T, axis=1), axis=1), 512),
        (lambda x: jnp.sum(jax.vmap(jnp.argsort)(x @ x.T), axis=1), 512),
    ],
    ids=["sort", "each row", "unstable", "argsort", "argsort each row"],
)
def test_stable_sorting_needs_places(f: Any, compiled: int, platform: str) -> None:
    """Compiled for v5e and H100, jax 0.10.2: places are beside what is sorted unless it is sorted with them."""
    assert peak_mib(f, platform, (8192, 64), dtype=jnp.float32) == pytest.approx(compiled, abs=3)
