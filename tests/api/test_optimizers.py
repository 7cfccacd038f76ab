"""Optimizers of optax, each on two models, each called as optax documents it: sharded equals unsharded.

Everything is computed in f64, so that what is left of a difference is no rounding that an optimizer amplifies.
The parameters' names are those of optimizer states, so that whoever goes by names goes wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh
from optax import contrib

import jaxplan
from jaxplan.api.kinds import input_kinds
from jaxplan.ir import trace
from jaxplan.sharding import graph_rules

RANDOM = np.random.default_rng(0)
STEPS = 3
TOLERANCE = 1e-9

REGRESSOR = {
    "mu": {"count": RANDOM.normal(size=(16, 32)) * 0.2, "trace": np.zeros(32)},
    "nu": {"count": RANDOM.normal(size=(32, 8)) * 0.2, "trace": np.zeros(8), "scale": np.ones(())},
}
REGRESSOR_BATCHES = [(RANDOM.normal(size=(32, 16)), RANDOM.normal(size=(32, 8))) for _ in range(STEPS)]
LANGUAGE = {
    "acc_grads": RANDOM.normal(size=(64, 16)) * 0.3,
    "z": RANDOM.normal(size=(3, 16, 16)) * 0.2,
    "inner_state": [np.ones((3, 16)), np.ones(16)],
}
LANGUAGE_BATCHES = [(RANDOM.integers(0, 64, (8, 8)).astype(np.int32),) for _ in range(STEPS)]


def regression_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    first, second = params["mu"], params["nu"]
    hidden = jnp.tanh(x @ first["count"] + first["trace"])
    return jnp.mean((second["scale"] * (hidden @ second["count"]) + second["trace"] - y) ** 2)


def language_loss(params: Any, tokens: jax.Array) -> jax.Array:
    def layer(x: jax.Array, weights: Any) -> Any:
        matrix, gain = weights
        return x + gain * jnp.tanh(x @ matrix), None

    gains, last = params["inner_state"]
    x, _ = lax.scan(layer, params["acc_grads"][tokens], (params["z"], gains))
    logits = (x * last) @ params["acc_grads"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return losses.mean()


MODELS: dict[str, tuple[Callable[..., jax.Array], Any, list[tuple[Any, ...]]]] = {
    "regressor": (regression_loss, REGRESSOR, REGRESSOR_BATCHES),
    "language": (language_loss, LANGUAGE, LANGUAGE_BATCHES),
}


def by_rank(params: Any) -> Any:
    return jax.tree.map(lambda leaf: "matrices" if leaf.ndim >= 2 else "others", params)


def is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "muon": lambda: contrib.muon(1e-2),
    "galore": lambda: contrib.galore(1e-2, rank=4, update_proj_gap=2),
    "lion": lambda: optax.lion(1e-3),
    "masked": lambda: optax.chain(optax.masked(optax.add_decayed_weights(0.1), is_matrix), optax.sgd(1e-2, 0.9)),
    "multi_transform": lambda: optax.multi_transform(
        {"matrices": optax.adamw(1e-2), "others": optax.sgd(1e-2, momentum=0.9)}, by_rank
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2).gradient_transformation(),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=3),
    "schedule_free": lambda: contrib.schedule_free_adamw(1e-2, warmup_steps=2),
    "EMA": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.ema(0.9), optax.scale(-0.1)),
    "lamb": lambda: optax.lamb(1e-2),
    "prodigy": lambda: contrib.prodigy(1.0),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 0.0, 10)),
}


def gradient_step(loss: Callable[..., jax.Array], tx: optax.GradientTransformation) -> Callable[..., Any]:
    def step(state: Any, *batch: Any) -> Any:
        params, opt_state = state
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def schedule_free_step(loss: Callable[..., jax.Array], tx: optax.GradientTransformation) -> Callable[..., Any]:
    """Gradients at the training point, the loss at the average that is kept: see optax.contrib.schedule_free."""
    inner = gradient_step(loss, tx)

    def step(state: Any, *batch: Any) -> Any:
        state, value = inner(state, *batch)
        averaged = contrib.schedule_free_eval_params(state[1], state[0])
        return state, (value, loss(averaged, *batch))

    return step


def lbfgs_step(loss: Callable[..., jax.Array], tx: optax.GradientTransformationExtraArgs) -> Callable[..., Any]:
    """The zoom line search evaluates the model in a while loop, and hands its last value and gradient on."""

    def step(state: Any, *batch: Any) -> Any:
        params, opt_state = state

        def value_fn(params: Any) -> jax.Array:
            return loss(params, *batch)

        # On batches that change, the stored value is of another function: it is computed anew.
        value, gradients = jax.value_and_grad(value_fn)(params)
        updates, opt_state = tx.update(
            gradients, opt_state, params, value=value, grad=gradients, value_fn=value_fn
        )
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def stored_lbfgs_step(
    loss: Callable[..., jax.Array], tx: optax.GradientTransformationExtraArgs
) -> Callable[..., Any]:
    """As optax documents it for one batch: value and gradient come out of the line search's state where they can."""

    def step(state: Any, *batch: Any) -> Any:
        params, opt_state = state

        def value_fn(params: Any) -> jax.Array:
            return loss(params, *batch)

        value, gradients = optax.value_and_grad_from_state(value_fn)(params, state=opt_state)
        updates, opt_state = tx.update(
            gradients, opt_state, params, value=value, grad=gradients, value_fn=value_fn
        )
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def averaged_step(loss: Callable[..., jax.Array], tx: optax.GradientTransformation) -> Callable[..., Any]:
    """Adam, and an exponential moving average of the parameters beside them, as generative models keep."""

    def step(state: Any, *batch: Any) -> Any:
        (params, opt_state), average = state
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        return ((params, opt_state), optax.incremental_update(params, average, 0.1)), value

    return step


def wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float64) if np.issubdtype(x.dtype, np.floating) else x, tree)


def case(optimizer: str, model: str) -> tuple[Callable[..., Any], Any, list[tuple[Any, ...]]]:
    """Step, first state and batches; to be called with x64 enabled."""
    loss, params, batches = MODELS[model]
    params = wide(params)
    batches = [wide(batch) for batch in batches]
    if optimizer in ("lbfgs", "lbfgs, one batch"):
        tx = optax.lbfgs(memory_size=3, linesearch=optax.scale_by_zoom_linesearch(max_linesearch_steps=4))
        make = lbfgs_step if optimizer == "lbfgs" else stored_lbfgs_step
        batches = batches if optimizer == "lbfgs" else [batches[0]] * STEPS
        return make(loss, tx), (params, tx.init(params)), batches
    if optimizer == "EMA of parameters":
        tx = optax.adam(1e-2)
        return averaged_step(loss, tx), ((params, tx.init(params)), jax.tree.map(jnp.copy, params)), batches
    tx = OPTIMIZERS[optimizer.removesuffix(", evaluated")]()
    if optimizer == "schedule_free, evaluated":
        return schedule_free_step(loss, tx), (params, tx.init(params)), batches
    if optimizer == "apply_if_finite" and model == "regressor":
        batches[1] = (batches[1][0].at[0, 0].set(jnp.inf), batches[1][1])  # a step that is skipped
    return gradient_step(loss, tx), (params, tx.init(params)), batches


def run(step: Callable[..., Any], state: Any, batches: list[tuple[Any, ...]]) -> list[tuple[str, np.ndarray]]:
    results = []
    for batch in batches:
        state, result = step(state, *batch)
        results.append(result)
    leaves = jax.tree_util.tree_leaves_with_path((state, results))
    return [(jax.tree_util.keystr(path), np.asarray(leaf)) for path, leaf in leaves]


NAMES = (*OPTIMIZERS, "schedule_free, evaluated", "lbfgs", "lbfgs, one batch", "EMA of parameters")
QUICK = {
    ("muon", "regressor"),
    ("galore", "regressor"),
    ("MultiSteps", "regressor"),
    ("apply_if_finite", "regressor"),
    ("multi_transform", "regressor"),
}


def planned(optimizer: str, model: str, mesh: Mesh, search: str) -> tuple[Any, Any, list[tuple[Any, ...]], Any]:
    step, state, batches = case(optimizer, model)
    sharded = jaxplan.auto_shard(
        step, mesh, donate_argnums=0, hardware="tpu-v5e", options={"search": search, "compare_templates": False}
    )
    return step, state, batches, sharded


@pytest.mark.parametrize(
    ("optimizer", "model"),
    [
        pytest.param(o, m, marks=() if (o, m) in QUICK else pytest.mark.slow) for o in NAMES for m in MODELS
    ],
)
def test_state_cut_everywhere_equals_the_unsharded_run(optimizer: str, model: str, mesh_4x2: Mesh) -> None:
    with jax.enable_x64(True):
        step, state, batches, sharded = planned(optimizer, model, mesh_4x2, "fsdp")
        plan = sharded.plan(state, *batches[0])
        assert any(t.kind == "optimizer" and t.layout.shards(plan.axes) == 8 for t in plan.inputs)
        compare(run(sharded, jax.tree.map(jnp.copy, state), batches), run(jax.jit(step), state, batches))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("optimizer", NAMES)
def test_planned_freely_it_equals_the_unsharded_run(optimizer: str, model: str, mesh_4x2: Mesh) -> None:
    with jax.enable_x64(True):
        step, state, batches, sharded = planned(optimizer, model, mesh_4x2, "ilp")
        compare(run(sharded, jax.tree.map(jnp.copy, state), batches), run(jax.jit(step), state, batches))


def compare(found: list[tuple[str, np.ndarray]], wanted: list[tuple[str, np.ndarray]]) -> None:
    assert [path for path, _ in found] == [path for path, _ in wanted]
    wrong = {}
    for (path, mine), (_, theirs) in zip(found, wanted, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), path
        largest = np.abs(theirs.astype(np.float64)).max(initial=0.0)
        if not np.allclose(mine, theirs, rtol=0.0, atol=TOLERANCE * largest, equal_nan=True):
            wrong[path] = (mine, theirs)
    assert wrong == {}


# An evaluation at the average is a loss that the average's other half takes part in.
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("optimizer", [name for name in NAMES if name != "schedule_free, evaluated"])
def test_parameters_are_told_from_optimizer_state_by_what_the_loss_needs(optimizer: str, model: str) -> None:
    """Momentum that goes through matrix products (muon, galore, lbfgs) is no parameter, whatever its name.

    Scalars aside: a line search's stored loss is a loss.
    """
    with jax.enable_x64(True):
        step, state, batches = case(optimizer, model)
        traced = trace(step, (state, *batches[0]), {})
    kinds = input_kinds(traced.graph, graph_rules(traced.graph))
    cut = [(leaf.path, kind) for leaf, kind in zip(traced.inputs, kinds, strict=True) if leaf.shape]
    found = {path for path, kind in cut if kind == "parameter"}
    params = "state/0/0" if optimizer == "EMA of parameters" else "state/0"
    assert found == {path for path, _ in cut if path.startswith(f"{params}/")}
    assert len(found) == len([leaf for leaf in jax.tree.leaves(MODELS[model][1]) if leaf.ndim])
