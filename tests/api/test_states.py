"""States as libraries hand them out, and leaves of every type: sharded, they equal the unsharded run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx, struct
from flax.training.train_state import TrainState
from jax.sharding import Mesh

import jaxplan

STEPS = 3
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(STEPS, 16, 8, 8, 3)).astype(np.float32)
LABELS = RANDOM.integers(0, 8, (STEPS, 16)).astype(np.int32)

Case = tuple[Callable[..., Any], Any]


class LinenNet(linen.Module):
    """Dense layers (a bias before batch statistics would have no gradient but rounding), statistics, dropout."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.Dense(16, use_bias=False, name="first")(x)
        x = linen.relu(linen.BatchNorm(use_running_average=False, name="norm")(x))
        x = linen.Dropout(0.2, deterministic=False)(x.mean((1, 2)))
        return linen.Dense(8, name="head")(x)


class NnxNet(nnx.Module):
    """The same in NNX; the Rngs of its dropout are part of its state."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(3, 16, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.dropout(nnx.relu(self.norm(self.first(x))).mean((1, 2))))


class LinenState(TrainState):
    """As flax's ImageNet example extends it."""

    batch_stats: Any
    key: jax.Array


def entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def linen_train_state() -> Case:
    model = LinenNet()
    variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X[0])
    state = LinenState.create(
        apply_fn=model.apply, params=variables["params"], tx=optax.adamw(1e-2, eps=1e-3),
        batch_stats=variables["batch_stats"], key=jax.random.key(2),
    )  # fmt: skip

    def step(state: LinenState, x: jax.Array, labels: jax.Array) -> Any:
        def loss_of(params: Any) -> Any:
            logits, changed = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats}, x, mutable=["batch_stats"],
                rngs={"dropout": jax.random.fold_in(state.key, state.step)},
            )  # fmt: skip
            return entropy(logits, labels), changed["batch_stats"]

        (loss, statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients, batch_stats=statistics), {"loss": loss}

    return step, state


def nnx_split() -> Case:
    """nnx.split and nnx.merge around a pure step: module, Rngs, BatchStat and nnx.Optimizer in one state."""
    model = NnxNet(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2, eps=1e-3), wrt=nnx.Param)
    structure, state = nnx.split((model, optimizer))

    def step(state: nnx.State, x: jax.Array, labels: jax.Array) -> Any:
        model, optimizer = nnx.merge(structure, state)

        def loss_of(model: NnxNet) -> jax.Array:
            return entropy(model(x), labels)

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    return step, state


class Everything(NamedTuple):
    """Keys of both kinds, None, scalars, empty containers, and numbers of few bits."""

    weights: Any
    typed_key: jax.Array
    raw_key: jax.Array
    many_keys: jax.Array
    nothing: None
    empty: dict[str, Any]
    flag: Any
    count: Any
    scale: Any


def every_leaf() -> Case:
    state = Everything(
        weights={
            "f32": jnp.asarray(RANDOM.normal(size=(192, 64)) * 0.1, jnp.float32),
            "bf16": jnp.asarray(RANDOM.normal(size=(64, 8)) * 0.1, jnp.bfloat16),
            "fp8": jnp.asarray(RANDOM.normal(size=(64, 64)), jnp.float8_e4m3fn),
            "int4": jnp.asarray(RANDOM.integers(-8, 8, (64, 64)), jnp.int4),
            "int8": jnp.asarray(RANDOM.integers(-9, 9, (64,)), jnp.int8),
            "complex": jnp.asarray(RANDOM.normal(size=(64,)) + 1j, jnp.complex64),
        },
        typed_key=jax.random.key(3),
        raw_key=jax.random.PRNGKey(4),
        many_keys=jax.random.split(jax.random.key(5), 16),
        nothing=None, empty={}, flag=jnp.asarray(True), count=jnp.asarray(0, jnp.uint32), scale=jnp.float16(1.5),
    )  # fmt: skip

    def step(state: Everything, x: jax.Array, labels: jax.Array) -> Any:
        typed, sub = jax.random.split(state.typed_key)
        raw, raw_sub = jax.random.split(state.raw_key)
        noise = jax.vmap(lambda key: jax.random.normal(key, (64,)))(state.many_keys)

        def loss_of(f32: jax.Array) -> jax.Array:
            hidden = jnp.tanh(x.reshape(16, -1) @ f32) + 0.1 * noise + jax.random.uniform(sub, (16, 64))
            hidden = hidden @ (0.01 * state.weights["int4"].astype(jnp.float32))
            hidden = hidden @ state.weights["fp8"].astype(jnp.float32) * jnp.float32(state.scale)
            hidden = hidden * state.weights["int8"] + jnp.abs(state.weights["complex"])
            hidden = jnp.where(jax.random.bernoulli(raw_sub, 0.5, hidden.shape) & state.flag, hidden, 0.0)
            return entropy(hidden @ state.weights["bf16"].astype(jnp.float32), labels)

        loss, gradient = jax.value_and_grad(loss_of)(state.weights["f32"])
        weights = {**state.weights, "f32": state.weights["f32"] - 0.01 * gradient}
        weights["int4"] = -state.weights["int4"]
        weights["fp8"] = (-state.weights["fp8"].astype(jnp.float32)).astype(jnp.float8_e4m3fn)
        keys = jax.vmap(lambda key: jax.random.fold_in(key, state.count))(state.many_keys)
        state = state._replace(
            weights=weights, typed_key=typed, raw_key=raw, many_keys=keys, count=state.count + 1
        )
        return state, loss

    return step, state


@struct.dataclass
class Settings:
    """A dataclass with a static field, as flax.struct makes them."""

    rate: Any
    name: str = struct.field(pytree_node=False)


def python_scalars() -> Case:
    """Numbers of Python in the state, weakly typed, that come back as such."""
    state = {"w": jnp.asarray(RANDOM.normal(size=(192, 8)) * 0.1, jnp.float32), "settings": Settings(0.1, "x"), "n": 0}

    def step(state: Any, x: jax.Array, labels: jax.Array) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: entropy(x.reshape(16, -1) @ w, labels))(state["w"])
        settings = state["settings"].replace(rate=state["settings"].rate * 0.5)
        return {"w": state["w"] - settings.rate * gradient, "settings": settings, "n": state["n"] + 1}, loss

    return step, state


STATES = {
    "Linen TrainState": linen_train_state,
    "NNX split": nnx_split,
    "every leaf": every_leaf,
    "Python scalars": python_scalars,
}


def comparable(leaf: Any) -> np.ndarray:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf)).astype(np.float64)
    return np.asarray(leaf).astype(np.complex128)


def run(step: Callable[..., Any], state: Any) -> list[tuple[str, Any]]:
    results = []
    for x, labels in zip(X, LABELS, strict=True):
        state, result = step(state, x, labels)
        results.append(result)
    leaves = jax.tree_util.tree_leaves_with_path((state, results))
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def check(name: str, mesh: Mesh, search: str) -> None:
    step, state = STATES[name]()
    sharded = jaxplan.auto_shard(
        step, mesh, hardware="tpu-v5e", options={"search": search, "compare_templates": False}
    )
    found, wanted = run(sharded, state), run(jax.jit(step), state)
    assert [path for path, _ in found] == [path for path, _ in wanted]
    for (path, mine), (_, theirs) in zip(found, wanted, strict=True):
        ours, expected = jax.typeof(mine), jax.typeof(theirs)
        assert (ours.shape, ours.dtype, ours.weak_type) == (expected.shape, expected.dtype, expected.weak_type), path
        mine, theirs = comparable(mine), comparable(theirs)
        assert np.abs(mine - theirs).max(initial=0.0) <= 2e-5 * np.abs(theirs).max(initial=0.0), path


QUICK = ("every leaf", "Python scalars")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in STATES]
)
def test_cut_as_fsdp_it_equals_the_unsharded_run(name: str, mesh_4x2: Mesh) -> None:
    check(name, mesh_4x2, "fsdp")


@pytest.mark.slow
@pytest.mark.parametrize("name", STATES)
def test_planned_freely_it_equals_the_unsharded_run(name: str, mesh_4x2: Mesh) -> None:
    check(name, mesh_4x2, "ilp")
