"""Kernels, which XLA can't cut: replicated and named, or run on the planned pieces by their `local` function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan.sharding.rules import registry

RANDOM = np.random.default_rng(0)
X, Y = (RANDOM.normal(size=shape).astype(np.float32) for shape in ((16, 64), (64, 8)))
RULE = "([i,k],[k,j])->([i,j]) reduction={k}"


def product(x: Any, y: Any, *, scale: float = 1.0) -> Any:
    def kernel(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
        out_ref[...] = scale * (x_ref[...] @ y_ref[...])

    shape = jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x, y)


product_p = Primitive("test_product")
product_p.def_impl(product)
product_p.def_abstract_eval(lambda x, y, scale: x.update(shape=(x.shape[0], y.shape[1])))
mlir.register_lowering(product_p, mlir.lower_fun(product, multiple_results=False))


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[tuple[int, ...], ...]]]:
    """The shapes that the kernel is run on; its rule is registered for one test."""
    seen: list[tuple[tuple[int, ...], ...]] = []

    def local(x: Any, y: Any, *, scale: float) -> Any:
        seen.append((x.shape, y.shape))
        return product(x, y, scale=scale)

    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    monkeypatch.setattr(registry, "_LOCAL", dict(registry._LOCAL))
    jaxplan.register_rule("test_product", lambda op: RULE, local=local)
    yield seen


def once(x: Any, y: Any) -> Any:
    return jnp.tanh(product_p.bind(jnp.sin(x), y, scale=0.5))


def run(fn: Callable[..., Any], mesh: Mesh, constraints: dict[str, P], x: Any = X) -> jaxplan.Plan:
    step = jaxplan.auto_shard(fn, mesh, constraints=constraints, options={"compare_templates": False})
    np.testing.assert_allclose(step(x, Y), jax.jit(fn)(x, Y), rtol=1e-5, atol=1e-6)
    return step.plan(x, Y)


def test_a_kernel_without_a_rule_is_whole_and_named(mesh_4x2: Mesh) -> None:
    plan = run(lambda x, y: jnp.tanh(product(x, y)), mesh_4x2, {"x": P("data")})
    assert any("`pallas_call`" in warning and "replicated" in warning for warning in plan.warnings)


CUTS = {
    "rows": ({"x": P("data"), "y": P(), "result": P("data")}, ((4, 64), (64, 8))),
    "both ways": ({"x": P("data"), "y": P(None, "model"), "result": P("data", "model")}, ((4, 64), (64, 4))),
    "summed": ({"x": P(None, "data"), "y": P("data"), "result": P()}, ((16, 16), (16, 8))),
    "summed and cut": (
        {"x": P("model", "data"), "y": P("data"), "result": P("model")}, ((8, 16), (16, 8))),
}  # fmt: skip


@pytest.mark.parametrize("name", CUTS)
def test_a_kernel_runs_on_the_pieces_that_the_plan_chose(
    name: str, pieces: list[Any], mesh_4x2: Mesh
) -> None:
    constraints, wanted = CUTS[name]
    plan = run(lambda x, y: product_p.bind(x, y, scale=0.5), mesh_4x2, constraints)
    assert wanted in pieces
    assert not plan.warnings


def test_a_kernel_in_a_loop_that_is_differentiated(pieces: list[Any], mesh_4x2: Mesh) -> None:
    @jax.custom_vjp
    def layer(x: Any, y: Any) -> Any:
        return product_p.bind(x, y, scale=1.0)

    def backward(saved: Any, g: Any) -> Any:
        x, y = saved
        return product_p.bind(g, y.T, scale=1.0), product_p.bind(x.T, g, scale=1.0)

    layer.defvjp(lambda x, y: (product_p.bind(x, y, scale=1.0), (x, y)), backward)

    def step(x: Any, y: Any) -> Any:
        def loss(y: Any) -> Any:
            body = jax.checkpoint(lambda h, _: (jnp.tanh(layer(h, y) @ y.T / 64), None))
            return jnp.sum(jax.lax.scan(body, x, None, length=2)[0] ** 2)

        return jax.grad(loss)(y)

    rows = 4096  # so many that gathering them would take longer than adding up gradients
    run(step, mesh_4x2, {"x": P("data")}, x=np.sin(np.arange(rows * 64, dtype=np.float32)).reshape(rows, 64) / 32)
    assert {(rows // 4, 64), (rows // 8, 64)} & {x for x, _ in pieces}
    assert {(64, rows // 4), (64, rows // 8)} & {x for x, _ in pieces}


def test_the_plan_of_a_kernel_comes_back_from_its_file(
    pieces: list[Any], mesh_4x2: Mesh, tmp_path: Any
) -> None:
    plan = run(once, mesh_4x2, CUTS["summed"][0])
    plan.save(tmp_path / "plan.json")
    loaded = jaxplan.load_plan(tmp_path / "plan.json", mesh_4x2)
    pieces.clear()
    again = jaxplan.auto_shard(once, mesh_4x2, options={"plan": loaded})(X, Y)
    np.testing.assert_allclose(again, jax.jit(once)(X, Y), rtol=1e-5, atol=1e-6)
    assert pieces and (16, 64) not in [x for x, _ in pieces]


def test_what_is_no_local_function_is_refused() -> None:
    with pytest.raises(jaxplan.RuleError, match=r"local of `mine` is 3; give a function from the pieces"):
        jaxplan.register_rule("mine", lambda op: "([i])->([i])", local=3)


def roots(x: jax.Array) -> jax.Array:
    """Inverse roots of many matrices, and inverses: preconditioners of an optimizer."""
    values, vectors = jnp.linalg.eigh(x @ x.mT + jnp.eye(x.shape[-1]))
    return (vectors * values[:, None] ** -0.5) @ vectors.mT + jnp.linalg.inv(x @ x.mT + jnp.eye(x.shape[-1]))


ROOTS = {"*": P(("data", "model"))}


def test_matrices_that_are_cut_over_devices_are_factored_in_place(mesh_4x2: Mesh) -> None:
    x = RANDOM.normal(size=(16, 8, 8)).astype(np.float32)
    planned = jaxplan.auto_shard(roots, mesh_4x2, constraints=ROOTS, options={"compare_templates": False})
    np.testing.assert_allclose(planned(x), jax.jit(roots)(x), rtol=2e-5, atol=1e-5)
    assert not planned.plan(x).collectives


@pytest.mark.aot_tpu
def test_the_tpu_compiler_gathers_none_of_them(tpu_topology: Callable[[str], Any]) -> None:
    """Left to XLA's partitioner every device gets all matrices, and factors its own."""
    mesh = Mesh(np.array(tpu_topology("v5e:2x4").devices).reshape(4, 2), ("data", "model"))
    planned = jaxplan.auto_shard(roots, mesh, constraints=ROOTS, options={"compare_templates": False})
    text = planned.lower(jax.ShapeDtypeStruct((64, 32, 32), jnp.float32)).compile().as_text()
    assert "all-gather" not in text


def filtered(x: jax.Array) -> jax.Array:
    """The lowest frequencies of images with channels last."""
    frequencies = jnp.fft.rfft2(x, axes=(1, 2))
    kept = jnp.zeros_like(frequencies).at[:, :4, :4].set(frequencies[:, :4, :4] * 0.5j)
    return jnp.fft.irfft2(kept, s=x.shape[1:3], axes=(1, 2))


def test_fourier_transforms_of_a_batch_that_is_cut_stay_where_they_are(mesh_4x2: Mesh) -> None:
    """Left to XLA's partitioner every device of a CPU gets the whole batch, and transforms its own."""
    x = RANDOM.normal(size=(16, 8, 8, 3)).astype(np.float32)
    planned = jaxplan.auto_shard(filtered, mesh_4x2, constraints=ROOTS, options={"compare_templates": False})
    np.testing.assert_allclose(planned(x), jax.jit(filtered)(x), rtol=1e-5, atol=1e-6)
    assert not planned.plan(x).collectives
    assert "all-gather" not in planned.lower(x).compile().as_text()
