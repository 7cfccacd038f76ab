"""What Fourier transforms take beside their operand and result on TPU."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxplan
from jaxplan.cost.transforms import transform_scratch
from jaxplan.hardware import load_profile
from jaxplan.ir import Graph, trace
from jaxplan.lowering import compiled_memory

DEVICES = 8
ALL_REAL = ("rfft", (16, 1024, 4096), "float32")
TRANSFORMS = [ALL_REAL, ("fft", (16, 1024, 2048), "complex64")]


def traced(name: str, shape: tuple[int, ...], dtype: str) -> Graph:
    return trace(getattr(jnp.fft, name), (jax.ShapeDtypeStruct(shape, dtype),), {}).graph


def scratch(graph: Graph, target: str, devices: int = 1) -> dict[int, int]:
    rows = np.full(len(graph.values[graph.inputs[0]].shape), -1, np.int8)
    rows[0] = 0 if devices > 1 else -1
    reads = {(op.index, 0): rows for op in graph.ops}
    return transform_scratch(graph, (("data", devices),), reads, load_profile(target))


def test_four_arrays_of_all_points_but_for_those_on_the_chip() -> None:
    graph = traced(*ALL_REAL)
    array = 4 * math.prod(ALL_REAL[1])
    assert list(scratch(graph, "tpu-v5e").values()) == [4 * array]
    assert list(scratch(graph, "tpu-v5e", 4).values()) == [3 * array // 4]
    assert list(scratch(graph, "tpu-v5e", 16).values()) == [array // 16]
    assert not scratch(graph, "h100")


@pytest.mark.aot_tpu
@pytest.mark.parametrize(("name", "shape", "dtype"), TRANSFORMS, ids=[name for name, *_ in TRANSFORMS])
def test_as_much_is_compiled(name: str, shape: tuple[int, ...], dtype: str) -> None:
    mesh = jaxplan.target("tpu-v5e:2x4").mesh(data=DEVICES)
    cut: Any = NamedSharding(mesh, PartitionSpec("data"))
    argument = jax.ShapeDtypeStruct((DEVICES * shape[0], *shape[1:]), dtype, sharding=cut)
    compiled = jax.jit(getattr(jnp.fft, name), out_shardings=cut).lower(argument).compile()
    (planned,) = scratch(traced(name, shape, dtype), "tpu-v5e").values()
    assert 0.95 < planned / compiled_memory(compiled).temp_bytes < 1.4
