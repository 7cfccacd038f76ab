"""Primitives of other libraries: seen through where they are jax, and only there."""

from __future__ import annotations

import functools
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
from jaxplan.sharding import graph_rules, registered
from jaxplan.sharding.rules import registry

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


def primitive(
    name: str, run: Callable[..., Any], lowered: Callable[..., Any] | None = None, several: bool = False
) -> Primitive:
    """A primitive that nobody knows: `run` outside jit, lowered to `lowered`, else to the same."""
    made = Primitive(f"foreign_{name}")
    made.multiple_results = several
    made.def_impl(run)

    def shapes(*avals: Any, **params: Any) -> Any:
        found = jax.eval_shape(functools.partial(lowered or run, **params), *avals)
        if several:
            return [jax.core.ShapedArray(f.shape, f.dtype) for f in found]
        return jax.core.ShapedArray(found.shape, found.dtype)

    made.def_abstract_eval(shapes)
    mlir.register_lowering(made, mlir.lower_fun(lowered or run, multiple_results=several))
    return made


def hidden(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A lowering of which nobody sees that it is one of `fn`."""
    return lambda ctx, x: mlir.lower_fun(fn, multiple_results=False)(ctx, x)


scaled = primitive("scaled", lambda x, *, by: jnp.cumsum(x * by, axis=1))
pair = primitive("pair", lambda x: [jnp.sort(x, axis=1), x.sum(0)], several=True)
around = primitive("around", lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jnp.sin(scaled.bind(y, by=0.5)), x))
checked = primitive("checked", lambda x: np.asarray(x) + 1, lambda x: jnp.cumsum(x, axis=1))
kernel = primitive("kernel", lambda x: x + 1)
mlir.register_lowering(kernel, hidden(jnp.sin))
called_back = primitive("called_back", lambda x: np.asarray(x) + 1, jnp.sin)
mlir.register_lowering(called_back, hidden(jnp.sin))
itself = Primitive("foreign_itself")
itself.def_impl(jax.jit(lambda x: itself.bind(x)))
itself.def_abstract_eval(lambda x: x)
mlir.register_lowering(itself, hidden(jnp.sin))


def names(step: Callable[..., Any], *shapes: Any) -> set[str]:
    return {op.primitive for op in trace(step, shapes, {}, ruled=registered(), platform="cpu").graph.ops}


@pytest.mark.parametrize(
    ("step", "inside"),
    [
        (lambda x: scaled.bind(x, by=2.0), "cumsum"),
        (checked.bind, "cumsum"),
        (lambda x: pair.bind(x)[0], "sort"),
        (around.bind, "cumsum"),
        (lambda x: jax.lax.cond(x.sum() > 0, lambda y: scaled.bind(y, by=2.0), lambda y: y, x), "cumsum"),
        (lambda x: jax.lax.scan(lambda c, r: (c + scaled.bind(r[None], by=3.0)[0], r), x[0], x), "cumsum"),
        (jax.checkpoint(lambda x: scaled.bind(x, by=2.0)), "cumsum"),
    ],
    ids=["parameters", "no impl under a trace", "two results", "in each other", "cond", "scan", "remat"],
)
def test_what_is_written_in_jax_is_seen_through(step: Callable[..., Any], inside: str, mesh_4x2: Mesh) -> None:
    found = names(step, X)
    assert inside in found
    assert not any(name.startswith("foreign") for name in found)
    planned = jaxplan.auto_shard(
        lambda x: jax.tree.map(lambda y: y * 2, step(x)), mesh_4x2, constraints={"x": P("data")},
        options={"compare_templates": False, "strict": True},
    )  # fmt: skip
    for mine, theirs in zip(jax.tree.leaves(planned(X)), jax.tree.leaves(jax.jit(step)(X)), strict=True):
        np.testing.assert_allclose(mine, theirs * 2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("opaque", [kernel, called_back, itself], ids=lambda p: p.name)
def test_what_is_lowered_to_something_else_or_runs_no_jax_is_left_alone(opaque: Primitive, mesh_4x2: Mesh) -> None:
    assert names(opaque.bind, X) == {opaque.name}
    np.testing.assert_allclose(jaxplan.auto_shard(opaque.bind, mesh_4x2)(X), jax.jit(opaque.bind)(X), rtol=1e-6)


def test_a_kernel_on_the_platform_that_is_planned_for_is_left_alone() -> None:
    """Elsewhere the primitive is jax; here it is not."""
    mixed = primitive("mixed", jnp.sin)
    fused = primitive("fused", jnp.sin)
    mlir.register_lowering(mixed, mlir.lower_fun(fused.bind, multiple_results=False), platform="cuda")
    mlir.register_lowering(fused, hidden(jnp.cos))
    mlir.register_lowering(mixed, hidden(jnp.cos), platform="tpu")
    for platform, wanted in (("cpu", {"sin"}), ("cuda", {"foreign_fused"}), ("tpu", {"foreign_mixed"})):
        graph = trace(mixed.bind, (X,), {}, ruled=registered(), platform=platform).graph
        assert {op.primitive for op in graph.ops} == wanted


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_ragged_products_are_one_operation_on_tpu_alone(platform: str) -> None:
    """Elsewhere they are compiled to products with every group's matrix, which can be cut by rows and groups."""
    shapes = jnp.zeros((64, 16)), jnp.zeros((4, 16, 32)), jnp.zeros((4,), jnp.int32)

    def step(x: Any, w: Any, sizes: Any) -> Any:
        return jax.grad(lambda w: (jax.lax.ragged_dot(x, w, sizes) ** 2).sum())(w)

    graph = trace(step, shapes, {}, ruled=registered(), platform=platform).graph
    found = {op.primitive for op in graph.ops}
    rules = graph_rules(graph)
    flops = sum(rules[op.index].flops for op in graph.ops if "dot_general" in op.primitive)
    products = 2 * 2 * 64 * 16 * 32
    assert ("ragged_dot_general" in found, flops) == ((True, products) if platform == "tpu" else (False, 4 * products))


@pytest.mark.parametrize(("platform", "taken"), [("cpu", "sin"), ("cuda", "tan"), ("tpu", "cos")])
def test_the_platform_s_own_of_what_is_written_for_each(platform: str, taken: str) -> None:
    """Forward and backward: no branches are left, nor what the others would need."""

    def step(x: Any) -> Any:
        def loss(x: Any) -> Any:
            return jax.lax.platform_dependent(x, cpu=jnp.sin, tpu=jnp.cos, default=jnp.tan).sum()

        return jax.value_and_grad(loss)(x)

    found = {op.primitive for op in trace(step, (X,), {}, ruled=registered(), platform=platform).graph.ops}
    assert taken in found
    assert found.isdisjoint({"cond_join", "platform_index"})


def test_a_diagonal_is_no_branch(mesh_4x2: Mesh) -> None:
    square = jnp.arange(64.0).reshape(8, 8)

    def step(x: Any) -> Any:
        return jax.grad(lambda x: (jnp.diagonal(x @ x.T) ** 2).sum())(x)

    assert "cond_join" not in names(step, square)
    np.testing.assert_allclose(jaxplan.auto_shard(step, mesh_4x2)(square), jax.jit(step)(square), rtol=1e-6)


def test_a_rule_of_ones_own_goes_before(mesh_4x2: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    ruled = primitive("ruled", jnp.tanh)
    jaxplan.register_rule(ruled.name, lambda op: "([i,j])->([i,j])")
    assert names(ruled.bind, X) == {ruled.name}
