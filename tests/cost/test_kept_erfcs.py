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
from jaxplan.cost.kept_erfcs import kept_drops, kept_erfcs
from jaxplan.hardware import compile_for, load_profile
from jaxplan.ir import lives_of, trace
from jaxplan.lowering import compiled_memory
from jaxplan.sharding import NONE, graph_rules

DIM, HIDDEN, LAYERS, TOKENS = 512, 2048, 4, 256
F32, BF16 = jnp.float32, jnp.bfloat16


def dropped(x: jax.Array, layer: int) -> jax.Array:
    kept = jax.random.bernoulli(jax.random.key(layer), 0.9, x.shape)
    return jnp.where(kept, x / 0.9, 0.0)


def step_of(
    scaled: bool = False, approximate: bool = False, drops: bool = False, centred: bool = True
) -> Callable[..., Any]:
    def loss(weights: Any, x: jax.Array) -> jax.Array:
        dtype = x.dtype
        for layer, w in enumerate(jax.tree.map(lambda w: w.astype(dtype), weights)):
            y = x - x.mean(-1, keepdims=True) if centred else x
            y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-6)
            y = jax.nn.gelu(y @ w["up"] + w["bias"], approximate=approximate)
            y = (dropped(y, layer) if drops else y) @ w["down"]
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


@pytest.mark.parametrize(
    ("dtype", "approximate", "drops", "layers"),
    [(F32, False, True, LAYERS), (F32, False, False, 0), (F32, True, True, 0), (BF16, False, True, 0)],
)
def test_what_is_dropped_out(dtype: Any, approximate: bool, drops: bool, layers: int) -> None:
    """Of exact gelus in f32: in bf16, from the product that reads it first to its gradient's."""
    graph = trace(step_of(approximate=approximate, drops=drops), shapes(8, dtype), {}).graph
    crossing = traffic(graph, graph_rules(graph), "tpu")
    reads = {(op.index, place): np.array([NONE]) for op in graph.ops for place in range(len(op.operands))}
    found = [*kept_drops(graph, (("data", 1),), crossing.stored, crossing.times, reads)]
    assert [one.size for one in found] == [2 * 8 * TOKENS * HIDDEN] * layers
    for one in found:
        products = [crossing.times[op] for op, _ in graph.uses()[one.value]]
        assert len(products) == 2 and one.start < min(products) and one.stop == max(products) + 1


def test_which_chips_keep_error_functions() -> None:
    profiles = [load_profile(f"tpu-{name}") for name in ("v5e", "v5p", "v6e")]
    assert [profile.keeps_erfcs for profile in profiles] == [0, 1, 0]
    assert [profile.keeps_drops for profile in profiles] == [1, 0, 0]


@pytest.mark.aot_tpu
@pytest.mark.parametrize(
    ("name", "scaled", "drops"),
    [
        ("tpu-v5p:2x2x2", False, False),
        ("tpu-v6e:2x4", True, False),
        pytest.param("tpu-v5e:2x4", True, True, marks=pytest.mark.slow),
    ],
)
def test_compiled_for_tpu_the_step_takes_as_much(
    name: str, scaled: bool, drops: bool, tpu_topology: Callable[[str], Any]
) -> None:
    target = jaxplan.target(name)
    mesh = target.mesh(data=8)
    step = step_of(scaled, drops=drops, centred=not drops)
    sharded = jaxplan.auto_shard(step, mesh, donate_argnums=0, options={"search": "data"})
    arguments = shapes(512)
    predicted = sharded.plan(*arguments).cost.peak_bytes
    compiled = compiled_memory(compile_for(sharded.lower(*arguments), mesh, target.compiler_options)).peak_bytes
    assert 0.95 * compiled < predicted < 1.1 * compiled
