"""Primitives that nobody gave a rule: what passes through is proved by the partitioner, and only that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan.ir import trace
from jaxplan.sharding import graph_rules

X = np.random.default_rng(0).normal(size=(8, 4, 6)).astype(np.float32)


def primitive(name: str, fn: Callable[..., Any], *, several: bool = False) -> Callable[..., Any]:
    """`fn` as a primitive that nobody knows, lowered to what jax makes of `fn`."""
    made = Primitive(f"unknown_{name}")
    made.multiple_results = several
    made.def_impl(fn)

    def shapes(*avals: Any) -> Any:
        found = jax.eval_shape(fn, *avals)
        return (
            [avals[0].update(shape=f.shape, dtype=f.dtype) for f in found]
            if several
            else avals[0].update(shape=found.shape, dtype=found.dtype)
        )

    made.def_abstract_eval(shapes)
    mlir.register_lowering(made, mlir.lower_fun(fn, multiple_results=several))
    return made.bind


PROVED: dict[str, tuple[Callable[..., Any], set[int]]] = {
    "identity": (primitive("identity", lambda x: x), {0, 1, 2}),
    "elementwise": (primitive("elementwise", lambda x: jnp.where(x > 0, jnp.sin(x), x * 2)), {0, 1, 2}),
    "softmax": (primitive("softmax", lambda x: jax.nn.softmax(x, -1)), {0, 1}),
    "product within": (primitive("product", lambda x: jnp.einsum("abc,abd->abd", x, x)), {0, 1}),
    "cumulative": (primitive("cumulative", lambda x: jnp.cumsum(x, 1)), set()),
    "shift": (primitive("shift", lambda x: jnp.roll(x, 1, 0)), set()),
    "sort": (primitive("sort", lambda x: jnp.sort(x, 0)), set()),
    "two results": (primitive("two", lambda x: [x + 1, x.mean(0, keepdims=True) - x], several=True), {1, 2}),
    "swapped": (primitive("swapped", lambda x: jnp.swapaxes(jnp.tanh(x), 0, 1).reshape(8, 4, 6)), {2}),
    "callback": (primitive("callback", lambda x: jax.pure_callback(np.sin, x, x)), set()),
}  # fmt: skip


@pytest.mark.parametrize("name", PROVED)
def test_only_what_is_proved_passes(name: str) -> None:
    fn, wanted = PROVED[name]
    graph = trace(fn, (X,), {}).graph
    (rule,) = graph_rules(graph)
    passing = {d for d, factors in enumerate(rule.operands[0]) if set(factors) - rule.need_replication}
    assert passing == wanted
    assert bool(rule.note) == (not wanted)


@pytest.mark.parametrize("name", [name for name, (_, wanted) in PROVED.items() if wanted])
def test_it_runs_cut_and_says_nothing(name: str, mesh_4x2: Mesh) -> None:
    fn = PROVED[name][0]
    step = jaxplan.auto_shard(
        lambda x: fn(jnp.cos(x)), mesh_4x2, constraints={"x": P("data", None, "model")},
        options={"compare_templates": False},
    )  # fmt: skip
    for mine, theirs in zip(jax.tree.leaves(step(X)), jax.tree.leaves(jax.jit(fn)(jnp.cos(X))), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    assert not step.plan(X).warnings


def test_equal_shapes_with_other_parameters_have_rules_of_their_own(mesh_4x2: Mesh) -> None:
    """Two constraints on tensors of one shape are two."""
    one, other = (jax.sharding.NamedSharding(mesh_4x2, spec) for spec in (P("data"), P(None, "data")))
    pin = jax.lax.with_sharding_constraint
    graph = trace(lambda x, y: (pin(x, one), pin(y, other)), (X[0], X[1]), {}).graph
    first, second = graph_rules(graph)
    assert first.fixed != second.fixed
