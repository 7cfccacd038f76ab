"""What a GPU's kernels take beyond its rates, against the kernels that an H100 ran."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.cost import Channels, convolution_seconds, unaligned
from jaxplan.cost.gpu_kernels import channels_of, operation_seconds
from jaxplan.hardware import load_profile
from jaxplan.ir import Graph, Op, trace
from jaxplan.lowering import Kernel
from jaxplan.sharding import MeshAxes, graph_rules, strategies

H100 = load_profile("h100")
MEASURED = Path(__file__).parents[2] / "experiments" / "gpu_truth" / "measured.json"
CASES = json.loads(MEASURED.read_text(encoding="utf-8"))
ROWS = [row for case in CASES for row in case["kernels"]]
MEMORY = H100.hbm_bytes_per_s * H100.hbm_efficiency


def run_s(row: dict[str, Any]) -> float:
    return float(row["seconds"] / row["runs"])


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def test_products_of_odd_rows_take_what_they_took() -> None:
    reached: dict[str, list[float]] = {"flops": [], "hbm": []}
    for row in ROWS:
        if row["odd"] and run_s(row) > 5e-6:
            arithmetic_s = row["flops"] / H100.peak_for(row["dtype"]) / H100.matmul_efficiency
            memory_s = row["bytes"] / MEMORY
            bound = "flops" if arithmetic_s > memory_s else "hbm"
            reached[bound].append(max(arithmetic_s, memory_s) / run_s(row))
    assert geometric_mean(reached["flops"]) == pytest.approx(H100.unaligned_flops_share, rel=0.03)
    assert geometric_mean(reached["hbm"]) == pytest.approx(H100.unaligned_hbm_share, rel=0.03)


def test_convolutions_of_three_channels_and_of_one_a_group_take_what_they_took() -> None:
    few = [row for row in ROWS if row["channels"] and row["channels"][0] == 3]
    peak = H100.peak_for("bfloat16")
    assert geometric_mean([row["flops"] * 8 / 3 / run_s(row) / peak for row in few]) == pytest.approx(
        H100.unaligned_efficiency, rel=0.03
    )
    alone = [row for row in ROWS if row["channels"] and row["channels"][2] > 1]
    assert geometric_mean([row["bytes"] / run_s(row) / H100.hbm_bytes_per_s for row in alone]) == pytest.approx(
        H100.depthwise_efficiency, rel=0.03
    )
    assert len(few) == 10 and len(alone) == 2


def test_an_element_added_to_memory_takes_what_it_took() -> None:
    """Of embeddings, whose rows are whole; a pooling's windows also meet."""
    beyond = [
        (run_s(row) - row["bytes"] / MEMORY) / row["added"]
        for case in CASES
        if case["case"] not in ("alexnet", "vgg16", "resnet18", "resnet50")
        for row in case["kernels"]
        if row["added"] > 1e6
    ]
    assert len(beyond) == 7
    assert median(beyond) == pytest.approx(H100.atomic_s, rel=0.03)


@pytest.mark.parametrize(("bound", "low", "high"), [("memory", 0.93, 1.07), ("products", 0.93, 1.1)])
def test_other_kernels_reach_the_profiles_rates(bound: str, low: float, high: float) -> None:
    """The median of all seconds: half of them were spent in kernels that are nearer than this."""
    ratios = []
    for case in CASES:
        for row in case["kernels"]:
            if row["channels"] or row["added"] or row["odd"]:
                continue
            arithmetic_s = row["flops"] / H100.peak_for(row["dtype"]) / H100.matmul_efficiency
            if (arithmetic_s > row["bytes"] / MEMORY) == (bound == "products"):
                fields = {key: row[key] for key in ("flops", "vector_flops", "bytes", "dtype")}
                said_s = Kernel(name="", op_name="", trips=1, **fields).seconds(H100)
                ratios.append((said_s / run_s(row), row["seconds"] / case["kernels_s"]))
    whole = sum(weight for _, weight in ratios)
    slower, faster = (sum(weight for ratio, weight in ratios if keep(ratio)) for keep in (high.__lt__, low.__gt__))
    assert max(slower, faster) < whole / 2


def graph_of(fn: Any, *shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Graph:
    return trace(fn, tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes), {}).graph


def seconds(
    graph: Graph, op: Op, axes: MeshAxes = (), made_s: float = 1e-6, whole: bool = True
) -> np.ndarray:
    """Under every strategy, of an operation of no arithmetic and traffic that would take `made_s`."""
    options = strategies(graph_rules(graph)[op.index], axes)
    nothing = np.zeros(len(options))
    work = nothing, nothing, nothing + made_s
    return operation_seconds(op, graph, options, axes, work, np.full(len(options), whole), H100)


def convolution(groups: int, layout: tuple[str, str, str] = ("NHWC", "HWIO", "NHWC")) -> Any:
    def loss(kernel: Any, images: Any) -> Any:
        made = jax.lax.conv_general_dilated(
            images, kernel, (2, 2), "SAME", dimension_numbers=layout, feature_group_count=groups
        )
        return jnp.sum(made.astype(jnp.float32) ** 2)

    return jax.grad(loss, argnums=(0, 1))


@pytest.mark.parametrize("layout", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")])
def test_a_convolution_and_both_its_gradients_have_its_channels(layout: tuple[str, str, str]) -> None:
    images, kernel = ((4, 32, 32, 3), (7, 7, 3, 64)) if layout[0] == "NHWC" else ((4, 3, 32, 32), (64, 3, 7, 7))
    graph = graph_of(convolution(1, layout), kernel, images)
    found = [c for op in graph.ops if (c := channels_of(op, graph)) is not None]
    forward, of_kernel, of_images = Channels(3, 64, 1), Channels(3, 64, 1), Channels(64, 3, 1)
    assert sorted(found) == sorted([forward, of_kernel, of_images])


def test_groups_of_one_channel_are_told_in_the_gradients_too() -> None:
    graph = graph_of(convolution(16), (3, 3, 1, 16), (4, 32, 32, 16))
    assert {channels_of(op, graph) for op in graph.ops} == {None, Channels(1, 1, 16)}


def test_only_channels_that_are_padded_are_dear_and_only_on_tensor_cores() -> None:
    def least_s(images: int, dtype: str, hardware: str = "h100", groups: int = 1) -> float:
        channels = Channels(images, 64, groups)
        return float(convolution_seconds(1e12, 1e9, dtype, channels, load_profile(hardware)))

    assert least_s(64, "bfloat16") == 0 == least_s(4, "float32")
    assert least_s(3, "bfloat16") > least_s(6, "bfloat16") > 1e12 / H100.peak_for("bfloat16") * 5
    assert least_s(3, "float32") > 0 == least_s(3, "float32", "p100")  # no tensor cores there
    assert least_s(1, "bfloat16", groups=64) > 0 == least_s(4, "bfloat16", groups=16)


@pytest.mark.parametrize(("row_bytes", "odd"), [(3000, True), (394, True), (2000, False), (8, False), (16, False)])
def test_rows_are_odd_that_no_sixteen_bytes_divide(row_bytes: int, odd: bool) -> None:
    assert bool(unaligned(row_bytes)) is odd


def test_a_product_is_as_odd_as_the_rows_that_each_device_has() -> None:
    """Rows of 96 cut in eight are of 12 elements, 24 bytes."""
    graph = graph_of(lambda x, w: x @ w, (256, 64), (64, 96))
    (op,) = [op for op in graph.ops if op.primitive == "dot_general"]
    options = strategies(graph_rules(graph)[op.index], (("data", 8),))
    cut = (options.results[0] == 1).any(axis=1)
    taken = seconds(graph, op, (("data", 8),), made_s=1.0)
    assert (taken[cut] > 1).all() and (taken[~cut] == 1).all() and cut.any()
    assert (seconds(graph, op, (("data", 8),), made_s=1.0, whole=False) == 1).all()


def test_dimensions_of_one_are_no_rows() -> None:
    """Scores of one group of heads end with it: bf16[batch, heads, 197, 197, 1]."""
    graph = graph_of(lambda q, k: jnp.einsum("bqhd,bkhgd->bhqkg", q, k), (2, 197, 4, 64), (2, 197, 4, 1, 64))
    (op,) = [op for op in graph.ops if op.primitive == "dot_general"]
    assert graph.values[op.results[0]].shape[-1] == 1
    assert seconds(graph, op, made_s=1.0)[0] > 1


def test_what_is_added_takes_time_unless_no_two_meet() -> None:
    def added(unique: bool) -> float:
        def into(table: Any, rows: Any) -> Any:
            return table.at[jnp.arange(64) * 3 % 128].add(rows, unique_indices=unique)

        graph = graph_of(into, (128, 256), (64, 256))
        (op,) = [op for op in graph.ops if op.primitive.startswith("scatter")]
        return float(seconds(graph, op, made_s=0.0)[0])

    assert added(False) == pytest.approx(64 * 256 * (H100.atomic_s or 0)) and added(True) == 0


@pytest.mark.parametrize(("window", "tries"), [(2, 1.0), (3, 2.25)])
def test_poolings_whose_windows_overlap_try_more_often(window: int, tries: float) -> None:
    def pooled(x: Any) -> Any:
        made = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, window, window, 1), (1, 2, 2, 1), "SAME")
        return jnp.sum(made.astype(jnp.float32) ** 2)

    graph = graph_of(jax.grad(pooled), (8, 16, 16, 4))
    (op,) = [op for op in graph.ops if op.primitive == "select_and_scatter_add"]
    assert seconds(graph, op, made_s=0.0)[0] == pytest.approx(8 * 8 * 8 * 4 * tries * (H100.atomic_s or 0))
