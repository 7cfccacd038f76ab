"""What is put together and normalised in groups of channels: what XLA for TPU writes of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxplan
from jaxplan.cost import traffic
from jaxplan.cost.grouped_concats import written_in_groups
from jaxplan.ir import trace
from jaxplan.lowering import compiled_memory
from jaxplan.sharding import NONE, graph_rules

BF16, F32 = jnp.bfloat16, jnp.float32


class Decoder(NamedTuple):
    """The parts' channels, groups, pixels a side, images a device; whether trained; the type of the parts."""

    parts: tuple[int, ...] = (256, 256)
    groups: int = 32
    pixels: int = 64
    images: int = 8
    trained: bool = True
    dtype: Any = BF16
    layers: int = 1


def normalised(x: jax.Array, groups: int) -> jax.Array:
    y = x.astype(F32).reshape(*x.shape[:-1], groups, -1)
    mean, variance = y.mean((1, 2, 4), keepdims=True), y.var((1, 2, 4), keepdims=True)
    return ((y - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape).astype(x.dtype)


def conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def step_of(case: Decoder) -> Any:
    def network(weights: Any, x: jax.Array) -> jax.Array:
        for layer in weights:
            both = jnp.concatenate([conv(x, kernel) for kernel in layer["parts"]], -1)
            x = conv(jax.nn.silu(normalised(both, case.groups)), layer["out"]) + conv(both, layer["past"])
        return x

    def step(weights: Any, x: jax.Array) -> Any:
        if not case.trained:
            return weights, network(weights, x)
        gradient = jax.grad(lambda weights: jnp.mean(network(weights, x).astype(F32) ** 2))(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), x[0, 0, 0, 0]

    return step


def arguments(case: Decoder, devices: int = 1) -> Any:
    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, case.dtype)

    channels = sum(case.parts)
    weights = {
        "parts": [of(3, 3, 128, part) for part in case.parts],
        "out": of(3, 3, channels, 128),
        "past": of(1, 1, channels, 128),
    }
    return [weights] * case.layers, of(devices * case.images, case.pixels, case.pixels, 128)


def written(case: Decoder) -> list[int]:
    """Bytes of what is written, as it is found on one device."""
    traced = trace(step_of(case), arguments(case), {})
    crossing = traffic(traced.graph, graph_rules(traced.graph), "tpu")
    values = {v: np.array([NONE]) for v in range(len(traced.graph.values))}
    found = written_in_groups(
        traced.graph, (("data", 1),), crossing.grouped, crossing.times, crossing.lives.needed, values
    )
    return [one.size for one in found]


def test_groups_of_many_pixels_lie_in_tiles_of_pixels() -> None:
    whole = 8 * 64 * 64 * 512
    wider = 128 // 64  # of 64 pixels in 128 lanes
    assert written(Decoder()) == [4 * wider * whole, 4 * whole, 2 * wider * whole]
    assert written(Decoder(trained=False)) == [4 * wider * whole, 2 * wider * whole, 2 * wider * whole]


def test_groups_of_many_channels_lie_in_tiles_of_channels() -> None:
    case = Decoder((512, 512), pixels=32)
    whole, wider = 8 * 32 * 32 * 1024, 128 // 32  # channels of a group
    assert written(case) == [4 * wider * whole, 4 * whole, 2 * wider * whole]
    assert written(case._replace(trained=False)) == [4 * wider * whole]


@pytest.mark.parametrize(
    "case",
    [Decoder((256, 128)), Decoder((384, 128)), Decoder((192, 192), groups=24 - 8), Decoder(dtype=F32), Decoder((512,))],
    ids=str,
)
def test_nothing_is_written_of_others(case: Decoder) -> None:
    straddled = case.parts[0] % (sum(case.parts) // case.groups) != 0
    alike = len({*case.parts}) == 1 and len(case.parts) > 1 and case.dtype == BF16
    assert bool(written(case)) == (alike and not straddled)


@pytest.mark.aot_broad
@pytest.mark.parametrize("trained", [True, False])
def test_as_much_is_compiled(trained: bool) -> None:
    case = Decoder(pixels=128, trained=trained, layers=3)
    mesh = jaxplan.target("tpu-v5e:2x4").mesh(data=8)
    options = {"search": "data", "compare_templates": False}
    step = jaxplan.auto_shard(step_of(case), mesh, hardware="tpu-v5e", options=options)
    compiled = compiled_memory(step.lower(*arguments(case, 8)).compile()).peak_bytes
    planned = step.plan(*arguments(case, 8)).cost.peak_bytes
    assert planned == pytest.approx(compiled, rel=0.12)
    assert compiled > 4 * case.images * 128 * 128 * 512  # the f32 numbers alone
