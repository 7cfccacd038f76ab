"""However a step is called, from its second call on nothing is planned, traced or compiled again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxplan
from jaxplan.api import autoshard, variant


def scaled(x: jax.Array, y: jax.Array, times: int = 2) -> jax.Array:
    return x @ y * times


@pytest.mark.parametrize("way", ["positions", "keywords", "keywords in another order", "static", "explicit"])
def test_the_second_call_traces_nothing(way: str, mesh_4x2: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    apply, trace = variant.Variant.apply, autoshard.trace
    monkeypatch.setattr(
        variant.Variant,
        "apply",
        lambda self, *args, **kwargs: (traced.append(args), apply(self, *args, **kwargs))[1],
    )
    monkeypatch.setattr(
        autoshard, "trace", lambda *args, **kwargs: (traced.append(args), trace(*args, **kwargs))[1]
    )
    x, y = jnp.ones((8, 16)), jnp.ones((16, 8))
    step = jaxplan.auto_shard(scaled, mesh_4x2, static_argnames="times")
    if way == "explicit":
        explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
        x = jax.device_put(x, NamedSharding(explicit, PartitionSpec("data")))
    calls = {
        "positions": lambda n: step(x, y),
        "keywords": lambda n: step(x, y=y),
        "keywords in another order": lambda n: step(**({"x": x, "y": y} if n % 2 else {"y": y, "x": x})),
        "static": lambda n: step(x, y, times=3),
        "explicit": lambda n: step(x, y),
    }
    call = calls[way]
    results = [call(0)]
    before = len(traced)
    assert before >= 2  # ours, and jax.jit's of the planned step: the count counts
    results += [call(n) for n in (1, 2)]
    assert len(traced) == before
    expected = 16.0 * (3 if way == "static" else 2)
    assert all((result == expected).all() for result in results)
