"""Exact gelus, and branches with a scale, on TPU: what is there for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxplan
from jaxplan.cost import traffic
from jaxplan.cost.kept_erfcs import kept_erfcs
from jaxplan.hardware import compile_for, load_profile
from jaxplan.ir import lives_of, trace
from jaxplan.lowering import compiled_memory
from jaxplan.sharding import NONE, graph_rules

DIM, HIDDEN, LAYERS, TOKENS = 512, 2048, 4, 256
F32, BF16 = jnp.float32, jnp.bfloat16


def step_of(scaled: bool = False, approximate: bool = False) -> Callable[..., Any]:
    def loss(weights: Any, x: jax.Array) -> jax.Array:
        dtype = x.dtype
        for w in jax.tree.map(lambda w: w.astype(dtype), weights):
            y = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
            y = jax.nn.gelu(y @ w["up"] + w["bias"], approximate=approximate) @ w["down"]
            x = x + (y * w["scale"] if scaled else y)
        return jnp.mean(jnp.square(x.astype(F32)))

    return lambda weights, x: jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))


def shapes(batch: int, dtype: Any = F32) -> tuple[Any, Any]:
    layer = {"up": (DIM, HIDDEN), "bias": (HIDDEN,), "down": (HIDDEN, DIM), "scale": (DIM,)}
    weights = [{name: jax.ShapeDtypeStruct(shape, F32) for name, shape in layer.items()}] * LAYERS
    return weights, jax.ShapeDtypeStruct((batch, TOKENS, DIM), dtype)


@pytest.mark.parametrize(
    ("dtype", "approximate", "arguments", "functions"),
    [(F32, False, LAYERS, LAYERS), (BF16, False, 2 * LAYERS, 0), (F32, True, LAYERS, 0)],
)
def test_what_is_kept(dtype: Any, approximate: bool, arguments: int, functions: int) -> None:
    """Of layers' values of the width of a gelu: its argument in f32, two values in bf16; and error functions."""
    graph = trace(step_of(approximate=approximate), shapes(8, dtype), {}).graph
    crossing = traffic(graph, graph_rules(graph), "tpu")
    size, gelus = (8, TOKENS, HIDDEN), [op.index for op in graph.ops if op.primitive in ("erfc", "tanh")]
    made = [v for op in graph.ops[: gelus[-1]] for v in op.results if graph.values[v].shape == size]
    assert sum(crossing.stored[v] for v in made) == arguments
    values = {v: np.array([NONE]) for v in range(len(graph.values))}
    lives = lives_of(graph, crossing.stored, crossing.times)
    found = [*kept_erfcs(graph, (("data", 1),), crossing.stored, crossing.times, lives, values)]
    assert [bytes_ for _, _, bytes_ in found] == [4 * 8 * TOKENS * HIDDEN] * functions


def test_which_chips_keep_error_functions() -> None:
    assert [load_profile(f"tpu-{name}").keeps_erfcs for name in ("v5e", "v5p", "v6e")] == [0, 1, 0]


@pytest.mark.aot_tpu
@pytest.mark.parametrize(("name", "scaled"), [("tpu-v5p:2x2x2", False), ("tpu-v6e:2x4", True)])
def test_compiled_for_tpu_the_step_takes_as_much(
    name: str, scaled: bool, tpu_topology: Callable[[str], Any]
) -> None:
    target = jaxplan.target(name)
    mesh = target.mesh(data=8)
    step = step_of(scaled)
    sharded = jaxplan.auto_shard(step, mesh, donate_argnums=0, options={"search": "data"})
    arguments = shapes(512)
    predicted = sharded.plan(*arguments).cost.peak_bytes
    compiled = compiled_memory(compile_for(sharded.lower(*arguments), mesh, target.compiler_options)).peak_bytes
    assert 0.95 * compiled < predicted < 1.1 * compiled
