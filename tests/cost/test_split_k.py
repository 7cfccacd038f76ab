"""Splitting of products, against a plain transcription of the compiler's rule and what it compiled."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from jaxplan.cost import traffic
from jaxplan.cost.split_k import Product, padded_bytes, part_bytes, split_scratch, split_ways
from jaxplan.hardware import load_profile
from jaxplan.ir import trace
from jaxplan.sharding import graph_rules

H100 = load_profile("h100")

# m, n, k of bf16 products, and in how many parts XLA made them: an LSTM and DLRM, H100, jax 0.10.2.
COMPILED = [
    (256, 512, 2048, 8), (512, 367, 2048, 8), (512, 13, 2048, 16), (64, 256, 2048, 16), (16, 64, 2048, 32),
    (2048, 256, 512, 1), (2048, 512, 367, 1), (2048, 16, 64, 1), (650, 1250, 2240, 2), (650, 650, 2240, 4),
    (64, 650, 2600, 16), (64, 2600, 650, 4), (2240, 325, 2600, 2), (2240, 2600, 325, 1), (2240, 650, 1250, 1),
]  # fmt: skip


def of(m: ArrayLike, n: ArrayLike, k: ArrayLike, batch: ArrayLike = 1, operand_bytes: float = 2.0) -> Product:
    batch, m, n, k = (np.asarray(size, np.float64) for size in (batch, m, n, k))
    return Product(batch, m, n, k, operand_bytes, operand_bytes, 2.0, 4.0)


def test_products_are_split_as_xla_compiled_them() -> None:
    m, n, k, ways = np.array(COMPILED, np.float64).T
    assert split_ways(of(m, n, k), H100).tolist() == ways.tolist()


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 1 << 20), st.integers(1, 64))
def test_only_products_that_leave_cores_idle_are_split(m: int, n: int, k: int, batch: int) -> None:
    ways = float(split_ways(of(m, n, k, batch), H100))
    tiles = batch * -(-m // 128) * -(-n // 128)
    covered = tiles * min(m, 128) * min(n, 128) / 128**2
    assert ways == 1 or covered < (H100.core_count or 0)
    assert float(part_bytes(of(m, n, k, batch), H100)) == (ways > 1) * ways * batch * m * n * 4


@pytest.mark.parametrize("name", ["tpu-v5e", "cpu-host"])
def test_nobody_else_splits(name: str) -> None:
    assert float(split_ways(of(64, 64, 1 << 20), load_profile(name))) == 1


def test_more_cores_split_no_less() -> None:
    many = replace(H100, core_count=4 * 132)
    sizes = of(512, 512, 2.0 ** np.arange(8, 20))
    assert (split_ways(sizes, many) >= split_ways(sizes, H100)).all()


def test_parts_follow_the_layout() -> None:
    """A gradient's sum over tokens that is cut is a shorter sum; cut results are smaller ones."""

    def gradient(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum("btm,btn->mn", x.astype(jnp.bfloat16), y.astype(jnp.bfloat16))

    shapes = (jax.ShapeDtypeStruct((16, 2048, 512), jnp.float32), jax.ShapeDtypeStruct((16, 2048, 512), jnp.float32))
    graph = trace(gradient, shapes, {}).graph
    op = next(op for op in graph.ops if op.primitive == "dot_general")
    axes = (("data", 4), ("model", 2))

    def parts(*row: int) -> int:
        rows = np.array(row, np.int8)
        return split_scratch(graph, axes, {(op.index, 0): rows, (op.index, 1): rows}, H100).get(op.index, 0)

    def whole(m: int, n: int, k: int) -> float:
        return float(part_bytes(of(m, n, k, operand_bytes=4.0), H100))

    assert parts(-1, -1) == whole(512, 512, 16 * 2048) > 0
    assert parts(0, -1) == whole(512, 512, 4 * 2048)
    assert parts(0, 1) == whole(512, 512, 2 * 2048)
    assert parts(2, -1) == whole(128, 128, 16 * 2048)


def test_what_does_not_divide_into_the_parts_is_padded() -> None:
    """An LSTM's gradient over 16,639 words is split in parts of a sum over 16,640, of both operands' padded copies."""

    def padding(words: int) -> float:
        shapes = (jax.ShapeDtypeStruct((1120, words), jnp.float32), jax.ShapeDtypeStruct((words, 1024), jnp.float32))
        graph = trace(jnp.matmul, shapes, {}).graph
        (op,) = graph.ops
        row = np.array([-1], np.int8)
        parts = split_scratch(graph, (("data", 8),), {(op.index, 0): row, (op.index, 1): row}, H100)[op.index]
        return parts - float(part_bytes(of(1120, 1024, words, operand_bytes=4.0), H100))

    assert padding(16_640) == 0
    assert padding(16_639) == 16_640 * (1120 + 1024) * 4
    assert padding(33_278) == 33_280 * (1120 + 1024) * 4  # two parts of whole 16 bytes


def test_padding_takes_two_kernels() -> None:
    """An LSTM's 650 columns are padded to 672 for four parts, weights too, in each iteration of its loop."""
    found = padded_bytes(of(16, 2600, 650), H100)
    assert [float(size) for size in found] == [672 * 16 * 2, 672 * 2600 * 2]
    assert not any(float(size) for size in padded_bytes(of(16, 2600, 672), H100))


def test_complex_numbers_are_multiplied_as_they_are_in_a_workspace() -> None:
    """Compiled for H100: 96 MiB beside arguments and result, of which 64 are the converted operand."""
    shapes = jax.ShapeDtypeStruct((16384, 512), jnp.float32), jax.ShapeDtypeStruct((512, 256), jnp.complex64)
    graph = trace(lambda x, w: x.astype(jnp.complex64) @ w, shapes, {}).graph
    (op,) = [op for op in graph.ops if op.primitive == "dot_general"]
    row = np.zeros(0, np.int8)
    reads = {(op.index, 0): row, (op.index, 1): row}
    assert split_scratch(graph, (), reads, H100) == {op.index: 32 * 2**20}
    assert not split_scratch(graph, (), reads, load_profile("tpu-v5e"))
    assert traffic(graph, graph_rules(graph), "gpu").stored[op.operands[0]]
    assert not traffic(graph, graph_rules(graph), "tpu").stored[op.operands[0]]
