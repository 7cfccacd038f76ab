"""A batch too small for the mesh: the rows of its images are cut, and devices exchange their edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxplan


def step(kernels: Any, images: jax.Array, wanted: jax.Array) -> Any:
    """Convolutions, one of stride 2, and an average pool."""

    def loss(kernels: Any) -> jax.Array:
        x = images
        for kernel, stride in zip(kernels, (1, 2, 1), strict=True):
            x = jax.nn.relu(
                lax.conv_general_dilated(
                    x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            )
        x = lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        return jnp.mean((x - wanted) ** 2)

    value, gradients = jax.value_and_grad(loss)(kernels)
    return jax.tree.map(lambda k, g: k - 0.1 * g, kernels, gradients), value


@pytest.mark.parametrize("count", [1, 2])
def test_rows_of_few_images_are_cut_and_the_step_equals_the_unsharded_one(count: int, mesh_4x2: Mesh) -> None:
    random = np.random.default_rng(0)
    kernels = [random.normal(size=(3, 3, n, 32)).astype(np.float32) / 17 for n in (4, 32, 32)]
    images = random.normal(size=(count, 256, 256, 4)).astype(np.float32)
    args = (kernels, images, np.zeros((count, 64, 64, 32), np.float32))
    planned = jaxplan.auto_shard(step, mesh_4x2, hardware="tpu-v5e", options={"compare_templates": False})
    plan = planned.plan(*args)
    (layout,) = (t.layout for t in plan.inputs if t.path == "images")
    assert layout.dims[1] and layout.shards(plan.axes) == 8
    assert sum(c.kind == "collective_permute" for c in plan.collectives) >= 5
    for ours, theirs in zip(
        jax.tree.leaves(planned(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def rolled(x: jax.Array) -> jax.Array:
    y = jnp.cos(x)
    return jnp.sin(jnp.roll(y, 1, 0) + jnp.roll(y, (3, -1), (0, 1))) * jnp.roll(y, -2, 1) + jnp.roll(y, 0, 1)


@pytest.mark.parametrize(
    "cut", [P("data"), P(("data", "model")), P(("model", "data")), P(None, ("model", "data"))]
)
def test_rolls_send_edges_and_nothing_else(cut: P, mesh_4x2: Mesh) -> None:
    """Whatever the order of the axes; a roll after another one too, which XLA exchanges by all_to_alls of pieces."""
    x = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    planned = jaxplan.auto_shard(
        rolled, mesh_4x2, constraints={"*": cut}, hardware="tpu-v5e", options={"compare_templates": False}
    )
    np.testing.assert_array_equal(planned(x), jax.jit(rolled)(x))
    plan = planned.plan(x)
    assert {item.kind for item in plan.collectives} == {"collective_permute"} and not plan.warnings
    assert max(item.bytes for item in plan.collectives) * 2 < x.nbytes // 4
    assert plan.cost.step_s == pytest.approx(plan.cost.objective_s, rel=2e-3)  # what is exchanged counts once
    assert {finding.what for finding in jaxplan.verify(planned, x).findings} <= {"memory"}


def stencil(x: jax.Array) -> jax.Array:
    """A step of diffusion on a field that is padded once for all four neighbours, and one around its corners."""
    wide = jnp.pad(x, 1)
    sides = wide[2:, 1:-1] + wide[:-2, 1:-1] + wide[1:-1, 2:] + wide[1:-1, :-2]
    return wide[1:-1, 1:-1] + 0.1 * (sides - 4 * x)


def taps(x: jax.Array) -> jax.Array:
    """A causal convolution as a sum of slices, and its gradient."""

    def loss(x: jax.Array) -> jax.Array:
        wide = jnp.pad(jnp.sin(x), ((3, 0), (0, 0)))
        return jnp.sum(sum((j + 1.0) * wide[j : j + len(x)] for j in range(4)) ** 2)

    return jax.grad(loss)(x)


def inside(x: jax.Array) -> jax.Array:
    """Diffusion of a field's inside, set in place, 2046 rows of 2048; then differences, one-sided at the ends."""
    sides = x[2:, 1:-1] + x[:-2, 1:-1] + x[1:-1, 2:] + x[1:-1, :-2]
    u = x.at[1:-1, 1:-1].add(0.1 * (sides - 4 * x[1:-1, 1:-1]))
    return jnp.concatenate([u[:, 1:2] - u[:, :1], (u[:, 2:] - u[:, :-2]) / 2, u[:, -1:] - u[:, -2:-1]], 1)


def reflecting(x: jax.Array) -> jax.Array:
    """A step of diffusion over whose edges nothing flows one way, and which go round the other way."""
    wide = jnp.pad(jnp.pad(x, ((1, 1), (0, 0)), mode="edge"), ((0, 0), (1, 1)), mode="wrap")
    return x + 0.1 * (wide[2:, 1:-1] + wide[:-2, 1:-1] + wide[1:-1, 2:] + wide[1:-1, :-2] - 4 * x)


@pytest.mark.parametrize("program", [stencil, taps, inside, reflecting])
@pytest.mark.parametrize("cut", [P(("model", "data")), P("data", "model"), P(None, "model")])
def test_neighbours_in_a_field_send_edges_and_nothing_else(
    program: Callable[[jax.Array], jax.Array], cut: P, mesh_4x2: Mesh
) -> None:
    x = np.random.default_rng(0).standard_normal((2048, 1024)).astype(np.float32)
    planned = jaxplan.auto_shard(
        program, mesh_4x2, constraints={"*": cut}, hardware="tpu-v5e", options={"compare_templates": False}
    )
    np.testing.assert_allclose(planned(x), jax.jit(program)(x), rtol=1e-5, atol=1e-4)
    plan = planned.plan(x)
    assert {item.kind for item in plan.collectives} <= {"collective_permute"} and not plan.warnings
    assert max((item.bytes for item in plan.collectives), default=0) <= 3 * 4 * 2048


def shifted(x: jax.Array) -> jax.Array:
    """Neighbours' differences, written in several ways, and a loss' gradient through them."""

    def loss(x: jax.Array) -> jax.Array:
        before = jnp.pad(x, ((1, 0), (0, 0)))[:-1]
        blocks = x.reshape(8, 128, 512)
        last = jnp.concatenate([jnp.ones_like(blocks[:1]), blocks[:-1]], 0).reshape(x.shape)
        after = jnp.pad(x[2:], ((0, 2), (0, 0)), constant_values=-1.0)
        return jnp.sum(jnp.sin(x) * before + jnp.cos(last) * after)

    return jax.grad(loss)(x)


@pytest.mark.parametrize("cut", [P(("data", "model")), P(("model", "data")), P(None, ("model", "data"))])
def test_shifts_send_edges_and_nothing_else(cut: P, mesh_4x2: Mesh) -> None:
    """A token's left neighbour, the block before this one: dimensions whose slices no device count divides."""
    x = np.random.default_rng(0).standard_normal((1024, 512)).astype(np.float32)
    planned = jaxplan.auto_shard(
        shifted, mesh_4x2, constraints={"*": cut}, hardware="tpu-v5e", options={"compare_templates": False}
    )
    np.testing.assert_allclose(planned(x), jax.jit(shifted)(x), rtol=1e-6, atol=1e-6)
    plan = planned.plan(x)
    assert {item.kind for item in plan.collectives} == ({"collective_permute"} if cut[0] else set())
    assert not plan.warnings and all(item.where.startswith("test_halos.py") for item in plan.collectives)
    assert {finding.what for finding in jaxplan.verify(planned, x).findings} <= {"memory"}


def test_a_long_sequence_that_looks_at_neighbours_is_cut_along_itself() -> None:
    """One sequence: attention to the block before and to its own; no device has more than its piece and an edge."""
    rows, block, width = 2**16, 256, 512

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(w: jax.Array) -> jax.Array:
            blocks = (x @ w).reshape(rows // block, block, width)
            before = jnp.concatenate([jnp.zeros_like(blocks[:1]), blocks[:-1]], 0)
            keys = jnp.concatenate([before, blocks], 1)
            weights = jax.nn.softmax(jnp.einsum("nqd,nkd->nqk", blocks, keys))
            seen = jnp.einsum("nqk,nkd->nqd", weights, keys).reshape(x.shape)
            left = jnp.pad(seen, ((1, 0), (0, 0)))[:-1]
            return jnp.mean((seen + left - x) ** 2)

        value, grad = jax.value_and_grad(loss)(w)
        return w - grad, value

    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    shapes = (
        jax.ShapeDtypeStruct((width, width), jnp.float32),
        jax.ShapeDtypeStruct((rows, width), jnp.float32),
    )
    plan = jaxplan.plan(step, mesh, *shapes, donate_argnums=0, hardware="tpu-v5e")
    assert plan.specs["x"] == P(("data", "model"))
    assert "collective_permute" in {item.kind for item in plan.collectives}
    assert max(item.bytes for item in plan.collectives) <= width * width * 4  # a gradient, or a block


def test_a_roll_that_no_axis_should_cut_stays_whole(mesh_4x2: Mesh) -> None:
    """Edges of more than a piece would come from several devices."""
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    pinned = {"*": P("data")}
    planned = jaxplan.auto_shard(
        lambda x: jnp.roll(x, 3, 0), mesh_4x2, constraints=pinned, hardware="tpu-v5e"
    )
    np.testing.assert_array_equal(planned(x), np.roll(x, 3, 0))


@pytest.mark.parametrize("moved", [(1, -1, 0), (-2, 2, 0)])
def test_what_is_padded_whole_and_cut_afterwards(moved: tuple[int, int, int], mesh_4x2: Mesh) -> None:
    """Left alone, XLA's partitioner pads the pieces, and gets other numbers."""

    def step(x: jax.Array) -> jax.Array:
        return lax.pad(x, np.float32(0), [moved, (0, 0, 0)])

    x = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
    pinned = {"x": P(), "result": P("data")}
    planned = jaxplan.auto_shard(step, mesh_4x2, constraints=pinned, hardware="tpu-v5e")
    np.testing.assert_array_equal(planned(x), step(x))
