"""Pins written into an imported module are what lowering the step with them writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxplan.sharding import Layout, imported_copy, partition_imported, with_pins

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
ROWS = NamedSharding(MESH, P("data"))
NUMBERED = re.compile(r"jaxplan(\d+)")


def number_of(scope: str) -> int:
    found = NUMBERED.search(scope)
    return int(found.group(1)) if found else -1


def around(scope: str) -> str:
    return scope.partition("jaxplan")[0]


Pin = Callable[[jax.Array], jax.Array]


def chain(x: jax.Array, pin: Pin) -> Any:
    """A product, what is made of it, and a row sum; the product is read twice."""
    with jax.named_scope("jaxplan0"):
        y = x @ x
    y = pin(y)
    with jax.named_scope("jaxplan1"):
        z = jnp.tanh(y)
    with jax.named_scope("jaxplan2"):
        return z + y, y.sum(axis=0)


def widened(x: jax.Array, pin: Pin) -> Any:
    """An equation of several StableHLO operations, the last of which is its result."""
    with jax.named_scope("jaxplan0"):
        y = jax.lax.logistic(x) @ x.T
    return jnp.exp(pin(y))


def looped(x: jax.Array, pin: Pin) -> Any:
    with jax.named_scope("jaxplan0"):
        y = x @ x
    y = pin(y)
    return jax.lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c @ y), x)


def of_two(x: jax.Array, pin: Pin) -> Any:
    """The last operation of its shape makes two values: which of them is meant can't be read off."""
    with jax.named_scope("jaxplan0"):
        y, order = jax.lax.sort((x, x), num_keys=1)
    return pin(y) + order


def split(x: jax.Array, pin: Pin) -> Any:
    """An equation of two results, each of them made by an operation of its own."""
    with jax.named_scope("jaxplan0"):
        y, z = jax.lax.split(x, (32, 32), axis=1)
    return jnp.tanh(pin(y)) + z, jnp.exp(z)


def local(x: jax.Array, pin: Pin) -> Any:
    """A `shard_map`, whose operations have shapes of their own, and a product beside it."""
    with jax.named_scope("jaxplan0"):
        y = x @ x
    y = pin(y)
    with jax.named_scope("jaxplan1"):
        z = jax.shard_map(jnp.tanh, mesh=MESH, in_specs=P("data", "model"), out_specs=P("data", "model"))(x)
    return y + z


def imported(step: Callable[..., Any], pin: Pin) -> Any:
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    lowered = jax.jit(lambda x: step(x, pin), in_shardings=ROWS).trace(x).lower(lowering_platforms=("cpu",))
    return imported_copy(lowered.compiler_ir("stablehlo"))


@pytest.mark.parametrize("step", [chain, widened, local])
@pytest.mark.parametrize("spec", [P(None, None), P(None, "data"), P(("model", "data"), None)])
def test_written_pins_are_those_of_a_lowering_with_them(step: Callable[..., Any], spec: P) -> None:
    before = imported(step, lambda y: y)
    layout = Layout(dims=tuple(() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in spec))
    written = with_pins(before, {0: (((64, 64), layout),)}, number_of, around)
    lowered = imported(step, lambda y: jax.lax.with_sharding_constraint(y, NamedSharding(MESH, spec)))
    assert partition_imported(written) == partition_imported(lowered)
    # the module that was pinned is a copy
    assert partition_imported(before) == partition_imported(imported(step, lambda y: y)) != partition_imported(lowered)


@pytest.mark.parametrize(("step", "pinned"), [(looped, 0), (of_two, 0), (chain, 7), (local, 1)])
def test_what_can_not_be_written_is_not(step: Callable[..., Any], pinned: int) -> None:
    layout = Layout(dims=((), ("data",)))
    pins = [((64, 64), layout)] * (2 if step is of_two else 1)
    assert with_pins(imported(step, lambda y: y), {pinned: pins}, number_of, around) is None


@pytest.mark.parametrize("spec", [P(None, None), P(None, "data"), P(("model", "data"), None)])
def test_one_of_several_results_is_pinned(spec: P) -> None:
    layout = Layout(dims=tuple(() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in spec))
    pins = {0: (((64, 32), layout), ((64, 32), None))}
    written = with_pins(imported(split, lambda y: y), pins, number_of, around)
    lowered = imported(split, lambda y: jax.lax.with_sharding_constraint(y, NamedSharding(MESH, spec)))
    assert written is not None and partition_imported(written) == partition_imported(lowered)
