"""What XLA fuses: einsums that are no products of matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import jaxplan

LONG, SHORT = (64, 16, 256, 256), (64, 256, 16, 256)
"""Long enough that bytes decide, and not how many kernels start."""
Fn = Callable[..., Any]

MULTIPLIED: dict[str, tuple[Fn, Fn, tuple[int, ...], tuple[int, ...]]] = {
    "element by element": (
        lambda x, y: jnp.einsum("bcij,bjci->bcij", x, y),
        lambda x, y: x * y.transpose(0, 2, 3, 1),
        LONG,
        SHORT,
    ),
    "outer": (
        lambda x, y: jnp.einsum("bi,bj->bij", x, y),
        lambda x, y: x[:, :, None] * y[:, None],
        (256, 512),
        (256, 512),
    ),
    "summed over one": (
        lambda x, y: jnp.einsum("bio,boj->bij", x, y),
        lambda x, y: x * y,
        (256, 512, 1),
        (256, 1, 512),
    ),
    "summed": (
        lambda x, y: jnp.einsum("bij,bij->b", x, y),
        lambda x, y: (x * y).sum((1, 2)),
        (256, 512, 512),
        (256, 512, 512),
    ),
}


@pytest.mark.parametrize("name", MULTIPLIED)
@pytest.mark.parametrize("hardware", ["tpu-v5e", "h100"])
def test_an_einsum_without_a_matrix_product_costs_what_multiplying_costs(name: str, hardware: str) -> None:
    *written, left, right = MULTIPLIED[name]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (left, right)]
    mesh = AbstractMesh((8,), ("data",))
    einsum, product = (jaxplan.plan(fn, mesh, *shapes, hardware=hardware).cost.compute_s for fn in written)
    assert einsum == pytest.approx(product, rel=0.15)  # one operation starts less than two


@pytest.mark.aot_tpu
@pytest.mark.parametrize("name", MULTIPLIED)
def test_xla_for_tpu_multiplies_too(name: str, tpu_topology: Callable[[str], Any]) -> None:
    einsum, _, left, right = MULTIPLIED[name]
    mesh = Mesh(np.array(tpu_topology("v5e:2x4").devices), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=whole) for shape in (left, right)]
    assert " convolution(" not in jax.jit(einsum).lower(*shapes).compile().as_text()
