"""Gradients that a loop accumulates are synchronised once, after the loop, where that is cheaper; and are right."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan.ir import accumulating_ops, trace
from jaxplan.lowering import compiled_collectives

RANDOM = np.random.default_rng(0)
STEPS, WIDTH, LAYERS = 4, 64, 3
PARAMS = {
    "embed": RANDOM.normal(size=(WIDTH, WIDTH)).astype(np.float32),
    "layers": (RANDOM.normal(size=(LAYERS, WIDTH, WIDTH)) * 0.1).astype(np.float32),
    "head": RANDOM.normal(size=(WIDTH, WIDTH)).astype(np.float32),
}
BATCH = RANDOM.normal(size=(STEPS, 64, WIDTH)).astype(np.float32)


def loss(params: Any, x: Any, *, remat: bool = False, dtype: Any = jnp.float32) -> Any:
    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ w), None

    params, x = jax.tree.map(lambda a: a.astype(dtype), (params, x))
    hidden, _ = lax.scan(jax.checkpoint(layer) if remat else layer, x @ params["embed"], params["layers"])
    return ((hidden @ params["head"]).astype(jnp.float32) ** 2).mean()


def stepped(accumulate: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    def step(params: Any, batch: Any) -> Any:
        def gradient(x: Any) -> Any:
            grads = jax.grad(lambda p: loss(p, x, **settings))(params)
            return jax.tree.map(lambda g: g.astype(jnp.float32), grads)

        total = accumulate(gradient, params, batch)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, total)

    return step


def by_scan(gradient: Any, params: Any, batch: Any, start: float = 0.0) -> Any:
    first = jax.tree.map(lambda p: jnp.full_like(p, start), params)
    return lax.scan(lambda total, x: (jax.tree.map(jnp.add, total, gradient(x)), None), first, batch)[0]


def by_fori(gradient: Any, params: Any, batch: Any) -> Any:
    def body(i: Any, total: Any) -> Any:
        return jax.tree.map(jnp.add, total, gradient(batch[i]))

    return lax.fori_loop(0, STEPS, body, jax.tree.map(jnp.zeros_like, params))


def by_nested_scan(gradient: Any, params: Any, batch: Any) -> Any:
    def outer(total: Any, xs: Any) -> Any:
        return jax.tree.map(jnp.add, total, by_scan(gradient, params, xs)), None

    pairs = batch.reshape(2, STEPS // 2, *batch.shape[1:])
    return lax.scan(outer, jax.tree.map(jnp.zeros_like, params), pairs)[0]


PROGRAMS = {
    "scan": stepped(by_scan),
    "from ones": stepped(lambda *args: by_scan(*args, start=1.0)),
    "fori": stepped(by_fori),
    "remat": stepped(by_scan, remat=True),
    "bf16": stepped(by_scan, dtype=jnp.bfloat16),
    "nested": stepped(by_nested_scan),
}
WHOLE = {f"params/{name}": P() for name in PARAMS} | {"batch": P(None, ("data", "model"))}


def planned(fn: Callable[..., Any], mesh: Mesh, hardware: str) -> jaxplan.ShardedStep:
    options = {"compare_templates": False}
    return jaxplan.auto_shard(fn, mesh, constraints=WHOLE, options=options, hardware=hardware)


def sums(collectives: Iterable[Any]) -> list[Any]:
    """Those that sum tensors, rather than a few numbers, over the axis that only the batch and gradients know."""
    kinds = ("all_reduce", "reduce_scatter")
    return [c for c in collectives if c.kind in kinds and "data" in c.axes and c.bytes > 1024]


def compiled_sums(step: jaxplan.ShardedStep, mesh: Mesh, *args: Any) -> list[Any]:
    text = step.lower(*args).compile().as_text()
    return sums(compiled_collectives(text, tuple(mesh.shape.items())))


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_synchronised_once_and_are_right(name: str, mesh_4x2: Mesh) -> None:
    fn = PROGRAMS[name]
    step = planned(fn, mesh_4x2, "cpu-host")
    for found in (sums(step.plan(PARAMS, BATCH).collectives), compiled_sums(step, mesh_4x2, PARAMS, BATCH)):
        assert found and all(c.trips == 1 for c in found)
    mine, theirs = (jax.tree.leaves(run(PARAMS, BATCH)) for run in (step, jax.jit(fn)))
    within = 1e-2 if name == "bf16" else 1e-5
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=within, atol=within)


TOKENS = RANDOM.integers(0, WIDTH, (STEPS, 64)).astype(np.int32)
IMAGES = RANDOM.normal(size=(STEPS, 16, 8, 8, 4)).astype(np.float32)
KERNEL = (RANDOM.normal(size=(3, 3, 4, 32)) * 0.1).astype(np.float32)


def embedded(table: Any, tokens: Any) -> Any:
    return (jnp.tanh(table[tokens] @ PARAMS["head"]) ** 2).mean()


GROUPED = (RANDOM.normal(size=(3, 3, 1, 64)) * 0.1).astype(np.float32)
LARGE = RANDOM.normal(size=(STEPS, 64, 32, 32, 4)).astype(np.float32)


def convolved(kernel: Any, images: Any) -> Any:
    made = lax.conv_general_dilated(
        images, kernel, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=images.shape[-1] // kernel.shape[2],
    )  # fmt: skip
    return (jnp.tanh(made) ** 2).mean()


def summed_up(gradient: Callable[..., Any], scale: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def step(params: Any, batch: Any) -> Any:
        def body(total: Any, x: Any) -> Any:
            return jax.tree.map(scale, total, jax.grad(gradient)(params, x)), None

        return params - lax.scan(body, jnp.zeros_like(params), batch)[0]

    return step


OTHERS = {
    "embedding": (embedded, jnp.add, PARAMS["embed"], TOKENS),
    "convolution": (convolved, jnp.add, KERNEL, IMAGES),
    "grouped convolution": (convolved, jnp.add, GROUPED, LARGE),
    "mean": (embedded, lambda total, g: total + g / STEPS, PARAMS["embed"], TOKENS),
    "moving average": (convolved, lambda total, g: 0.9 * total + 0.1 * g, KERNEL, IMAGES),
}


@pytest.mark.parametrize("cut", [("data",), ("data", "model")], ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_other_gradients_and_scaled_ones_too(name: str, cut: tuple[str, ...], mesh_4x2: Mesh) -> None:
    gradient, scale, params, batch = OTHERS[name]
    fn = summed_up(gradient, scale)
    other = {"params": P(None, None, None, "model") if params.ndim == 4 else P(None, "model")}
    step = jaxplan.auto_shard(
        fn, mesh_4x2, constraints={"batch": P(None, cut)} | (other if len(cut) == 1 else {"params": P()}),
        options={"compare_templates": False}, hardware="cpu-host",
    )  # fmt: skip
    for found in (sums(step.plan(params, batch).collectives), compiled_sums(step, mesh_4x2, params, batch)):
        assert found and all(c.trips == 1 for c in found)
    np.testing.assert_allclose(step(params, batch), jax.jit(fn)(params, batch), rtol=1e-5, atol=1e-6)


def recurrent(params: Any, moments: Any, xs: Any) -> Any:
    """A network that reads its weights in every iteration, and an optimizer that reads their gradient twice."""

    def loss(params: Any) -> Any:
        after, _ = lax.scan(
            lambda h, _: (jnp.tanh(h @ params["w"] + params["b"]), None), xs, None, length=STEPS
        )
        return (after**2).mean()

    grads = jax.grad(loss)(params)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g**2, moments, grads)
    params = jax.tree.map(lambda p, g, m: p - 0.01 * jnp.tanh(g) / (1 + m), params, grads, moments)
    return params, moments


@pytest.mark.parametrize("axes", [("data",), ("data", "model")], ids=str)
def test_what_is_read_twice_after_its_loop_is_summed_once(axes: tuple[str, ...], mesh_4x2: Mesh) -> None:
    params = {"w": PARAMS["embed"], "b": PARAMS["embed"][0]}
    args = params, jax.tree.map(np.zeros_like, params), BATCH[0]
    pins = {"params/**": P(), "moments/**": P(), "xs": P(axes)}
    step = jaxplan.auto_shard(
        recurrent, mesh_4x2, constraints=pins, options={"compare_templates": False}, hardware="cpu-host"
    )
    text = step.lower(*args).compile().as_text()
    compiled = compiled_collectives(text, tuple(mesh_4x2.shape.items()))
    for found in (step.plan(*args).collectives, compiled):
        over = [c for c in found if c.kind in ("all_reduce", "reduce_scatter") and set(c.axes) & set(axes)]
        assert all(c.trips == 1 for c in over)  # the bias, summed over the batch and then reshaped, among them
        gradients = [c.bytes for c in over]
        # XLA reduces several tensors in one operation
        assert sum(gradients) == sum(p.nbytes for p in params.values()), gradients
        assert all(set(c.axes) == set(axes) for c in over)
    for a, b in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(jax.jit(recurrent)(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_sum_of_products_that_are_summed_themselves_is_right(mesh_4x2: Mesh) -> None:
    """What a device has summed of a product over one axis is summed over another one: parts of parts."""
    left, right = (RANDOM.normal(size=(STEPS, 8, *shape)).astype(np.float32) for shape in ((64, 128), (128, 64)))

    def step(left: Any, right: Any) -> Any:
        def body(total: Any, x: Any) -> Any:
            return total + (x[0] @ x[1]).reshape(4, 2, 64, 64).sum(0).sum(0), None

        return lax.scan(body, jnp.zeros((64, 64)), (left, right))[0]

    for one, other in (("data", "model"), ("model", "data")):
        pins = {"left": P(None, one, None, other), "right": P(None, one, other)}
        sharded = jaxplan.auto_shard(
            step, mesh_4x2, constraints=pins, options={"compare_templates": False}, hardware="tpu-v5e"
        )
        np.testing.assert_allclose(sharded(left, right), jax.jit(step)(left, right), rtol=1e-4, atol=1e-3)


def found(fn: Callable[..., Any], *args: Any) -> set[str]:
    graph = trace(fn, args, {}).graph
    return {graph.ops[i].primitive for i in accumulating_ops(graph)}


def test_only_what_is_added_to_is_accumulated() -> None:
    xs = np.ones((4, 8, 8), np.float32)

    def loop(after: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
        return lambda xs: lax.scan(lambda c, x: (after(c, x), None), jnp.zeros((8, 8)), xs)[0]

    assert found(loop(lambda c, x: c + x @ x.T), xs) == {"carry_init", "add"}
    assert found(loop(lambda c, x: (-(x @ x)).T + (c + x @ x)), xs) == {"carry_init", "add", "neg", "transpose"}
    assert found(loop(lambda c, x: c * 0.9 + x @ x * x.sum()), xs) == {"carry_init", "add", "mul"}
    assert found(loop(lambda c, x: c + (x @ x) / x), xs) == {"carry_init", "add", "div"}
    assert found(loop(lambda c, x: c.at[jnp.arange(3)].add(x[:3])), xs) == set()
    once = loop(lambda c, x: lax.while_loop(lambda go: go, lambda go: x.max() > 2, c.sum() > 0) + x @ x)
    assert found(once, xs) == set()  # read by what has no result
    for no_sum in (
        lambda c, x: c + jnp.sin(x @ x),  # not linear in the product
        lambda c, x: c * c + x @ x,  # not linear in what was added
        lambda c, x: jnp.exp(c) * 0.9 + x @ x,
        lambda c, x: c + c @ x,  # read otherwise
        lambda c, x: c + x,  # no product
        lambda c, x: (c + x @ x) + (c + x @ x),
    ):
        assert found(loop(no_sum), xs) == set()


@pytest.mark.aot_tpu
def test_the_tpu_compiler_sums_after_the_loop(tpu_topology: Callable[[str], Any]) -> None:
    mesh = Mesh(np.array(tpu_topology("v5e:2x4").devices).reshape(4, 2), ("data", "model"))
    wide = [jax.ShapeDtypeStruct((*x.shape[:-2], 1024, 1024), x.dtype) for x in (*PARAMS.values(), BATCH)]
    params = dict(zip(PARAMS, wide, strict=False))
    found = compiled_sums(planned(PROGRAMS["remat"], mesh, "tpu-v5e"), mesh, params, wide[-1])
    assert found and all(c.trips == 1 for c in found)
