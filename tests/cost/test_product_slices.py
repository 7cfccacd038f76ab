"""Slices of loops' stacks that products on GPU read are in memory while these run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.cost import traffic
from jaxplan.cost.product_slices import slice_scratch
from jaxplan.ir import trace
from jaxplan.sharding import NONE, graph_rules

LAYERS, ROWS, WIDTH = 4, 512, 256
BYTES = 4


def found(product: Any, moved: bool = False) -> list[int]:
    """Bytes of the slices of every product of a step that makes gradients of stacked layers, `product(x, weights)`."""

    def loss(stack: Any, x: Any) -> Any:
        made, _ = jax.lax.scan(lambda x, weights: (jnp.tanh(product(x, weights)), None), x, stack)
        return jnp.sum(made)

    given = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    graph = trace(jax.grad(loss), given, {}).graph
    crossing = traffic(graph, graph_rules(graph), "gpu")
    whole, cut = np.full(1, NONE), np.zeros(1, np.int64)
    values = {value: whole for value in range(len(graph.values))}
    reads = {
        (op.index, place): cut if moved and op.primitive == "dot_general" else whole
        for op in graph.ops
        for place in range(len(op.operands))
    }
    sizes = slice_scratch(graph, (("data", 8),), crossing.stored, crossing.producers, values, reads)
    assert all(graph.ops[index].primitive == "dot_general" for index in sizes)
    return [size for _, size in sorted(sizes.items())]


WEIGHTS, ACTIVATIONS = BYTES * WIDTH**2, BYTES * ROWS * WIDTH


@pytest.mark.parametrize("product", [lambda x, w: x @ w, lambda x, w: x @ w.T])
def test_each_product_has_the_slices_that_it_reads(product: Any) -> None:
    """Weights forward and for the input's gradient; what the layer read for the weights'."""
    assert sorted(found(product)) == sorted([WEIGHTS, WEIGHTS, ACTIVATIONS])


def test_what_is_computed_of_a_slice_is_none_but_what_is_stacked_of_it() -> None:
    """Forward the product reads what kernels make, backward what they made, from stacks."""
    assert sorted(found(lambda x, w: jnp.sin(x) @ jnp.cos(w))) == sorted([WEIGHTS, ACTIVATIONS])


def test_what_is_resharded_is_in_memory_otherwise() -> None:
    assert not found(lambda x, w: x @ w, moved=True)
