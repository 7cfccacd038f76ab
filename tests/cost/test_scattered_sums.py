"""By how much XLA for TPU rounds up the pieces of a scattered sum, beside what it was seen to, and asked to."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan.cost import CostModel, excess_bytes, excess_seconds, excess_wire_bytes, scattering_seconds
from jaxplan.hardware import axis_links, load_profile
from jaxplan.inspection import verify
from jaxplan.ir import Value
from jaxplan.lowering import compiled_collectives
from jaxplan.sharding import NONE, UNREDUCED, MeshAxes

SEEN: dict[tuple[str, MeshAxes, tuple[str, ...], str, tuple[int, int]], int] = {
    # profile, mesh, summed over, dtype, shape: by how many rows a piece is longer
    ("tpu-v5e", (("data", 4), ("model", 2)), ("data", "model"), "bfloat16", (5632, 2048)): 720 - 704,
    ("tpu-v5e", (("data", 4), ("model", 2)), ("data", "model"), "bfloat16", (2048, 5632)): 288 - 256,
    ("tpu-v5e", (("data", 4), ("model", 2)), ("data", "model"), "bfloat16", (4096, 2048)): 0,
    ("tpu-v5e", (("data", 4), ("model", 2)), ("data", "model"), "bfloat16", (16256, 1408)): 2080 - 2032,
    ("tpu-v5e", (("data", 4), ("model", 2)), ("data", "model"), "float32", (13952, 6400)): 1776 - 1744,
    ("tpu-v5e", (("data", 4), ("model", 2)), ("data",), "bfloat16", (11136, 1408)): 2880 - 2784,
    ("tpu-v5e", (("data", 4), ("model", 2)), ("data",), "bfloat16", (352, 5632)): 96 - 88,
    ("tpu-v5e", (("data", 4), ("model", 2)), ("data", "model"), "float32", (8320, 1600)): 1056 - 1040,
    ("tpu-v5e", (("data", 4), ("model", 2)), ("model",), "float32", (5984, 6144)): 3072 - 2992,
    ("tpu-v5e", (("data", 4), ("model", 2)), ("model",), "bfloat16", (592, 10000)): 336 - 296,
    ("tpu-v5e", (("data", 8), ("model", 4)), ("data", "model"), "float32", (35584, 1024)): 1152 - 1112,
    ("tpu-v6e", (("data", 4), ("model", 4)), ("data", "model"), "bfloat16", (5632, 2048)): 0,  # made whole
    ("tpu-v6e", (("data", 8), ("model", 2)), ("data",), "bfloat16", (2048, 5632)): 264 - 256,
    ("tpu-v5p", (("data", 4), ("model", 2)), ("data",), "bfloat16", (3712, 4096)): 1008 - 928,  # 2 x 2 chips
    ("tpu-v5p", (("data", 4), ("model", 2)), ("data",), "bfloat16", (5088, 2816)): 1280 - 1272,
}  # fmt: skip


def model_of(profile: str, axes: MeshAxes) -> CostModel:
    links = axis_links(load_profile(profile), axes)
    return CostModel(profile=load_profile(profile), axes=axes, links=tuple(links[name] for name, _ in axes))


def tensor_of(shape: tuple[int, ...], dtype: str) -> Value:
    item_bytes = 2 if dtype == "bfloat16" else 4
    return Value(index=0, name="sum", shape=shape, dtype=dtype, item_bytes=item_bytes)


def rows_longer(model: CostModel, shape: tuple[int, int], dtype: str, names: tuple[str, ...], dim: int = 0) -> float:
    places = np.array([dim if name in names else NONE for name, _ in model.axes], np.int8)
    found = excess_bytes(model, tensor_of(shape, dtype), places, model.axes, names)
    return found / (shape[1] * (2 if dtype == "bfloat16" else 4))


@pytest.mark.parametrize("case", SEEN, ids=str)
def test_pieces_are_rounded_up_to_windows(
    case: tuple[str, MeshAxes, tuple[str, ...], str, tuple[int, int]],
) -> None:
    profile, axes, names, dtype, shape = case
    assert rows_longer(model_of(profile, axes), shape, dtype, names) == SEEN[case]


def test_what_lies_in_lanes_and_what_is_no_matrix_is_not_rounded() -> None:
    model = model_of("tpu-v5e", (("data", 4), ("model", 2)))
    assert rows_longer(model, (5824, 6144), "float32", ("data", "model"), dim=1) == 0
    stack = tensor_of((4, 5632, 2048), "bfloat16")
    assert excess_bytes(model, stack, np.array([1, 1], np.int8), model.axes, ("data", "model")) == 0
    gpu = model_of("h100", (("data", 4), ("model", 2)))
    assert excess_bytes(gpu, tensor_of((5632, 2048), "bfloat16"), np.zeros(2, np.int8), gpu.axes, ("data",)) == 0


def test_the_search_prices_the_excess_where_a_sum_is_scattered_in_rows() -> None:
    model = model_of("tpu-v5e", (("data", 4), ("model", 2)))
    tail = np.array([[UNREDUCED, UNREDUCED], [UNREDUCED, NONE]], np.int8)
    head = np.array([[0, 0], [NONE, NONE], [0, NONE], [1, 1]], np.int8)
    more = scattering_seconds(model, tail, head, tensor_of((5632, 2048), "bfloat16"))
    both = excess_seconds(model, 16 * 2048 * 2, ("data", "model"))
    assert more[0, 0] == pytest.approx(float(both)) and both > 0
    assert more[0, 1] == more[0, 3] == more[1, 1] == 0  # not scattered, and scattered in lanes
    assert more[1, 2] == more[0, 2] > 0  # what else is summed is priced elsewhere
    assert excess_wire_bytes(16 * 2048 * 2, 8) == 2 * 7 * 16 * 2048 * 2


@pytest.mark.aot_tpu
@pytest.mark.parametrize("kib", [16384, 20480, 32768])
def test_windows_fill_the_scoped_vector_memory(kib: int) -> None:
    """Whatever there is of it: an option of the compiler's."""
    axes: MeshAxes = (("data", 4), ("model", 2))
    mesh = jaxplan.target("tpu-v5e:2x4").mesh(data=4, model=2)
    model = model_of("tpu-v5e", axes)
    model = replace(model, profile=replace(model.profile, scoped_bytes=kib * 1024))
    every = NamedSharding(mesh, P(("data", "model")))
    longer = []
    for shape in ((2048, 5632), (5632, 2048), (4096, 11008), (8192, 4096)):
        parts = jax.ShapeDtypeStruct((8, *shape), jnp.bfloat16)
        step = jax.jit(lambda x: jnp.tanh(x).sum(0), in_shardings=every, out_shardings=every).lower(parts)
        text = step.compile(compiler_options={"xla_tpu_scoped_vmem_limit_kib": str(kib)}).as_text()
        moved = sum(c.bytes for c in compiled_collectives(text, axes) if c.kind == "collective_permute")
        longer.append(rows_longer(model, shape, "bfloat16", ("data", "model")))
        assert moved == 7 * longer[-1] * shape[1] * 2, shape
    assert any(longer)


@pytest.mark.aot_tpu
def test_a_plan_knows_what_rounded_pieces_send() -> None:
    """Weights' gradients of [2048, 5632], whose pieces of 256 rows are rounded up to 288."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.square(jnp.tanh(x @ w)).astype(jnp.float32)))(w)

    mesh: Mesh = jaxplan.target("tpu-v5e:2x4").mesh(data=4, model=2)
    shapes = (jax.ShapeDtypeStruct((2048, 5632), jnp.bfloat16), jax.ShapeDtypeStruct((65536, 2048), jnp.bfloat16))
    wanted = {"w": P(("data", "model")), "x": P(("data", "model")), "result": P(("data", "model"))}
    sharded = jaxplan.auto_shard(step, mesh, donate_argnums=0, hardware="tpu-v5e", constraints=wanted)
    plan = sharded.plan(*shapes)
    (summed,) = [c for c in plan.collectives if c.kind == "reduce_scatter"]
    exact = summed.bytes * 7 / 8
    assert summed.wire_bytes == exact + 2 * 7 * 32 * 5632 * summed.bytes / math.prod(shapes[0].shape)
    compiled = sharded.lower(*shapes).compile()
    found = verify(compiled, plan=plan)
    assert found.ok and not [f for f in found.findings if f.what == "collective"], found
    sent = [q for q in found.quantities if q.name.startswith("sent over data+model")]
    assert len(sent) >= 3 and all(q.compiled == pytest.approx(q.planned, rel=0.01) for q in sent), sent
