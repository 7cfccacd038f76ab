"""Steps of jax's less common corners: planned, sharded and run, they equal their unsharded run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxplan
from jaxplan.api import meshes

from .odd import PROGRAMS
from .prices import RandomPrices

QUICK = ("containers", "int4 and fp8", "loops", "choices")


def check(name: str, mesh: Mesh) -> None:
    fn, args = PROGRAMS[name]
    step = jaxplan.auto_shard(fn, mesh, hardware="tpu-v5e", options={"compare_templates": False})
    wanted, found = jax.jit(fn)(*args), step(*args)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, a), b in zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(found), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        where = jax.tree_util.keystr(path)
        if jnp.issubdtype(a.dtype, jnp.inexact):
            kind = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
            mine, theirs = np.asarray(b).astype(kind), np.asarray(a).astype(kind)
            scale = np.abs(theirs, where=np.isfinite(theirs), out=np.zeros(theirs.shape)).max(initial=1e-6)
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-5 * scale, err_msg=where)
        else:
            np.testing.assert_array_equal(np.asarray(b), np.asarray(a), err_msg=where)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in PROGRAMS]
)
def test_planned_freely_it_equals_the_unsharded_run(name: str, mesh_4x2: Mesh) -> None:
    check(name, mesh_4x2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", PROGRAMS)
def test_planned_under_random_prices_too(
    name: str, seed: int, mesh_4x2: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RandomPrices, "seed", seed)
    monkeypatch.setattr(meshes, "CostModel", RandomPrices)
    check(name, mesh_4x2)
