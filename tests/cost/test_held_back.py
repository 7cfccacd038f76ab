"""Weights' gradients that wait for the end of the backward pass on GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxplan
from jaxplan.cost import CostModel, simulate_memory, step_memory, traffic
from jaxplan.cost.held_back import awaited_sums, combined_sums, held_back, put_off
from jaxplan.cost.tables import list_copies
from jaxplan.hardware import axis_links, load_profile
from jaxplan.ir import Graph, trace
from jaxplan.lowering import compiled_memory
from jaxplan.sharding import UNREDUCED, graph_rules

AXES = (("data", 8),)
LAYERS, ROWS = 4, 65536


def step(ws: Any, x: Any) -> Any:
    def loss(ws: Any) -> Any:
        hidden = x
        for w in ws:
            hidden = jnp.tanh(hidden @ w)
        return jnp.mean(hidden)

    gradients = jax.grad(loss)(ws)
    norm = sum(jnp.sum(g**2) for g in gradients)
    return [w - g / norm for w, g in zip(ws, gradients, strict=True)]


def gradients(graph: Graph) -> list[int]:
    """The products that make a weight's gradient."""
    return [
        op.index
        for op in graph.ops
        if op.primitive == "dot_general" and ROWS not in graph.values[op.results[0]].shape
    ]


@pytest.mark.parametrize(
    ("read_as", "side", "waits"),
    [(-1, 4096, True), (0, 4096, False), (0, 64, True)],
    ids=["all_reduced", "scattered", "scattered in one collective"],
)
def test_on_gpu_gradients_that_are_summed_late_wait_for_the_end_of_the_backward_pass(
    read_as: int, side: int, waits: bool
) -> None:
    arguments = (
        [jax.ShapeDtypeStruct((side, side), jnp.float32)] * LAYERS,
        jax.ShapeDtypeStruct((ROWS, side), jnp.float32),
    )
    graph = trace(step, arguments, {}).graph
    profile = load_profile("h100")
    model = CostModel(profile=profile, axes=AXES, links=(axis_links(profile, AXES)["data"],))
    crossing = traffic(graph, graph_rules(graph), "gpu")
    products = {graph.ops[index].results[0] for index in gradients(graph)}
    assert len(products) == LAYERS

    def row(value: int) -> np.ndarray:
        return np.array([0 if ROWS in graph.values[value].shape else -1], np.int8)

    values = {v.index: row(v.index) for v in graph.values if not v.constant}
    reads = {
        (op.index, i): np.array([read_as], np.int8) if v in products else values[v]
        for op in graph.ops
        for i, v in enumerate(op.operands)
        if v in values
    }
    values |= {v: np.array([-2], np.int8) for v in products}
    kinds = ["parameter"] * LAYERS + ["batch"]
    found = step_memory(graph, AXES, model, crossing, kinds, values, reads, {})
    in_order = simulate_memory(
        graph, AXES, crossing.stored, kinds, values, reads, times=crossing.times, platform="gpu"
    )
    activation = ROWS * side * 4 // 8
    # the first layer's gradient needs what all others still hold
    assert found.parts["activations"] >= activation * (2 * LAYERS - 1 if waits else LAYERS)
    # scattered apart, one product is late, and what is made waits
    assert (found.peak_bytes > in_order.peak_bytes + 2 * activation) == waits


def test_on_gpu_kernels_gradients_wait_too() -> None:
    """A diffusion U-Net keeps what its convolutions read and what their gradients come of (H100, jax 0.10.2)."""

    def loss(w: Any, x: Any) -> Any:
        hidden = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        hidden = jax.lax.conv_general_dilated(
            jnp.sin(hidden), w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.sum(hidden**2)

    arguments = jax.ShapeDtypeStruct((3, 3, 8, 8), jnp.float32), jax.ShapeDtypeStruct((64, 8, 8, 8), jnp.float32)
    graph = trace(jax.grad(loss), arguments, {}).graph
    crossing = traffic(graph, graph_rules(graph), "gpu")

    def row(shape: tuple[int, ...]) -> np.ndarray:
        return np.array([0 if shape[:1] == (64,) else -1], np.int8)

    values = {v.index: row(v.shape) for v in graph.values if not v.constant}
    reads = {
        (op.index, i): values[v] for op in graph.ops for i, v in enumerate(op.operands) if v in values
    }
    kernels = [
        op for op in graph.ops
        if op.primitive == "conv_general_dilated" and graph.values[op.results[0]].shape[:1] != (64,)
    ]  # fmt: skip
    assert len(kernels) == 2
    values |= {op.results[0]: np.array([-2], np.int8) for op in kernels}
    times = held_back(graph, AXES, crossing.stored, crossing.times, values, reads)
    assert times[kernels[0].index] > crossing.times[kernels[0].index]


def recommender(params: Any, ids: Any, y: Any) -> Any:
    """Bags of rows of several tables, and layers of their sums."""

    def loss(params: Any) -> Any:
        tables, ws = params
        x = jax.vmap(lambda table, i: table[i].sum(1), in_axes=(0, 1), out_axes=1)(tables, ids).reshape(len(ids), -1)
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - y) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def test_layers_wait_while_sparse_cores_copy_a_recommenders_rows() -> None:
    """The gradients of bags of rows are one list; on v5p and v7x both layers' gradients are made beside its copy, on
    v5e and v6e before (f32[5, 200000, 32], 16384 bags of 8 rows, compiled by jax 0.10.2, libtpu 0.0.42.1)."""
    shapes = [(5, 200000, 32), (160, 1024), (1024, 1024)]
    tables, *ws = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    ids, y = jax.ShapeDtypeStruct((16384, 5, 8), jnp.int32), jax.ShapeDtypeStruct((16384, 1024), jnp.float32)
    graph = trace(recommender, ((tables, ws), ids, y), {}, donate_argnums=(0,)).graph
    axes = (("data", 1),)
    values = {v.index: np.full(1, -1, np.int8) for v in graph.values if not v.constant}
    reads = {(op.index, i): values[v] for op in graph.ops for i, v in enumerate(op.operands) if v in values}
    crossing = traffic(graph, graph_rules(graph), "tpu")
    lists = list(list_copies(graph, axes, crossing.lookups, values, reads, crossing.times, 0))
    (rows,) = (one for one in lists if one.given_up)
    maker = graph.ops[graph.producers()[rows.value]]
    (spread,) = (one for one in lists if one.value in maker.operands)
    assert spread.size == 5 * 16384 * 128 * 4  # in lanes, 32 of 128
    weights = [op.index for op in graph.ops if op.primitive == "dot_general" and made(graph, op.index) in shapes]
    later = put_off(graph, crossing.times, [rows.value], rows.stop - 1)
    assert [later[index] for index in weights] == [rows.stop - 1] * 2
    assert later[maker.index] == crossing.times[maker.index]

    def alive(sparse_core_copies: int) -> int:
        profile = replace(load_profile("tpu-v5p"), sparse_core_copies=sparse_core_copies)
        model = CostModel(profile=profile, axes=axes, links=(axis_links(profile, axes)["data"],))
        kinds = ["parameter"] * 3 + ["batch"] * 2
        found = step_memory(graph, axes, model, crossing, kinds, values, reads, {})
        return int(found.curve[rows.start])

    assert alive(1) - alive(0) > 2 * 2 * 16384 * 1024  # bf16, of either layer


def made(graph: Graph, op: int) -> tuple[int, ...]:
    return graph.values[graph.ops[op].results[0]].shape


@pytest.mark.parametrize(("width", "together"), [(2048, 4), (3328, 2), (4096, 1)])
def test_gradients_that_are_summed_in_one_wait_for_each_other_on_tpu(width: int, together: int) -> None:
    """Four of f32[2048, 2048] under data parallelism lie there until the last product is done, as compiled for v5e and
    v5p (jax 0.10.2, libtpu 0.0.42.1); two of 44 MB are summed in one, and none of 67."""
    weights = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * LAYERS
    graph = trace(step, (weights, jax.ShapeDtypeStruct((64, width), jnp.float32)), {}, donate_argnums=(0,)).graph
    products = [op for op in graph.ops if op.primitive == "dot_general"]
    gradients = [op for op in products if graph.values[op.results[0]].shape == (width, width)]
    made = {op.results[0] for op in gradients}
    last = products[-1].index
    found = awaited_sums(graph, range(len(graph.ops)), lambda v: 4 * width**2 * (v in made))
    groups = [gradients[i : i + together] for i in range(0, LAYERS, together)]
    assert {op.results[0]: group[-1].index + 1 for group in groups for op in group}.items() <= found.items()
    row, pending = np.array([-1], np.int8), np.array([UNREDUCED], np.int8)
    values = {v.index: pending if v.index in made else row for v in graph.values if not v.constant}
    reads = {(op.index, i): values[v] for op in graph.ops for i, v in enumerate(op.operands) if v in values}
    kinds, stored = ["batch"] * len(graph.inputs), [False] * len(graph.values)
    alive = {
        platform: simulate_memory(graph, AXES, stored, kinds, values, reads, platform=platform).curve[last]
        for platform in ("tpu", "cpu")
    }
    more = (alive["tpu"] - alive["cpu"]) / (4 * width**2)
    assert more == pytest.approx(together - 1, abs=0.1)


@pytest.mark.parametrize(("side", "waits"), [(4096, True), (8192, False)], ids=["several a collective", "one each"])
def test_scattered_sums_that_share_collectives_wait_for_the_end(side: int, waits: bool) -> None:
    """Each collective has gradients of early and of late layers: a DiT of six blocks keeps 226 MB (H100)."""
    arguments = (
        [jax.ShapeDtypeStruct((side, side), jnp.float32)] * LAYERS,
        jax.ShapeDtypeStruct((ROWS, side), jnp.float32),
    )
    graph = trace(step, arguments, {}).graph
    made = gradients(graph)
    products = {graph.ops[index].results[0] for index in made}
    values = {v: np.array([UNREDUCED], np.int8) for v in products}
    reads = {
        (op.index, i): np.array([0], np.int8) for op in graph.ops for i, v in enumerate(op.operands) if v in products
    }
    found = sorted(combined_sums(graph, AXES, range(len(graph.ops)), values, reads))
    assert found == ([(index + 1, max(made) + 1, side**2 * 4) for index in sorted(made)[:-1]] if waits else [])


def shared_step(layers: int, uses: int) -> Any:
    """Layers of f32 weights used several times each, computed in bf16, with momentum-free descent."""

    def step(ws: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            hidden = x
            for i in range(layers):
                up, down = (w.astype(x.dtype) for w in ws[i // uses])
                hidden = hidden + jax.nn.gelu(hidden @ up) @ down
            return jnp.mean(hidden.astype(jnp.float32) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws))

    return step


def shared_arguments(layers: int, uses: int, rows: int) -> Any:
    up, down = ((1024, 4096), (4096, 1024))
    weights = [tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (up, down))] * (layers // uses)
    return weights, jax.ShapeDtypeStruct((rows, 1024), jnp.bfloat16)


@pytest.mark.parametrize("uses", [1, 2, 3, 6])
def test_gradients_of_a_weight_that_is_used_several_times_wait_for_the_last_on_tpu(uses: int) -> None:
    graph = trace(shared_step(6, uses), shared_arguments(6, uses, ROWS), {}).graph
    made = [
        op
        for op in graph.ops
        if op.primitive == "dot_general" and ROWS not in graph.values[op.results[0]].shape
    ]
    assert len(made) == 12
    results = {op.results[0] for op in made}
    found = awaited_sums(graph, range(len(graph.ops)), lambda v: 2**28 * (v in results))
    for op in made:  # in the order of the backward pass, two of a layer beside each other
        shape = graph.values[op.results[0]].shape
        alike = [other for other in made if graph.values[other.results[0]].shape == shape]
        place = alike.index(op)
        last = alike[place - place % uses + uses - 1] if uses >= 3 else op
        assert found[op.results[0]] == last.index + 1
    # what is added before it is summed is one sum
    pending = lambda v: 2**28 * (graph.values[v].shape in ((1024, 4096), (4096, 1024)))  # noqa: E731
    assert awaited_sums(graph, range(len(graph.ops)), pending)[made[0].results[0]] == made[0].index + 1


@pytest.mark.aot_broad
def test_as_many_gradients_wait_as_are_compiled() -> None:
    layers, rows = 12, 8192
    mesh = jaxplan.target("tpu-v5e:2x4").mesh(data=8)
    options = {"search": "data", "compare_templates": False}
    step = jaxplan.auto_shard(
        shared_step(layers, layers), mesh, hardware="tpu-v5e", donate_argnums=0, options=options
    )
    arguments = shared_arguments(layers, layers, 8 * rows)
    compiled = compiled_memory(step.lower(*arguments).compile()).peak_bytes
    planned = step.plan(*arguments).cost.peak_bytes
    activations = layers * rows * (1024 + 4096) * 2
    gradients = layers * 2 * 1024 * 4096 * 2
    assert compiled > gradients + activations / 2
    assert planned == pytest.approx(compiled, rel=0.12)
