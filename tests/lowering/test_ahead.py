"""What keeps more in memory through a loop than it leaves is finished before the loop."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxplan.ir import Site, trace, turned_sums
from jaxplan.lowering import planned_function
from jaxplan.lowering.ahead import ahead_of_loops, waited_values
from jaxplan.plans import Constraint
from jaxplan.sharding import Layout

ROWS, WIDTH = 64, 32


def between_loops(vocabulary: int) -> Any:
    """Two loops over layers, and a head between them whose gradient only the end wants."""

    def step(layers: Any, head: Any, x: Any) -> Any:
        x, kept = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c), x, layers)
        scores = jnp.exp(x @ head)
        gradient = (x.T @ scores).astype(jnp.float32)
        back, _ = jax.lax.scan(lambda c, w: (c @ w.T, None), scores @ head.T, layers)
        return back.sum(), head - gradient.astype(head.dtype), (gradient**2).sum(), kept

    shapes = ((3, WIDTH, WIDTH), (WIDTH, vocabulary), (ROWS, WIDTH))
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return trace(step, arguments, {})


@pytest.mark.parametrize("vocabulary", [8 * WIDTH, WIDTH // 4])
def test_a_gradient_of_larger_scores_is_waited_for_in_the_type_it_came_in(vocabulary: int) -> None:
    """Rows are more than the width, so that scores and what they are multiplied with outweigh the gradient."""
    traced = between_loops(vocabulary)
    loops = [i for i, eqn in enumerate(traced.jaxpr.eqns) if eqn.primitive.name == "scan"]
    ((loop, ahead),) = ahead_of_loops(traced.jaxpr).items()
    assert loop == loops[1]
    (waited,) = ahead.values
    assert waited.value.aval.shape == (WIDTH, vocabulary)
    assert (waited.value.aval.dtype, waited.dtype) == (jnp.float32, jnp.bfloat16)
    assert all(read.equation > loop for read in waited.reads)


def test_what_leaves_more_than_it_takes_is_not_waited_for() -> None:
    def step(layers: Any, x: Any) -> Any:
        small = jnp.sin(x[:, 0])
        wide = jnp.outer(small, small)
        x, _ = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x + small[:, None], layers)
        return x.sum() + wide.sum()

    shapes = ((3, WIDTH, WIDTH), (ROWS, WIDTH))
    traced = trace(step, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes], {})
    assert ahead_of_loops(traced.jaxpr) == {}


def test_it_waits_in_the_layout_that_is_read_after_the_loop(mesh_4x2: Mesh) -> None:
    """A sum that is scattered for its reader is scattered before the loop, not kept whole through it."""
    traced = between_loops(8 * WIDTH)
    (waited,) = next(iter(ahead_of_loops(traced.jaxpr).values())).values
    layout = Layout(dims=((), ("data", "model")))
    pins = [
        Constraint(
            site=Site((), "operand", *read), layout=layout, source="", primitive="", shape=waited.value.aval.shape,
            why="reshard",
        )
        for read in waited.reads
    ]  # fmt: skip
    replicated = jax.sharding.NamedSharding(mesh_4x2, PartitionSpec())
    function = jax.jit(planned_function(traced, pins, mesh_4x2), in_shardings=replicated)
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in traced.jaxpr.invars]
    text = function.lower(*shapes).as_text()
    barrier = next(line for line in text.splitlines() if "optimization_barrier" in line)
    operands = re.findall(r"%[\w#]+", barrier.partition("optimization_barrier")[2])
    makers = [next(line for line in text.splitlines() if f"{name} =" in line) for name in operands]
    converted = next(line for line in makers if f"tensor<{WIDTH}x{8 * WIDTH}xbf16>" in line)
    source = re.findall(r"%[\w#]+", converted.partition("convert")[2])[0]
    assert '{"data", "model"}' in next(line for line in text.splitlines() if f"{source} = sdy" in line)
    loops = [i for i, line in enumerate(text.splitlines()) if "stablehlo.while" in line]
    assert loops[0] < text.splitlines().index(barrier) < loops[1]


def test_it_leaves_the_barrier_as_it_is_laid_out_in_the_type_that_is_read(mesh_4x2: Mesh) -> None:
    """Pinned in the narrower type, what widens it again would take the axes of whoever reads it."""
    traced = between_loops(8 * WIDTH)
    (waited,) = next(iter(ahead_of_loops(traced.jaxpr).values())).values
    site, shape = Site((), "result", *waited.made), waited.value.aval.shape
    pin = Constraint(
        site=site, layout=Layout(dims=((), ())), source="", primitive="", shape=shape, why="reshard"
    )
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in traced.jaxpr.invars]
    lines = jax.jit(planned_function(traced, [pin], mesh_4x2)).lower(*shapes).as_text().splitlines()
    barrier = next(i for i, line in enumerate(lines) if "optimization_barrier" in line)
    after = [line for line in lines[barrier:] if f"tensor<{WIDTH}x{8 * WIDTH}x" in line]
    widened = next(i for i, line in enumerate(after) if "convert" in line)
    name = after[widened].split(" =")[0].strip()
    assert f"sharding_constraint {name} " in after[widened + 1]
    assert not any("sharding_constraint" in line for line in after[:widened])


def test_the_graph_knows_what_waits_until_when_and_in_how_many_bytes() -> None:
    traced = between_loops(8 * WIDTH)
    ((value, (stop, share)),) = waited_values(traced).items()
    graph = traced.graph
    assert (graph.values[value].shape, graph.values[value].dtype) == ((WIDTH, 8 * WIDTH), "float32")
    assert stop == graph.loops[1].stop and share == 0.5


def test_a_sum_that_is_waited_for_is_not_added_in_parts() -> None:
    """A tied head's gradient, turned, waits behind the loop for the embedding's: the barrier ends its sum."""

    def loss(table: Any, layers: Any, tokens: Any) -> Any:
        rows = table[tokens].reshape(ROWS, WIDTH)
        x, _ = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), rows, layers)
        # a transposition that exchanging the product's operands doesn't make
        return (jnp.sin(jnp.einsum("nhk,vkh->nv", x.reshape(ROWS, 2, -1), table)) ** 2).sum()

    shapes = ((8 * WIDTH, WIDTH // 2, 2), (3, WIDTH, WIDTH))
    arguments: list[Any] = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    traced = trace(jax.grad(loss), [*arguments, jax.ShapeDtypeStruct((ROWS,), jnp.int32)], {})
    waited = waited_values(traced)
    turned = {traced.graph.ops[op].results[0] for op in turned_sums(traced.graph)}
    assert not turned.isdisjoint(waited)
    assert turned_sums(traced.graph, waited) == {}
