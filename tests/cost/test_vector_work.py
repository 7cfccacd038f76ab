"""What a TPU's vector unit would compute in every kernel that reads it, or once: as XLA's compiler decides it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxplan
from jaxplan.cost import narrowed, traffic, written_bytes
from jaxplan.cost.shared_operands import SharedOperand
from jaxplan.hardware import compile_for, load_profile
from jaxplan.ir import trace
from jaxplan.lowering import compiled_memory
from jaxplan.sharding import NONE, graph_rules

BF16, F32 = jnp.bfloat16, jnp.float32
ROWS, LAYERS = 2**18, 3
Function = Callable[[jax.Array], jax.Array]


def of(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def chain(count: int) -> Function:
    def function(x: jax.Array) -> jax.Array:
        y = x.astype(F32)
        for i in range(count):
            y = y + (0.1 + 0.01 * i) if i % 2 else y * y
        return y.astype(x.dtype)

    return function


def normalised(function: Function) -> Function:
    def of_normalised(x: jax.Array) -> jax.Array:
        wide = x.astype(F32)
        rows = tuple(range(x.ndim - 1))
        mean = wide.mean(rows)
        scale = jax.lax.rsqrt(jnp.square(wide).mean(rows) - mean * mean + 1e-5)
        return function(((wide - mean) * scale).astype(x.dtype))

    return of_normalised


def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
    dimensions = ("NHWC", "HWIO", "NHWC")
    kernel = kernel.astype(x.dtype)
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dimensions)


def step_of(function: Function, *, residual: bool = True) -> Any:
    def product(x: jax.Array, weights: jax.Array) -> jax.Array:
        return convolved(x, weights) if x.ndim > 2 else x @ weights.astype(x.dtype)

    def step(layers: Any, x: jax.Array) -> Any:
        def loss(layers: Any) -> jax.Array:
            h = x
            for up, down in layers:
                mixed = product(function(product(h, up)), down)
                h = h + mixed if residual else mixed
            return jnp.mean(jnp.square(h.astype(F32)))

        return jax.tree.map(lambda w, g: w - 0.1 * g, layers, jax.grad(loss)(layers))

    return step


def shapes_of(width: int, hidden: int) -> tuple[Any, Any]:
    return [(of(width, hidden), of(hidden, width))] * LAYERS, of(ROWS, width, dtype=BF16)


def shared(function: Function, width: int, hidden: int, *, residual: bool = True) -> tuple[Any, list[SharedOperand]]:
    traced = trace(step_of(function, residual=residual), shapes_of(width, hidden), {})
    rules = graph_rules(traced.graph)
    graph = narrowed(traced.graph, rules, "tpu")
    return graph, [one for one in traffic(graph, rules, "tpu").shared if one.again is not None]


def written(hardware: str, function: Function, width: int, hidden: int, *, residual: bool = True) -> bool:
    """Whether what a function makes of the second layer's product is in memory."""
    graph, found = shared(function, width, hidden, residual=residual)
    one = next(one for one in found[1:] if graph.values[one.value].shape == (ROWS, hidden))
    whole = np.full((1, 1), NONE, np.int8)
    size = written_bytes(graph, (("data", 1),), load_profile(hardware), one, [[whole] * 3] * len(one.reads))
    assert int(size[0]) in (0, ROWS * hidden * 2)
    return bool(size[0])


@pytest.mark.parametrize(
    ("hardware", "width", "hidden", "residual", "compiled"),
    [
        ("tpu-v5p", 256, 256, True, 27),
        ("tpu-v5p", 256, 256, False, 21),
        ("tpu-v5p", 64, 256, True, 15),
        ("tpu-v5p", 64, 256, False, 13),
        ("tpu-v5p", 512, 256, True, 43),
        ("tpu-v5p", 512, 256, False, 31),
        ("tpu-v5e", 64, 256, True, 43),
        ("tpu-v5e", 256, 256, True, 79),
        ("tpu-v6e", 64, 256, True, 22),
    ],
)
def test_from_how_many_operations_on(hardware: str, width: int, hidden: int, residual: bool, compiled: int) -> None:
    """XLA writes chains of `compiled` operations, and none of one less; here one more may be wanted."""
    assert not written(hardware, chain(compiled - 1), width, hidden, residual=residual)
    assert written(hardware, chain(compiled + 1), width, hidden, residual=residual)


@pytest.mark.parametrize(
    ("function", "work"),
    [
        (lambda x: x * x, 1.0),
        (jnp.tanh, 1.0),
        (lambda x: 1.0 / (x + 1.5), 11.0),
        (jax.nn.silu, 14.0),
        (lambda x: x**3, 2.0),
        (lambda x: x / jnp.sum(jnp.abs(x), axis=0), 1.0),
    ],
)
def test_operations_of_an_element(function: Function, work: float) -> None:
    scaled = lambda x: function(x.astype(F32) * jnp.arange(1.0, 65.0)).astype(BF16)  # noqa: E731
    _, found = shared(scaled, 32, 64)
    (again,) = {one.again.work for one in found if one.again is not None}
    assert again == work + 3  # a product with what is no number, and two conversions


def test_of_what_is_not_known_nothing_is_said() -> None:
    assert not shared(lambda x: jnp.sin(x.astype(F32)).astype(BF16), 32, 64)[1]


@pytest.mark.parametrize(
    ("hardware", "function", "there"),
    [
        ("tpu-v5p", jax.nn.silu, True),
        ("tpu-v5p", jax.nn.gelu, False),
        ("tpu-v5p", jax.nn.relu, False),
        ("tpu-v5e", jax.nn.silu, False),
        ("tpu-v6e", jax.nn.silu, False),
    ],
)
def test_functions_of_what_is_normalised(hardware: str, function: Function, there: bool) -> None:
    assert written(hardware, normalised(function), 64, 256) == there


@pytest.mark.aot_tpu
@pytest.mark.parametrize("function", [jax.nn.silu, jax.nn.gelu])
def test_the_compiled_step_takes_as_much(function: Function) -> None:
    target = jaxplan.target("tpu-v5p:2x2x2")
    mesh = target.mesh(data=8)
    step = jaxplan.auto_shard(step_of(normalised(function)), mesh, donate_argnums=0, options={"search": "data"})
    layers = [(of(1, 1, 64, 256), of(1, 1, 256, 64))] * LAYERS
    x = of(1024, 32, 32, 64, dtype=BF16)
    planned = step.plan(layers, x).cost.peak_bytes
    compiled = compiled_memory(compile_for(step.lower(layers, x), mesh)).peak_bytes
    assert planned == pytest.approx(compiled, rel=0.02)
