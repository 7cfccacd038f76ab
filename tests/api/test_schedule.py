"""A program's tasks: what only rewrites what is there from the start waits for nothing, and nothing is left out."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan.api.schedule import planned_tasks
from jaxplan.cost import CostModel
from jaxplan.hardware import axis_links, load_profile
from jaxplan.ir import Graph, trace
from jaxplan.lowering import Sending
from jaxplan.plans import COMPUTE, PlannedTask
from jaxplan.sharding import Collective


def tasks_of(function: Any, *shapes: tuple[int, ...]) -> tuple[Graph, tuple[PlannedTask, ...]]:
    """Nothing is communicated; every operation takes a second."""
    graph = trace(function, tuple(np.zeros(shape, np.float32) for shape in shapes), {}).graph
    model: Any = None
    seconds = {op.index: 1.0 for op in graph.ops}
    return graph, planned_tasks(graph, seconds, {}, (), (), model, np.zeros(len(graph.ops), np.int64))


def test_a_weight_s_cast_is_a_task_of_its_own_that_waits_for_nothing() -> None:
    def step(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return (x + y) @ jnp.sin(w)

    _, tasks = tasks_of(step, (8, 8), (8, 8), (8, 8))
    (cast,) = (i for i, task in enumerate(tasks) if task.name == "sin")
    assert tasks[cast].after == ()
    assert [cast in task.after for task in tasks if task.name == "dot_general"] == [True]
    assert all(other < position for position, task in enumerate(tasks) for other in task.after)


def test_slices_stay_in_their_loop_and_what_nobody_reads_is_there() -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ jnp.sin(w)), None

        return jax.lax.scan(layer, x, w)[0], jnp.cos(w)

    graph, tasks = tasks_of(step, (4, 8, 8), (8, 8))
    assert math.fsum(task.seconds_s for task in tasks) == len(graph.ops)
    start, end = (i for i, task in enumerate(tasks) if task.kind == "barrier")
    sliced = [i for i, task in enumerate(tasks) if task.name in ("scan_slice", "sin")]
    assert sliced
    assert all(start < i < end and tasks[i].after in ((start,), (start, i - 1)) for i in sliced)
    # the returned cosine: before the loop or behind it
    assert any(task.kind == COMPUTE and task.name == "cos" for task in tasks)


SUMS = ("all_reduce", "reduce_scatter")


def data_parallel(width: int, hardware: str = "h100") -> tuple[PlannedTask, ...]:
    """Two layers' step with whole weights and the batch in eight."""

    def step(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        def loss(params: dict[str, jax.Array]) -> jax.Array:
            return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    weights = {name: jax.ShapeDtypeStruct((width, width), jnp.float32) for name in ("up", "down")}
    batch = jax.ShapeDtypeStruct((1 << 18, width), jnp.float32)
    return jaxplan.plan(
        step, jax.sharding.AbstractMesh((8,), ("data",)), weights, batch, hardware=hardware,
        constraints={"params/up": P(), "params/down": P(), "x": P("data")}, options={"compare_templates": False},
    ).tasks  # fmt: skip


def test_gradients_that_are_combined_start_together_and_large_ones_when_they_are_there() -> None:
    small, large = ([t for t in data_parallel(width) if t.kind in SUMS] for width in (512, 8192))
    assert len(small) == 1
    assert len(large) == 2


def test_nothing_waits_for_a_sum_that_it_does_not_read_and_kernels_that_pack_are_computed() -> None:
    tasks = data_parallel(8192, "a100-80")
    behind: list[set[int]] = []
    for task in tasks:
        behind.append(set(task.after).union(*(behind[other] for other in task.after)))
    products = [i for i, task in enumerate(tasks) if task.name == "dot_general"]
    sums = {i for i, task in enumerate(tasks) if task.kind in SUMS}
    assert len(sums) == 2
    # the products of the way back go on while the first gradient is summed
    assert not any(behind[i] & sums for i in products)
    for task in sums:
        packed = max(tasks[task].after)  # two of these are too large to be combined
        assert (tasks[packed].kind, tasks[packed].name) == (COMPUTE, f"order for {tasks[task].kind}")
        assert tasks[packed].bytes > 0  # memory is not empty meanwhile


def test_what_was_gathered_for_one_reader_is_waited_for_by_the_next() -> None:
    def step(w: jax.Array, v: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jnp.tanh(x @ w)
        return y @ v, y @ jnp.sin(v)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 4096),) * 3]
    tasks = jaxplan.plan(
        step, jax.sharding.AbstractMesh((8,), ("model",)), *shapes, hardware="h100",
        constraints={"w": P(None, "model"), "v": P(None, "model"), "x": P()}, options={"compare_templates": False},
    ).tasks  # fmt: skip
    behind: list[set[int]] = []
    for task in tasks:
        behind.append(set(task.after).union(*(behind[other] for other in task.after)))
    (gathered,) = (i for i, task in enumerate(tasks) if task.kind == "all_gather")
    # only the product that is gathered does not wait
    assert sum(gathered not in behind[i] for i, task in enumerate(tasks) if task.name == "dot_general") == 1


def test_a_tpu_computes_nothing_while_it_sums() -> None:
    """Unless it is told to: XLA hides all_gathers and permutes there (jax 0.10.2, libtpu 0.0.42.1)."""
    for hardware, stalled in (("h100", False), ("tpu-v5e", True)):
        sums = [task for task in data_parallel(8192, hardware) if task.kind in SUMS]
        assert sums
        assert all((COMPUTE in task.streams) == stalled and COMPUTE not in task.works_on for task in sums)


def test_results_are_brought_to_where_they_lie_as_soon_as_they_are_there_and_copied_then() -> None:
    def step(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        return a @ a, b @ b

    graph = trace(step, (np.zeros((8, 8), np.float32), np.zeros((16, 16), np.float32)), {}).graph
    profile, axes = load_profile("h100"), (("data", 8),)
    model = CostModel(profile=profile, axes=axes, links=(axis_links(profile, axes)["data"],))
    item = Collective(
        kind="all_gather", axes=("data",), bytes=256, trips=1.0, scope="", shape=(8, 8), dtype="float32"
    )  # fmt: skip
    seconds, settled = {op.index: 1.0 for op in graph.ops}, {graph.producers()[graph.outputs[0]]: 0.25}
    sent = [Sending(2.0, 0.0)]
    tasks = planned_tasks(graph, seconds, settled, [(item, -1)], sent, model, np.zeros(len(graph.ops), np.int64))
    first, second, gathered, copied = tasks
    assert [first.seconds_s, second.seconds_s, copied.seconds_s] == [0.75, 1.0, 0.25]
    assert (gathered.kind, gathered.after) == ("all_gather", (0,))
    assert (copied.name, copied.kind, copied.after) == ("copy", COMPUTE, (2,))
    assert first.name == second.name == "dot_general"


def test_what_a_tpu_copies_back_is_copied_out_first() -> None:
    """Of what vector memory doesn't hold: 408 us each for f32[4096, 8192] on v5e (jax 0.10.2, libtpu 0.0.42.1)."""
    graph = trace(lambda a: a @ a, (np.zeros((8, 8), np.float32),), {}).graph
    profile, axes = load_profile("tpu-v5e"), (("data", 8),)
    model = CostModel(profile=profile, axes=axes, links=(axis_links(profile, axes)["data"],))
    room_s = float(model.copy_seconds(np.array(2.0 * profile.on_chip_bytes)))

    def copies(settled_s: float) -> list[tuple[str, float]]:
        alive = np.zeros(len(graph.ops), np.int64)
        tasks = planned_tasks(graph, {0: 1.0}, {0: settled_s}, [], [], model, alive)
        return [(task.name, task.seconds_s) for task in tasks if task.name == "copy" or task.seconds_s > 0.5]

    assert copies(room_s) == [("dot_general", 1.0 - room_s), ("copy", room_s)]
    assert copies(4 * room_s) == [("copy", 2 * room_s), ("dot_general", 1.0 - 4 * room_s), ("copy", 2 * room_s)]


def test_weights_that_are_gathered_in_one_are_so_however_late_each_would_start_and_behind_their_casts() -> None:
    def step(x: jax.Array, weights: tuple[jax.Array, ...]) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w.astype(jnp.bfloat16))
        return x

    rows, square = np.zeros((4, 8), jnp.bfloat16), np.zeros((8, 8), np.float32)
    graph = trace(step, (rows, (square,) * 20), {}).graph
    profile, axes = load_profile("h100"), (("data", 8),)
    model = CostModel(profile=profile, axes=axes, links=(axis_links(profile, axes)["data"],))
    collectives = [
        (
            Collective(
                kind="all_gather", axes=("data",), bytes=2**20, trips=1.0, scope=str(op.index), shape=(8, 8),
                dtype="bfloat16",
            ),
            op.index,
        )
        for op in graph.ops if op.primitive == "dot_general"
    ]  # fmt: skip
    seconds, sent = {op.index: 1e-3 for op in graph.ops}, [Sending(1e-6, 0.0)] * len(collectives)
    tasks = planned_tasks(graph, seconds, {}, collectives, sent, model, np.zeros(len(graph.ops), np.int64))
    (gathered,) = (task for task in tasks if task.kind == "all_gather")
    casts = {i for i, task in enumerate(tasks) if task.name == "convert_element_type"}
    assert len(casts) == 20 and casts <= set(gathered.after)
