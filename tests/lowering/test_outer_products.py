"""Heads of one output: products that XLA writes as broadcasts before it looks at shardings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxplan
from jaxplan.ir import trace
from jaxplan.lowering import compiled_collectives
from jaxplan.lowering.outer_products import multiplied, on_their_own

AXES = (("data", 4), ("model", 2))
TIME, BATCH, WIDTH = 32, 64, 256


class Cell(nn.Module):
    @nn.compact
    def __call__(self, carry: Any, inputs: Any) -> Any:
        x, done = inputs
        carry = jax.tree.map(lambda a: jnp.where(done[:, None], 0, a), carry)
        return nn.OptimizedLSTMCell(WIDTH)(carry, x)


class Critic(nn.Module):
    @nn.compact
    def __call__(self, x: Any, done: Any) -> Any:
        cell = nn.scan(Cell, variable_broadcast="params", split_rngs={"params": False})()
        start = (jnp.zeros((x.shape[1], WIDTH)),) * 2
        _, y = cell(start, (nn.relu(nn.Dense(WIDTH)(x)), done))
        return nn.Dense(18)(y), nn.Dense(1)(y)[..., 0]


def step_and_shapes() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    critic, optimizer = Critic(), optax.adam(1e-3)

    def step(state: Any, x: Any, done: Any, actions: Any) -> Any:
        def loss(params: Any) -> Any:
            logits, values = critic.apply(params, x, done)
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[..., None], -1)
            return jnp.mean(values**2) - chosen.mean()

        updates, moments = optimizer.update(jax.grad(loss)(state[0]), state[1])
        return optax.apply_updates(state[0], updates), moments

    def start() -> Any:
        params = critic.init(jax.random.key(0), jnp.zeros((2, 1, 64)), jnp.zeros((2, 1), bool))
        return params, optimizer.init(params)

    batch = [((TIME, BATCH, 64), jnp.float32), ((TIME, BATCH), jnp.bool_), ((TIME, BATCH), jnp.int32)]
    return step, (jax.eval_shape(start), *(jax.ShapeDtypeStruct(*one) for one in batch))


def test_products_over_one_element_are_told_from_others() -> None:
    graph = trace(
        lambda x, w, v: ((x @ w) @ w.T, x[:, :1] @ v), [np.ones(s, np.float32) for s in ((8, 4), (4, 1), (1, 4))], {}
    ).graph
    products = {op.results[0]: op.params["dimension_numbers"] for op in graph.ops if op.primitive == "dot_general"}
    assert len(products) == 3
    assert len(multiplied(graph)) == 2


@pytest.mark.parametrize(
    ("expression", "given", "apart"),
    [("bij,bij->bij", [(8, 4, 2)] * 2, 0), ("bi,bj->bij", [(8, 4), (8, 2)], 2), ("bij,b->bij", [(8, 4, 2), (8,)], 1)],
)
def test_what_is_broadcast_goes_through_a_barrier(expression: str, given: list[tuple[int, ...]], apart: int) -> None:
    operands = [np.ones(shape, np.float32) for shape in given]
    (product,) = jax.make_jaxpr(lambda *x: jnp.einsum(expression, *x))(*operands).eqns
    barriers = jax.make_jaxpr(lambda *x: on_their_own(product, list(x)))(*operands).eqns
    assert [one.primitive.name for one in barriers] == ["optimization_barrier"] * apart


@pytest.mark.aot_tpu
def test_a_loop_over_time_does_not_gather_its_gradients_in_every_iteration(
    tpu_topology: Callable[[str], Any],
) -> None:
    step, shapes = step_and_shapes()
    mesh = jaxplan.target("tpu-v5e:2x4").mesh(**dict(AXES))
    planned = jaxplan.auto_shard(step, mesh, donate_argnums=0, options={"compare_templates": False})
    sent = compiled_collectives(planned.lower(*shapes).compile().as_text(), AXES)
    stack = TIME * BATCH * WIDTH * 4
    assert sum(c.bytes * c.trips for c in sent if c.kind == "all_gather") < 2 * stack
