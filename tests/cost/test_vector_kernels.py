"""Elementwise kernels take a TPU's vector unit time by tiles: as XLA's own compiler expects, and on TPU alone."""

from __future__ import annotations

import json
import runpy
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.cost import CostModel, traffic
from jaxplan.hardware import axis_links, load_profile
from jaxplan.ir import trace
from jaxplan.search.build import build
from jaxplan.sharding import graph_rules

CALIBRATION = Path(__file__).parents[2] / "experiments" / "tpu_calibration"
KERNELS = runpy.run_path(str(CALIBRATION / "vector_kernels.py"))["VECTOR_KERNELS"]


def model_of(profile_name: str, axes: tuple[tuple[str, int], ...]) -> CostModel:
    profile = load_profile(profile_name)
    links = axis_links(profile, axes)
    return CostModel(profile=profile, axes=axes, links=tuple(links[name] for name, _ in axes))


def cheapest_s(step: Any, shapes: list[Any], profile_name: str, cuts: tuple[int, ...]) -> float:
    """Seconds of all operations where every tensor is cut along dimension `cuts[i]` by axis i."""
    axes = tuple((f"a{i}", 8 if cut >= 0 else 1) for i, cut in enumerate(cuts))
    graph = trace(step, tuple(shapes), {}).graph
    rules, model = graph_rules(graph), model_of(profile_name, axes)
    space = build(graph, model, rules=rules, crossing=traffic(graph, rules, model.profile.kind))
    total = 0.0
    for node, index in space.node_op.items():
        places = space.strategies[node].results[0]
        cut = (places == np.array(cuts, np.int8)).all(axis=1)
        total += float(space.problem.nodes[node].costs_s[cut].min()) if cut.any() else 0.0
        assert cut.any() or not graph.values[graph.ops[index].results[0]].shape
    return total


@pytest.mark.parametrize("name", ["tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x"])
def test_kernels_take_what_the_compiler_expects(name: str) -> None:
    """Of ten kernels, bf16 and of single rows, each within a factor of three, half of them within a half."""
    measured = json.loads((CALIBRATION / "results.json").read_text(encoding="utf-8"))["targets"][name]
    ratios = []
    for row in measured["tile_rows"]:
        step, arity = KERNELS[row["operation"]]
        shape = jax.ShapeDtypeStruct(row["shape"], row["dtype"])
        predicted = cheapest_s(step, [shape] * arity, name, (-1,))
        tiles = np.prod(row["shape"]) / 128 / row["shape"][1]
        ratios.append(predicted / (row["cycles_a_tile"] * tiles / measured["clock_hz"]))
    assert max(ratios) < 3
    assert min(ratios) > 1 / 3
    assert statistics.median(max(r, 1 / r) for r in ratios) < 1.5


def test_the_calibration_measured_these_kernels() -> None:
    targets = json.loads((CALIBRATION / "results.json").read_text(encoding="utf-8"))["targets"]
    for measured in targets.values():
        for dtype in ("bfloat16", "float32"):
            assert [r["operation"] for r in measured["tile_rows"] if r["dtype"] == dtype] == list(KERNELS)


@pytest.mark.parametrize(
    ("profile_name", "dtype", "slower"),
    [
        ("tpu-v5e", "float32", True), ("tpu-v5e", "bfloat16", False), ("tpu-v5e", "int8", False),
        ("h100", "float32", False),
    ],
)  # fmt: skip
def test_a_parameter_of_one_head_a_device_is_updated_row_by_row(profile_name: str, dtype: str, slower: bool) -> None:
    """Compiled for v5e: [65536, 1, 128] and [8192, 8, 128] in f32 take 578 and 153 us, both in bf16 125 and in int8 91,
    for those lie with the first dimension in rows (jax 0.10.2, libtpu 0.0.42.1)."""
    parameter = jax.ShapeDtypeStruct((1024, 8, 128), dtype)

    def step(weight: Any, gradient: Any) -> Any:
        return weight - 2 * gradient

    heads, rows = (cheapest_s(step, [parameter] * 2, profile_name, (dim,)) for dim in (1, 0))
    assert rows > 0
    assert heads / rows > 3.0 if slower else heads / rows < 1.01


def test_what_comes_in_between_fills_its_tiles() -> None:
    """Activations of one head a device lie with their tokens side by side."""
    tokens, weight = jax.ShapeDtypeStruct((1024, 512), jnp.float32), jax.ShapeDtypeStruct((512, 8, 128), jnp.float32)

    def step(x: Any, w: Any) -> Any:
        made = jnp.einsum("td,dhk->thk", x, w)
        return jnp.sum(jnp.tanh(jnp.flip(jnp.sort(made, axis=0), axis=0)), axis=(0, 2))

    graph = trace(step, (tokens, weight), {}).graph
    crossing = traffic(graph, graph_rules(graph), "tpu")
    (tanh,) = (op for op in graph.ops if op.primitive == "tanh")
    kernel = crossing.kernels[tanh.index]
    assert kernel is not None
    assert not kernel.in_rows


def test_a_product_is_no_vector_kernel() -> None:
    square = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    graph = trace(lambda x, w: jax.nn.relu(x @ w), (square, square), {}).graph
    crossing = traffic(graph, graph_rules(graph), "tpu")
    (dot,) = (op for op in graph.ops if op.primitive == "dot_general")
    assert crossing.kernels[dot.index] is None
    assert set(traffic(graph, graph_rules(graph), "gpu").kernels) == {None}


def test_arguments_of_two_columns_take_as_many_tiles_as_have_two_rows() -> None:
    """20.6 cycles for a tile of 2 x 128 are what an update of f32[10131232, 2] is compiled to for v5e."""

    def step(table: Any, gradient: Any) -> Any:
        return table - 0.1 * gradient

    def seconds(columns: int, name: str = "tpu-v5e") -> float:
        return cheapest_s(step, [jax.ShapeDtypeStruct((2**24 // columns, columns), jnp.bfloat16)] * 2, name, (-1,))

    assert seconds(2) == pytest.approx(4 * seconds(8), rel=0.05)
    assert seconds(4) == pytest.approx(2 * seconds(8), rel=0.05)
    assert seconds(2, "h100") == pytest.approx(seconds(8, "h100"), rel=0.05)
