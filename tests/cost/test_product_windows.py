"""Products of TPUs whose operands are read once for every row or column of windows, beside what was compiled."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.cost import CostModel, traffic
from jaxplan.cost.product_windows import Windowed, window_seconds
from jaxplan.hardware import axis_links, load_profile
from jaxplan.ir import Graph, Op, trace
from jaxplan.sharding import graph_rules, strategies

CALIBRATED = json.loads((Path(__file__).parents[2] / "experiments/tpu_calibration/results.json").read_text("utf-8"))
ITEM_BYTES = {"bfloat16": 2, "float32": 4}
SIZE = 8192


def dims(*sizes: int) -> Any:
    return tuple(np.array([float(size)]) for size in sizes)


def read_seconds(row: dict[str, Any], name: str) -> float:
    summed, rows, columns, left, right, updated = row["product"]
    product = Windowed((ITEM_BYTES[left], ITEM_BYTES[right]), (True, True), 4.0, 8.0 * updated)
    return float(window_seconds(product, dims(rows, columns, summed), np.array([True]), load_profile(name))[0])


@pytest.mark.parametrize("name", CALIBRATED["targets"])
def test_windows_are_read_in_the_time_that_the_compiler_expects(name: str) -> None:
    """Within a fifth, where each operand once would be a tenth; but for two on v4, read faster than memory."""
    profile, ratios = load_profile(name), []
    for row in CALIBRATED["targets"][name]["window_rows"]:
        summed, rows, columns, left, right, _ = row["product"]
        down, across = row["windows"]
        read = summed * (rows * across * ITEM_BYTES[left] + columns * down * ITEM_BYTES[right])
        if row["bytes_per_s"] < profile.hbm_bytes_per_s:
            ratios.append(read_seconds(row, name) / (read / row["bytes_per_s"]))
    assert len(ratios) >= 6
    assert all(0.8 <= ratio <= 1.2 for ratio in ratios), ratios


def step(state: Any, x: Any, y: Any) -> Any:
    """A product that Adam's moments, or momentum alone, are updated with."""
    gradient = (x.astype(jnp.bfloat16).T @ y.astype(jnp.bfloat16)).astype(jnp.float32)
    moments = [0.9 * moment + 0.1 * gradient for moment in state[1:]]
    return [state[0] - 0.1 * sum(moments, gradient), *moments] if state else [gradient]


def product_of(fn: Callable[..., Any], *shapes: Any, name: str = "tpu-v5e") -> tuple[Graph, Op, Any, Any]:
    graph = trace(fn, shapes, {}, donate_argnums=(0,)).graph
    rules = graph_rules(graph)
    (op,) = (op for op in graph.ops if op.primitive == "dot_general")
    return graph, op, rules[op.index], traffic(graph, rules, name.partition("-")[0])


def seconds(sizes: tuple[int, int, int], types: tuple[str, str], count: int, *, summed_over: bool = False) -> float:
    """Of a v5e's product of (summed, rows, columns) with `count` arrays updated.

    Args:
      summed_over: half of what is summed is another device's.
    """
    summed, rows, columns = sizes
    state = [jax.ShapeDtypeStruct((rows, columns), jnp.float32)] * count
    x, y = (
        jax.ShapeDtypeStruct((summed * (1 + summed_over), size), dtype)
        for size, dtype in zip((rows, columns), types, strict=True)
    )
    graph, op, rule, crossing = product_of(step, state, x, y)
    profile, axes = load_profile("tpu-v5e"), (("data", 1 + summed_over),)
    model = CostModel(profile=profile, axes=axes, links=(axis_links(profile, axes)["data"],))
    options = strategies(rule, axes)
    (chosen,) = (
        (i for i, factors in enumerate(options.factors) if factors[0] in rule.reduction) if summed_over else (0,)
    )
    return float(model.op_seconds(op, rule, options, graph, crossing)[chosen])


WINDOWED = CALIBRATED["targets"]["tpu-v5e"]["window_rows"]


@pytest.mark.parametrize("row", WINDOWED, ids=lambda row: str(row["product"]))
def test_a_product_takes_what_the_compiler_expects_to_read_its_windows(row: dict[str, Any]) -> None:
    """What it writes and updates is priced beside it; it takes no less than its multiplications."""
    *sizes, left, right, count = row["product"]
    summed, rows, columns = sizes
    (down, across), profile = row["windows"], load_profile("tpu-v5e")
    read_s = summed * (rows * across * ITEM_BYTES[left] + columns * down * ITEM_BYTES[right]) / row["bytes_per_s"]
    multiplied_s = 2 * summed * rows * columns / profile.peak_for("bfloat16") / profile.matmul_efficiency
    made_s = seconds((summed, rows, columns), (left, right), count)
    assert made_s == pytest.approx(max(read_s, multiplied_s), rel=0.2)
    assert made_s > multiplied_s or not count


def test_what_is_summed_over_devices_first_is_not_updated_in_its_products_kernel() -> None:
    sizes, types = (SIZE, SIZE, SIZE), ("float32", "float32")
    assert seconds(sizes, types, 3, summed_over=True) == pytest.approx(seconds(sizes, types, 0))
    assert seconds(sizes, types, 3) > 1.5 * seconds(sizes, types, 0)


def test_arguments_that_vector_memory_holds_are_read_once() -> None:
    """Two of bf16[4096, 4096] are 64 MiB, of the 105 MiB that a v5e keeps; a v5p keeps 45 MiB of two of f32."""
    product = Windowed((2.0, 2.0), (True, True), 4.0, 24.0)
    several = product._replace(held=(False, False))
    v5e = load_profile("tpu-v5e")
    alone, size = np.array([True]), dims(4096, 4096, 4096)
    assert window_seconds(product, size, alone, v5e) == 0
    assert window_seconds(several, size, alone, v5e) > 0
    assert window_seconds(product._replace(read_bytes=(4.0, 4.0)), size, alone, load_profile("tpu-v5p")) > 0


def test_what_one_product_alone_reads_of_a_kernels_result_is_not_held() -> None:
    def once(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w)

    def held(fn: Callable[..., Any]) -> list[tuple[bool, bool]]:
        shape = jax.ShapeDtypeStruct((512, 512), jnp.float32)
        graph = trace(fn, (shape, shape), {}).graph
        crossing = traffic(graph, graph_rules(graph), "tpu")
        return [crossing.windows[op.index].held for op in graph.ops if op.primitive == "dot_general"]

    assert held(lambda w, x: once(w, x) @ w) == [(True, True), (False, True)]
    twice = held(lambda w, x: (lambda h: (h @ w, h @ w.T))(once(w, x)))
    assert twice == [(True, True), (True, True), (True, True)]


def test_gpus_and_products_of_matrices_for_each_place_have_none() -> None:
    rows = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
    _, op, _, crossing = product_of(step, [rows] * 3, rows, rows, name="h100")
    assert op.index not in crossing.windows
    several = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)
    _, op, _, crossing = product_of(lambda x, y: jnp.einsum("bij,bjk->bik", x, y), several, several)
    assert op.index not in crossing.windows
