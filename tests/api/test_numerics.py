"""Every model's tiny config: three planned steps over eight devices equal three steps on one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxplan
import models

STEPS = 3

# Relative to the leaf's largest magnitude.  f32 carries 2^-24; what is summed over devices is summed in
# another order, and Adam's division carries that on for three steps.
F32_TOLERANCE = 1e-5

# What cancels (a bias before a normalisation) keeps some digits fewer than f64's 1e-16.
F64_TOLERANCE = 1e-9

# bf16 keeps 8 bits of mantissa: one rounding of a value is off by up to 2^-8 of it.
BF16_ROUNDING = 2.0**-8

MESHES = {
    "8": (("data", 8),),
    "4x2": (("data", 4), ("model", 2)),
    "2x2x2": (("data", 2), ("fsdp", 2), ("model", 2)),
}

SEARCHES = ("fsdp", "megatron", "tensor_fsdp", "zero1", "ilp")

VARIANTS = tuple(
    (model, config)
    for model in models.names()
    for config in models.get(model).CONFIGS
    if config.startswith("tiny") and config not in ("tiny", "tiny-bf16")
)


def mesh_of(name: str) -> Mesh:
    """Over all the devices there are; `conftest` has forced eight."""
    sizes = MESHES[name]
    devices = np.array(jax.devices()[:8]).reshape([size for _, size in sizes])
    return Mesh(devices, [axis for axis, _ in sizes])


def as_host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


@functools.cache
def inputs(model: str, config_name: str) -> tuple[Any, tuple[Any, ...]]:
    """The state at step 0 and the batches, in host memory: a donated copy leaves them as they are."""
    module, config = models.get(model), models.get_config(model, config_name)
    state = jax.jit(lambda key: module.init_state(config, key))(jax.random.key(0))
    make = jax.jit(lambda key: module.make_batch(config, key))
    return as_host(state), tuple(as_host(make(jax.random.key(1 + i))) for i in range(STEPS))


def run(step: Any, state: Any, batches: Sequence[Any]) -> list[tuple[str, np.ndarray]]:
    """Path and value of every leaf of the last state and of every step's metrics."""
    metrics = []
    for batch in batches:
        state, numbers = step(state, batch)
        metrics.append(numbers)
    leaves = jax.tree.leaves_with_path({"state": state, "metrics": metrics})
    return [(jax.tree_util.keystr(path), np.asarray(leaf, np.float64)) for path, leaf in leaves]


@functools.cache
def unsharded(model: str, config_name: str) -> list[tuple[str, np.ndarray]]:
    state, batches = inputs(model, config_name)
    return run(
        jax.jit(models.get(model).make_train_step(models.get_config(model, config_name))), state, batches
    )


def distances(found: list[tuple[str, np.ndarray]], wanted: list[tuple[str, np.ndarray]]) -> dict[str, float]:
    """The largest difference of every leaf, relative to its largest magnitude."""
    assert [path for path, _ in found] == [path for path, _ in wanted]
    return {
        path: float(np.abs(a - b).max(initial=0.0) / max(np.abs(b).max(initial=0.0), 1e-30))
        for (path, a), (_, b) in zip(found, wanted, strict=True)
    }


def cuts(plan: jaxplan.Plan, search: str) -> bool:
    """Whether a template cuts parameters or moments; whether the free search cuts anything at all."""
    if search == "ilp":
        tensors: list[Any] = [*plan.inputs, *plan.constraints]
    else:
        tensors = [t for t in plan.inputs if t.kind in ("parameter", "optimizer")]
    return any(t.layout.shards(plan.axes) > 1 for t in tensors)


def planned(model: str, config_name: str, mesh_name: str, search: str) -> list[tuple[str, np.ndarray]]:
    """The planned run; fails unless the plan cuts arguments, and the state comes back cut as it says."""
    return plan_and_run(model, config_name, mesh_name, search)[1]


def plan_and_run(
    model: str, config_name: str, mesh_name: str, search: str
) -> tuple[jaxplan.Plan, list[tuple[str, np.ndarray]]]:
    state, batches = inputs(model, config_name)

    def sharded(memory_budget: int | None, hardware: str = "tpu-v5e") -> tuple[Any, jaxplan.Plan]:
        step = jaxplan.auto_shard(
            models.get(model).make_train_step(models.get_config(model, config_name)),
            mesh_of(mesh_name),
            donate_argnums=0,
            hardware=hardware,
            memory_budget=memory_budget,
            options={"search": search, "compare_templates": False},
        )
        return step, step.plan(state, batches[0])

    step, plan = sharded(None)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    while not cuts(plan, search):
        # The whole state on every device is fastest for models as small as these: leave no room for it, nor for
        # whatever else there was room for instead.  Where a TPU pads a part of a kernel to what it all takes, cutting
        # frees nothing: on a GPU it does.
        try:
            step, plan = sharded(plan.cost.peak_bytes - whole // 4, plan.hardware)
        except jaxplan.InfeasibleError:
            assert plan.hardware == "tpu-v5e"
            step, plan = sharded(None, "h100")
    assert plan.search == search
    assert cuts(plan, search)
    assert any(c.wire_bytes > 0 for c in plan.collectives)
    shards = {t.path: t.layout.shards(plan.axes) for t in plan.inputs}

    def checked_step(state: Any, batch: Any) -> tuple[Any, Any]:
        after, metrics = step(state, batch)
        for tensor, leaf in zip(plan.inputs, jax.tree.leaves(after), strict=False):
            assert leaf.addressable_shards[0].data.size * shards[tensor.path] == leaf.size, tensor.path
        return after, metrics

    return plan, run(checked_step, state, batches)


def wider(tree: Any) -> Any:
    return jax.tree.map(lambda a: a.astype(np.float64) if a.dtype == np.float32 else a, tree)


@functools.cache
def own_rounding(model: str, config_name: str) -> dict[str, float]:
    """How far f32 on one device is from f64, leaf by leaf, and from itself when every parameter is off by a rounding.

    Where terms cancel to nothing (softmax cancels the gradient of a key's bias) what is left is rounding alone, in f64
    too if some sums of it are kept in f32.  Its size shows in how it changes with roundings of another pattern.
    """

    def rounded(leaf: np.ndarray, random: np.random.Generator) -> np.ndarray:
        if leaf.dtype != np.float32:
            return leaf
        return np.where(random.integers(2, size=leaf.shape) == 1, np.nextafter(leaf, np.float32(np.inf)), leaf)

    state, batches = inputs(model, config_name)
    step = jax.jit(models.get(model).make_train_step(models.get_config(model, config_name)))
    found = []
    for seed in range(4):
        random = np.random.default_rng(seed)
        params = jax.tree.map(lambda leaf: rounded(leaf, random), state["params"])  # noqa: B023
        found.append(distances(run(step, {**state, "params": params}, batches), unsharded(model, config_name)))
    with jax.enable_x64(True):
        config = dataclasses.replace(models.get_config(model, config_name), dtype="float64")
        exact = run(jax.jit(models.get(model).make_train_step(config)), wider(state), wider(batches))
    found.append(distances(unsharded(model, config_name), exact))
    return {path: max(one[path] for one in found) for path in found[0]}


def check_f32(model: str, config_name: str, mesh_name: str, search: str) -> None:
    """Within 1e-5; a leaf of sums that nearly cancel (biases of attention), which f32 on one device gets as wrong
    as that by itself, within a few times its own rounding; else the same step, laid out alike, is exact in f64.

    (A convolution's rounding depends on its local shape: what a plan's blocks differ by in the first step, layers
    normalised by a few rows multiply in the next two.)
    """
    plan, found = plan_and_run(model, config_name, mesh_name, search)
    far = distances(found, unsharded(model, config_name))
    beyond = {path: d for path, d in far.items() if not d <= F32_TOLERANCE}
    if beyond:
        own = own_rounding(model, config_name)
        beyond = {path: d for path, d in beyond.items() if not d <= 4 * own[path]}
    if beyond:
        exact = in_f64(model, config_name, mesh_name, plan)
        beyond = {path: d for path, d in exact.items() if not d <= F64_TOLERANCE}
    assert beyond == {}


# The quick set: every model, every search and every mesh at least once.  `make test-slow` runs all of them.
QUICK = {
    ("gpt", "4x2", "fsdp"),
    ("llama", "4x2", "tensor_fsdp"),
    ("lstm", "4x2", "fsdp"), ("lstm", "4x2", "megatron"),
    ("mlp", "8", "zero1"), ("mlp", "4x2", "ilp"), ("mlp", "4x2", "tensor_fsdp"), ("mlp", "2x2x2", "megatron"),
    ("moe", "4x2", "fsdp"),
    ("resnet", "4x2", "zero1"), ("resnet", "8", "fsdp"),
    ("vit", "4x2", "zero1"),
}  # fmt: skip

CASES = [
    pytest.param(model, mesh, search, marks=() if (model, mesh, search) in QUICK else pytest.mark.slow)
    for model in models.names()
    for mesh in MESHES
    for search in SEARCHES
    if search != "tensor_fsdp" or mesh != "8"  # it needs two axes
]


@pytest.mark.parametrize(("model", "mesh", "search"), CASES)
def test_three_planned_steps_equal_three_on_one_device(model: str, mesh: str, search: str) -> None:
    check_f32(model, "tiny", mesh, search)


@pytest.mark.parametrize(
    ("model", "config_name"),
    [
        pytest.param(*variant, marks=() if variant == ("gpt", "tiny-scan-remat") else pytest.mark.slow)
        for variant in VARIANTS
    ],
)
def test_variants_of_the_models_too(model: str, config_name: str) -> None:
    """Scanned and rematerialised layers, projections, bottlenecks."""
    check_f32(model, config_name, "4x2", "fsdp")


@pytest.mark.parametrize(
    ("model", "search"),
    [
        pytest.param(model, search, marks=() if (model, search) == ("mlp", "megatron") else pytest.mark.slow)
        for model in models.names()
        for search in ("fsdp", "megatron")
    ],
)
def test_bf16_within_its_own_rounding(model: str, search: str) -> None:
    """Sharding moves a bf16 run no farther than bf16 itself moved it from the f32 run of the same state.

    Where it does (normalised by a few rows, roundings of another order grow in three steps as they like), the same
    step laid out alike is run in f64, and there it is what one device computes.
    """
    own = distances(unsharded(model, "tiny-bf16"), unsharded(model, "tiny"))
    plan, found = plan_and_run(model, "tiny-bf16", "4x2", search)
    far = distances(found, unsharded(model, "tiny-bf16"))
    if any(not d <= 2 * own[path] + BF16_ROUNDING for path, d in far.items()):
        far = in_f64(model, "tiny-bf16", "4x2", plan)
        assert {path: d for path, d in far.items() if not d <= F64_TOLERANCE} == {}


def in_f64(model: str, config_name: str, mesh_name: str, plan: jaxplan.Plan) -> dict[str, float]:
    """How far the step in f64, its arguments laid out as `plan` says, is from f64 on one device."""
    with jax.enable_x64(True):
        state, batches = wider(inputs(model, config_name))
        config = dataclasses.replace(models.get_config(model, config_name), dtype="float64")
        step = models.get(model).make_train_step(config)
        sharded = jaxplan.auto_shard(
            step, mesh_of(mesh_name), hardware="tpu-v5e", constraints=plan.specs, donate_argnums=0,
            options={"compare_templates": False},
        )  # fmt: skip
        return distances(run(sharded, state, batches), run(jax.jit(step), state, batches))
