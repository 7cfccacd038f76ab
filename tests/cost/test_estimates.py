"""What XLA for TPU takes kernels to last where it decides what lies in vector memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.cost import traffic
from jaxplan.cost.estimates import kernel_times
from jaxplan.hardware import load_profile
from jaxplan.ir import trace
from jaxplan.sharding import NONE, UNREDUCED, graph_rules

AXES = (("d", 4),)


def shape(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def took(
    step: Callable[..., Any], shapes: tuple[jax.ShapeDtypeStruct, ...], primitive: str, hardware: str = "tpu-v5e",
    seconds: float = 0.0, cut: bool = False, summed: bool = False,
) -> tuple[float, bool]:  # fmt: skip
    """Seconds of the last operation of that kind, priced at so many, and whether its arithmetic is what takes them.

    `cut`: the first dimension of the first operand and of the result over four devices; `summed`: they add it up.
    """
    graph = trace(step, shapes, {}).graph
    crossing = traffic(graph, graph_rules(graph), "tpu")
    whole, part = np.array([NONE], np.int8), np.array([0], np.int8)
    op = [op for op in graph.ops if op.primitive == primitive][-1]
    values = {v.index: whole for v in graph.values} | ({v: part for v in op.results} if cut else {})
    reads = {(one.index, place): whole for one in graph.ops for place in range(len(one.operands))}
    if cut:
        reads[op.index, 0] = part
    if summed:
        values |= dict.fromkeys(op.results, np.array([UNREDUCED], np.int8))
    priced = {one.index: seconds for one in graph.ops}
    times = range(len(graph.ops))
    found = kernel_times(graph, AXES, crossing, load_profile(hardware), values, reads, priced).at(times)
    return found.seconds[op.index], op.index in found.busy


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    return a @ b


def test_large_products_take_their_arithmetic_and_small_ones_their_traffic() -> None:
    large, small = (shape(4096, 4096), shape(4096, 4096)), (shape(4096, 128), shape(128, 128))
    assert took(product, large, "dot_general") == (pytest.approx(2 * 4096**3 / 197e12, rel=1e-3), True)
    seconds, busy = took(product, small, "dot_general")
    assert not busy and seconds == pytest.approx(2 * (2 * 4096 + 128) * 128 / (8.19e11 * 0.9), rel=0.01)


def test_prices_of_products_are_not_asked() -> None:
    sides = shape(4096, 128), shape(128, 128)
    assert took(product, sides, "dot_general", seconds=1.0) == took(product, sides, "dot_general")


def test_a_device_takes_its_piece() -> None:
    large = shape(4096, 4096), shape(4096, 4096)
    whole, _ = took(product, large, "dot_general")
    assert took(product, large, "dot_general", cut=True)[0] == pytest.approx(whole / 4)


def test_shares_of_sums_over_devices_are_written() -> None:
    """What a kernel makes of the product at once is no traffic of the product; each device's share is."""
    sides = shape(4096, 128), shape(128, 4096)
    assert took(lambda a, b: jnp.tanh(a @ b), sides, "dot_general")[0] < 1e-4
    share, _ = took(lambda a, b: jnp.tanh(a @ b), sides, "dot_general", summed=True)
    assert share == pytest.approx((2 * 2 * 4096 * 128 + 2 * 4096**2) / (8.19e11 * 0.9), rel=0.01)


def test_what_is_scattered_by_itself_pads_its_tiles() -> None:
    """A router's 2048 weights, [4, 256, 2], as logged: 1.46 ms; so many in one row take 23 us."""

    def step(x: jax.Array, at: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.tanh(x.at[at].add(jnp.sin(y)))

    def of(*dims: int) -> float:
        given = shape(8192, dtype=jnp.float32), shape(*dims, dtype=jnp.int32), shape(*dims, dtype=jnp.float32)
        return took(step, given, "scatter-add")[0]

    assert of(4, 256, 2) == pytest.approx(1.457e-3, rel=0.01)
    assert of(2048) == pytest.approx(22.8e-6, rel=0.01)


def test_rows_that_are_looked_up_take_as_long_as_is_logged() -> None:
    """8192 rows of a GPT's table take 25.6 us."""

    def step(table: jax.Array, at: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.sin(table)[at])

    seconds, _ = took(step, (shape(16000, 64), shape(32, 256, dtype=jnp.int32)), "gather")
    assert seconds == pytest.approx(25.6e-6, rel=0.02)


def test_labels_are_selected_not_scattered() -> None:
    def step(x: jax.Array, labels: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.take_along_axis(jnp.sin(x), labels[:, None], axis=1).sum())(x)

    seconds, _ = took(step, (shape(8192, 512, dtype=jnp.float32), shape(8192, dtype=jnp.int32)), "scatter-add")
    assert seconds < 1e-4


@pytest.mark.parametrize(("channels", "logged"), [(64, 2.18e-4), (128, 5.85e-5), (256, 4.54e-5)])
def test_convolutions_are_padded_on_v6e(channels: int, logged: float) -> None:
    """Weights' gradients of a ResNet over eight images, as XLA logs them, within a factor of two."""
    size = 56 * 64 // channels

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        def net(w: jax.Array) -> jax.Array:
            y = jax.lax.conv_general_dilated(jnp.sin(x), w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return (y.astype(jnp.float32) ** 2).sum()

        return jax.grad(net)(w)

    shapes = shape(8, size, size, channels), shape(3, 3, channels, channels)
    v6e, _ = took(step, shapes, "conv_general_dilated", "tpu-v6e")
    v5e, _ = took(step, shapes, "conv_general_dilated", "tpu-v5e")
    assert logged / 2 <= v6e <= logged * 2
    assert v5e < v6e


def test_slices_of_stacks_are_kernels_of_their_own() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    seconds, _ = took(step, (shape(64, 1024), shape(4, 1024, 1024)), "scan_slice")
    assert seconds == pytest.approx(2 * 2 * 1024**2 / (8.19e11 * 0.9), rel=0.01)


def looked_up(
    primitive: str, rows: int, columns: int, dtype: Any, count: int = 8192, hardware: str = "tpu-v5e"
) -> float:
    """Seconds of so many rows of a table."""

    def step(table: jax.Array, at: jax.Array, more: jax.Array) -> jax.Array:
        return jnp.tanh(table)[at] if primitive == "gather" else jnp.tanh(table).at[at].add(more)

    shapes = shape(rows, columns, dtype=dtype), shape(count, dtype=jnp.int32), shape(count, columns)
    return took(step, shapes, primitive, hardware)[0]


def test_lookups_go_row_by_row_and_in_columns_element_by_element() -> None:
    """As libtpu logs it for v5e; 24576 rows of 128 are added to at the rate of memory, 28672 are not."""
    f32 = jnp.float32
    assert looked_up("gather", 100_000, 128, f32) == pytest.approx(51.2e-6, rel=0.01)
    assert looked_up("gather", 8192, 16, jnp.bfloat16) == pytest.approx(25.6e-6, rel=0.01)
    assert looked_up("scatter-add", 100_000, 16, f32) == pytest.approx(96.7e-6, rel=0.01)
    assert looked_up("scatter-add", 100_000, 16, f32, hardware="tpu-v6e") == pytest.approx(43.6e-6, rel=0.01)
    assert looked_up("scatter-add", 100_000, 16, f32, hardware="tpu-v5p") == pytest.approx(30.4e-6, rel=0.01)
    assert looked_up("scatter-add", 28_672, 128, f32) == pytest.approx(96.7e-6, rel=0.01)
    assert looked_up("scatter-add", 24_576, 128, f32) < 5e-5
    assert looked_up("gather", 10_131_232, 16, f32, 16_384) == pytest.approx(1.47e-3, rel=0.01)
    assert looked_up("scatter-add", 10_131_232, 16, f32, 16_384) == pytest.approx(2.92e-3, rel=0.01)


def test_what_is_sent_is_read_and_written_once() -> None:
    """A sum over devices that two products want whole: its share and its result."""

    def step(a: jax.Array, b: jax.Array) -> jax.Array:
        both = a @ b
        return both @ jnp.sin(both)

    graph = trace(step, (shape(2048, 2048), shape(2048, 2048)), {}).graph
    crossing = traffic(graph, graph_rules(graph), "tpu")
    whole = np.array([NONE], np.int8)
    reads = {(one.index, place): whole for one in graph.ops for place in range(len(one.operands))}
    values = {v.index: whole for v in graph.values}
    first, *_ = [op for op in graph.ops if op.primitive == "dot_general"]

    def total(share: np.ndarray) -> float:
        rows = values | dict.fromkeys(first.results, share)
        times = range(len(graph.ops))
        found = kernel_times(graph, AXES, crossing, load_profile("tpu-v5e"), rows, reads, {})
        return sum(found.at(times).seconds.values())

    sent_s = total(np.array([0], np.int8)) - total(whole)
    assert sent_s == pytest.approx((2048**2 / 4 + 2048**2) * 2 / (8.19e11 * 0.9), rel=0.01)
