"""Where the batch of an argument is: templates cut it there, and a batch that doesn't divide is warned of there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh

import jaxplan
from jaxplan.api.batch_dims import batch_dims
from jaxplan.ir import trace
from jaxplan.sharding import graph_rules

STEPS, ROWS, WIDTH, WORDS = 8, 16, 128, 64


def f32(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def found(fn: Any, *shapes: Any) -> tuple[int, ...]:
    graph = trace(fn, shapes, {}).graph
    return batch_dims(graph, graph_rules(graph))


def hidden(w: Any, x: Any) -> Any:
    """States of a recurrent network over a sequence that comes time first."""

    def cell(h: Any, x: Any) -> tuple[Any, Any]:
        h = jnp.tanh(x @ w["x"] + h @ w["h"])
        return h, h

    return lax.scan(cell, jnp.zeros(x.shape[1:]), x)[1]


def train_step(w: Any, x: Any, words: Any) -> Any:
    def loss(w: Any) -> Any:
        scores = jax.nn.log_softmax(hidden(w, x) @ w["out"])
        return -jnp.take_along_axis(scores, words[..., None], -1).mean()

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda w, g: w - g, w, grads), value


WEIGHTS = {"x": f32(WIDTH, WIDTH), "h": f32(WIDTH, WIDTH), "out": f32(WIDTH, WORDS)}


def labels(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.int32)


def test_the_batch_of_a_sequence_that_comes_time_first_is_its_second_dimension() -> None:
    assert found(train_step, WEIGHTS, f32(STEPS, ROWS, WIDTH), labels(STEPS, ROWS))[3:] == (1, 1)


def test_what_is_transposed_into_a_loop_or_cut_into_microbatches_has_its_batch_first() -> None:
    def batch_first(w: Any, x: Any) -> Any:
        return hidden(w, x.swapaxes(0, 1)).sum()

    def accumulated(w: Any, x: Any) -> Any:
        return lax.scan(lambda s, x: (s + (x @ w).sum(), None), 0.0, x.reshape(4, ROWS // 4, WIDTH))[0]

    assert found(batch_first, WEIGHTS, f32(ROWS, STEPS, WIDTH))[-1] == 0
    assert found(accumulated, f32(WIDTH, WIDTH), f32(ROWS, WIDTH)) == (0, 0)


def test_a_loop_that_indexes_its_steps_goes_along_them() -> None:
    def indexed(w: Any, x: Any) -> Any:
        return lax.fori_loop(0, STEPS, lambda t, h: jnp.tanh(h @ w + x[t]), jnp.zeros((ROWS, WIDTH)))

    assert found(indexed, f32(WIDTH, WIDTH), f32(STEPS, ROWS, WIDTH)) == (0, 1)


def test_what_loops_go_along_everywhere_has_no_batch() -> None:
    def summed(x: Any) -> Any:
        return lax.scan(lambda s, x: (s * x, None), 1.0, x)[0]

    assert found(summed, f32(STEPS)) == (1,)


@pytest.mark.parametrize("steps", [STEPS, 7])
def test_a_template_is_data_parallel_over_the_rows_of_such_a_sequence(steps: int) -> None:
    mesh = AbstractMesh((4, 2), ("data", "model"))
    shapes = WEIGHTS, f32(steps, ROWS, WIDTH), labels(steps, ROWS)
    options = {"search": "data", "compare_templates": False}
    plan = jaxplan.plan(train_step, mesh, *shapes, donate_argnums=0, hardware="tpu-v5e", options=options)
    assert {t.layout.dims[:2] for t in plan.inputs if t.kind == "batch"} == {((), ("data", "model"))}
    assert not plan.warnings
    assert max(c.trips for c in plan.collectives) == 1  # the loop over steps sends nothing


def test_a_batch_that_does_not_divide_is_warned_of_where_it_is() -> None:
    shapes = WEIGHTS, f32(STEPS, 8190, WIDTH), labels(STEPS, 8190)
    plan = jaxplan.plan(train_step, AbstractMesh((8,), ("data",)), *shapes, donate_argnums=0, hardware="tpu-v5e")
    (told,) = [warning for warning in plan.warnings if "alike" in warning]
    assert "dimension 1 of x, 8190, is not divisible by 8" in told
