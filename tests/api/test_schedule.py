"""A program's tasks: what only rewrites what is there from the start waits for nothing, and nothing is left out."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxplan.api.schedule import planned_tasks
from jaxplan.ir import Graph, trace
from jaxplan.plans import COMPUTE, PlannedTask


def tasks_of(function: Any, *shapes: tuple[int, ...]) -> tuple[Graph, tuple[PlannedTask, ...]]:
    """Nothing is communicated; every operation takes a second."""
    graph = trace(function, tuple(np.zeros(shape, np.float32) for shape in shapes), {}).graph
    model: Any = None
    seconds = {op.index: 1.0 for op in graph.ops}
    return graph, planned_tasks(graph, seconds, (), (), model, np.zeros(len(graph.ops), np.int64))


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
