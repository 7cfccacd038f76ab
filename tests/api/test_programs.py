"""Programs of many kinds, written as users write them: planned, sharded and run, they equal their unsharded run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplan

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(64, 32)).astype(np.float32)
Y = RANDOM.normal(size=(64, 16)).astype(np.float32)
W = (RANDOM.normal(size=(32, 32)) * 0.1).astype(np.float32)
V = RANDOM.normal(size=(32, 16)).astype(np.float32)
STACK = (RANDOM.normal(size=(6, 32, 32)) * 0.2).astype(np.float32)
TOKENS = RANDOM.integers(0, 64, (8, 16)).astype(np.int32)
CUBE = X.reshape(8, 16, 16)
ROWS = np.arange(16, dtype=np.int32)
PLACES = RANDOM.integers(0, 32, (64, 4)).astype(np.int32)
PARAMS = {"w1": W, "b1": np.zeros(32, np.float32), "w2": V * 0.1}


def loss(p: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] - y) ** 2)


def trained(tx: optax.GradientTransformation) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def step(state: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["p"], x, y)
        updates, moments = tx.update(grads, state["o"], state["p"])
        return {"p": optax.apply_updates(state["p"], updates), "o": moments}, value

    return step, ({"p": PARAMS, "o": tx.init(PARAMS)}, X, Y)


def accumulated(p: Any, x: Any, y: Any) -> Any:
    def micro(carry: Any, xy: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(p, *xy)
        return jax.tree.map(jnp.add, carry, grads), value

    parts = (x.reshape(4, 16, 32), y.reshape(4, 16, 16))
    grads, values = lax.scan(micro, jax.tree.map(jnp.zeros_like, p), parts)
    return jax.tree.map(lambda a, b: a - 0.01 * b, p, grads), values.mean()


def dropout(p: Any, key: Any, x: Any) -> Any:
    key, sub = jax.random.split(key)
    hidden = jnp.tanh(x @ p["w1"])
    return hidden * jax.random.bernoulli(sub, 0.9, hidden.shape) / 0.9, key


def embedded(table: Any, tokens: Any) -> Any:
    def entropy(table: Any) -> Any:
        logits = table[tokens] @ table.T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    return jax.value_and_grad(entropy)(table)


def convolved(kernel: Any, x: Any) -> Any:
    def energy(kernel: Any) -> Any:
        out = lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (lax.reduce_window(jax.nn.relu(out), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME") ** 2).mean()

    return jax.value_and_grad(energy)(kernel)


def rematerialised(stack: Any, x: Any) -> Any:
    @jax.checkpoint
    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ w), None

    return jax.value_and_grad(lambda s: (lax.scan(layer, x, s)[0] ** 2).mean())(stack)


def nested(stack: Any, x: Any) -> Any:
    def outer(c: Any, w: Any) -> Any:
        return lax.scan(lambda d, _: (jnp.tanh(d @ w), d.sum()), c, None, length=3)[0], c.mean()

    return lax.scan(outer, x, stack)


def halved(p: Any, x: Any) -> Any:
    def body(c: Any) -> Any:
        return c[0] + 1, jnp.tanh(c[1] @ p) * 0.5

    return lax.while_loop(lambda c: (jnp.abs(c[1]).max() > 1e-3) & (c[0] < 20), body, (0, x))


def recurrence(x: Any, w: Any) -> Any:
    pairs = (jnp.exp(-jnp.abs(x)), x @ w)
    return lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), pairs, axis=1)


@jax.custom_vjp
def sine(x: Any) -> Any:
    return jnp.sin(x)


sine.defvjp(lambda x: (jnp.sin(x), x), lambda saved, g: (g * jnp.cos(saved),))



@jax.custom_jvp
def times(x: Any, n: Any) -> Any:
    return x * n


times.defjvp(lambda primals, tangents: (times(*primals), tangents[0] * primals[1]))

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "adamw": trained(optax.adamw(1e-3)),
    "adafactor": trained(optax.adafactor(1e-3, min_dim_size_to_factor=8)),
    "clipped momentum": trained(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2, momentum=0.9))),
    "apply if finite": trained(optax.apply_if_finite(optax.adam(1e-3), 3)),
    "gradient accumulation": (accumulated, (PARAMS, X, Y)),
    "dropout": (dropout, (PARAMS, jax.random.key(0), X)),
    "while": (halved, (W, X)),
    "fori": (lambda p, x: lax.fori_loop(0, 5, lambda i, c: jnp.tanh(c @ p), x), (W, X)),
    "cond": (lambda p, x, f: lax.cond(f, lambda a: jnp.sin(a @ p), lambda a: a * 2, x), (W, X, np.bool_(True))),
    "switch": (lambda x, i: lax.switch(i, [jnp.sin, lambda a: a * 2, lambda a: a[::-1]], x), (X, np.int32(2))),
    "sorts": (lambda x: (jnp.sort(x, 0), jnp.argsort(x, 1), lax.top_k(x, 4), jnp.cumsum(x, 1)), (X,)),
    "associative scan": (recurrence, (X.reshape(8, 8, 32), W)),
    "uneven recurrence": (lambda x: recurrence(jnp.sin(x), jnp.eye(6)), (X[:60].reshape(5, 64, 6)[:, :12],)),
    # Small enough that no row is predicted for certain: gradients would be what rounding leaves of ones less ones.
    "embedding and loss": (embedded, (RANDOM.normal(size=(64, 32)).astype(np.float32) / 4, TOKENS)),
    "convolution": (convolved, ((W.reshape(2, 2, 16, 16)), RANDOM.normal(size=(16, 8, 8, 16)).astype(np.float32))),
    "ragged dot": (lax.ragged_dot, (X, STACK[:4], np.array([16, 8, 24, 16], np.int32))),
    "int8": (lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.int32), (X.astype(np.int8), V.astype(np.int8))),
    "fp8": (lambda x, w: (x.astype(jnp.float8_e4m3fn) @ w.astype(jnp.float8_e4m3fn)).astype(jnp.float32), (X, V)),
    "primes": (lambda x, w: jnp.tanh(x @ w).sum(0), (X[:7, :13], V[:13, :5])),
    "scalar": (lambda x: x * 2 + 1, (np.float32(3),)),
    "empty": (lambda x: (x, jnp.zeros((0, 4))), (X,)),
    "linear algebra": (lambda a: (jnp.linalg.cholesky(a @ a.mT + 32 * jnp.eye(16)), jnp.fft.fft(a)), (CUBE,)),
    "scatter": (lambda x, i: (x.at[i].add(x[i]), x.at[i].set(1.0), x.at[:, 3].max(1.0)), (X, ROWS)),
    "segment sum": (lambda x, i: jax.ops.segment_sum(x, i, 8), (X, RANDOM.integers(0, 8, 64).astype(np.int32))),
    "custom vjp": (lambda w, x: jax.grad(lambda w: sine(x @ w).sum())(w), (V, X)),
    "whole numbers' derivative": (lambda x, n: jax.grad(lambda x: times(x, n).sum())(x), (X[:, :4], PLACES)),
    "remat and scan": (rematerialised, (STACK, X)),
    "nested scan": (nested, (STACK, X)),
    "gather by row": (lambda x, i: jax.vmap(lambda a, b: a[b])(x, i), (X, PLACES)),
    "dynamic slice": (lambda x, i: lax.dynamic_slice(x, (i, 0), (8, 32)), (X, np.int32(5))),
    "dynamic update": (lambda x, i: lax.dynamic_update_slice(x, x[:8], (i, 0)), (X, np.int32(5))),
    "attention": (lambda q: jax.nn.dot_product_attention(q, q, q, is_causal=True), (X.reshape(4, 16, 4, 8),)),
    "callback": (lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x) @ x.T, (X,)),
}  # fmt: skip


def shard_mapped(mesh: Mesh) -> Callable[..., Any]:
    body = jax.shard_map(
        lambda a, b: lax.psum(a @ b, "model"), mesh=mesh, in_specs=(P("data", "model"), P("model")), out_specs=P("data")
    )
    return lambda x, w: jnp.sin(body(x, w)) @ w.T


def check(fn: Callable[..., Any], args: tuple[Any, ...], mesh: Mesh, **settings: Any) -> None:
    options = jaxplan.Options(compare_templates=False, search=settings.pop("search", "ilp"))
    step = jaxplan.auto_shard(fn, mesh, options=options, **settings)
    theirs, mine = jax.jit(fn)(*args), step(*args)
    assert jax.tree.structure(theirs) == jax.tree.structure(mine)
    for a, b in zip(jax.tree.leaves(theirs), jax.tree.leaves(mine), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if a.size:
            expected, found = np.asarray(a, np.complex128), np.asarray(b, np.complex128)
            assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", PROGRAMS)
def test_cut_as_fsdp_it_equals_the_unsharded_run(name: str, mesh_4x2: Mesh) -> None:
    check(*PROGRAMS[name], mesh_4x2, search="fsdp")


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_planned_freely_it_equals_the_unsharded_run(name: str, mesh_4x2: Mesh) -> None:
    check(*PROGRAMS[name], mesh_4x2, hardware="tpu-v5e")


def test_an_inner_loop_goes_along_what_is_cut(mesh_4x2: Mesh) -> None:
    def along(row: Any) -> Any:
        return lax.scan(lambda c, x: (jnp.sin(c), c * x), row, row)[1]

    check(lambda x: lax.map(along, x), (CUBE[0],), mesh_4x2, constraints={"x": P(None, "data")}, hardware="tpu-v5e")


def test_a_users_own_shard_map_and_constraints_stay(mesh_4x2: Mesh) -> None:
    check(shard_mapped(mesh_4x2), (X, V), mesh_4x2, search="fsdp")
    pinned = NamedSharding(mesh_4x2, P("data", "model"))
    check(lambda x, w: lax.with_sharding_constraint(x @ w, pinned) * 2, (X, V), mesh_4x2, search="fsdp")


def test_whether_a_batched_loop_goes_on_is_asked_of_all_pieces_as_planned(mesh_4x2: Mesh) -> None:
    def rooted(x: Any) -> Any:
        def body(c: Any) -> Any:
            return (c[0] + c[2] / c[0]) / 2, c[1] + 1, c[2]

        return lax.while_loop(lambda c: (jnp.abs(c[0] ** 2 - c[2]) > 1e-3) & (c[1] < 30), body, (x, 0, x))

    numbers = np.linspace(1, 9, 2**22).astype(np.float32)  # too many to have each device do the work of all
    step = jaxplan.auto_shard(
        jax.vmap(rooted), mesh_4x2, constraints={"x": P(("data", "model"))}, hardware="tpu-v5e",
        options={"compare_templates": False},
    )  # fmt: skip
    plan = step.plan(numbers)
    assert [c.kind for c in plan.collectives] == ["all_reduce"] and plan.collectives[0].bytes <= 4
    assert not plan.warnings  # which would tell of a collective that was not planned
    np.testing.assert_array_equal(step(numbers)[1], jax.jit(jax.vmap(rooted))(numbers)[1])
