"""What XLA for GPU writes beside an erfc in bf16."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxplan.cost import traffic
from jaxplan.ir import trace
from jaxplan.sharding import graph_rules

ROWS, WIDTH = 64, 512


@pytest.mark.parametrize(
    ("platform", "dtype", "kept"),
    [("gpu", jnp.bfloat16, 1), ("gpu", jnp.float32, 0), ("tpu", jnp.bfloat16, 0)],
    ids=["bf16", "f32", "tpu"],
)
def test_the_argument_of_an_exact_gelu_is_kept_beside_the_erfc(platform: str, dtype: Any, kept: int) -> None:
    """A RoBERTa of six layers on eight H100: 3889 MB compiled, 3547 predicted before and 3849 since (jax 0.10.2)."""

    def loss(weights: Any, bias: Any, x: Any) -> Any:
        return jnp.sum(jax.nn.gelu(x @ weights[0] + bias, approximate=False) @ weights[1])

    weight, bias, x = ((WIDTH, WIDTH), (WIDTH,), (ROWS, WIDTH))
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in (weight, bias, x)]
    graph = trace(jax.grad(loss), ((shapes[0], shapes[0]), *shapes[1:]), {}).graph
    crossing = traffic(graph, graph_rules(graph), platform)
    (erfc,) = (op for op in graph.ops if op.primitive == "erfc")
    assert crossing.stored[erfc.operands[0]] is bool(kept)


def test_what_nothing_else_reads_is_not() -> None:
    shape = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
    graph = trace(lambda x: jax.nn.gelu(x, approximate=False), (shape,), {}).graph
    (erfc,) = (op for op in graph.ops if op.primitive == "erfc")
    assert not traffic(graph, graph_rules(graph), "gpu").stored[erfc.operands[0]]
