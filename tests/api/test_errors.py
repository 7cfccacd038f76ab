"""Bad input: each refusal names the thing, the values, the rule and the way out."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplan

F32 = jnp.float32


def step(state: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    loss, grad = jax.value_and_grad(lambda s: jnp.mean((x @ s["kernel"] + s["bias"]) ** 2))(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grad), loss


def shapes(rows: int = 16, width: int = 64) -> tuple[dict[str, Any], Any]:
    state = {
        "kernel": jax.ShapeDtypeStruct((width, width), F32),
        "bias": jax.ShapeDtypeStruct((width,), F32),
    }
    return state, jax.ShapeDtypeStruct((rows, width), F32)


def arrays(rows: int = 16, width: int = 64) -> tuple[dict[str, jax.Array], jax.Array]:
    random = np.random.default_rng(0)
    state, x = jax.tree.map(lambda s: jnp.asarray(random.standard_normal(s.shape), F32), shapes(rows, width))
    return state, x


def refused(kind: type[Exception], *words: str) -> Any:
    """`pytest.raises` of an error whose text has all these words, in this order."""
    return pytest.raises(kind, match="(?s)" + ".*".join(re.escape(word) for word in words))


# -- memory ---------------------------------------------------------------------------------------------------


def test_an_impossible_budget_names_the_least_peak_its_parts_and_the_smallest_mesh(mesh_4x2: Mesh) -> None:
    state, x = shapes(width=1024)
    # The kernel's eighth alone is 512 KiB.
    with refused(
        jaxplan.InfeasibleError,
        "no plan for `step` on mesh (data=4, model=2) fits 256 KiB a device",
        "Smallest reachable peak: ",
        " made of ",
        "raise `memory_budget` to ",
        "use a larger mesh: (",
        "donate the state (donate_argnums=0)",
    ):
        jaxplan.plan(step, mesh_4x2, state, x, memory_budget="256KiB")


def test_the_budget_that_the_error_asks_for_is_enough(mesh_4x2: Mesh) -> None:
    state, x = shapes(width=1024)
    with pytest.raises(jaxplan.InfeasibleError) as caught:
        jaxplan.plan(step, mesh_4x2, state, x, memory_budget="256KiB", donate_argnums=0)
    asked = re.search(r"raise `memory_budget` to ([\d.]+) (\w+)", str(caught.value))
    assert asked is not None
    budget = "".join(asked.groups())
    plan = jaxplan.plan(step, mesh_4x2, state, x, memory_budget=budget, donate_argnums=0)
    assert plan.cost.peak_bytes <= plan.budget_bytes


def test_the_mesh_that_the_error_asks_for_is_enough(mesh_4x2: Mesh) -> None:
    state, x = shapes(width=1024)
    with pytest.raises(jaxplan.InfeasibleError) as caught:
        jaxplan.plan(step, mesh_4x2, state, x, memory_budget="400KiB", donate_argnums=0)
    asked = re.search(r"use a larger mesh: \(data=(\d+), model=(\d+)\) fits", str(caught.value))
    assert asked is not None
    sizes = tuple(int(size) for size in asked.groups())
    mesh = AbstractMesh(sizes, ("data", "model"))
    plan = jaxplan.plan(step, mesh, state, x, memory_budget="400KiB", donate_argnums=0, hardware="cpu-host")
    assert plan.cost.peak_bytes <= plan.budget_bytes


def test_nothing_well_under_the_least_peak_is_feasible(mesh_4x2: Mesh) -> None:
    state, x = shapes(width=1024)
    with pytest.raises(jaxplan.InfeasibleError) as caught:
        jaxplan.plan(step, mesh_4x2, state, x, memory_budget="256KiB")
    said = re.search(r"Smallest reachable peak: ([\d.]+) (\w+)", str(caught.value))
    assert said is not None
    number, unit = said.groups()
    with pytest.raises(jaxplan.InfeasibleError):
        jaxplan.plan(step, mesh_4x2, state, x, memory_budget=f"{0.8 * float(number):.3f}{unit}")


# -- constraints ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constraints", "words"),
    [
        (
            {"state/kernal": P("data")},
            ["'state/kernal' matches no argument or result", "did you mean", "kernel"],
        ),
        ({"state/kernel": P("rows")}, ["state/kernel", "names axis 'rows'", "the mesh has data, model"]),
        (
            {"x": P(("data", "model"))},
            ["x", "cuts dimension 0 of float32[12, 64] in 8 pieces", "pad it to 16"],
        ),
        ({"state/bias": P(None, "data")}, ["state/bias", "has 2 entries", "float32[64]", "1 dimensions"]),
        ({"state/kernel": P("data", "data")}, ["state/kernel", "'data'", "twice"]),
        ({"state/kernel": "sharded"}, ["state/kernel", "'sharded'", 'write a PartitionSpec or "replicated"']),
        ({"state/kernel": 3}, ["state/kernel", "3 is neither a PartitionSpec nor"]),
        ({"state/kernel": ("data", None)}, ["state/kernel", "write jax.sharding.PartitionSpec('data', None)"]),
        (
            {"state/*": P("data"), "state/kernel": "replicated"},
            [
                "state/kernel",
                "'state/kernel' says replicated",
                "'state/*' says",
                "'data'",
                "keep one of them",
            ],
        ),
    ],
    ids=["nothing", "axis", "divide", "rank", "twice", "word", "type", "tuple", "clash"],
)
def test_a_constraint_that_cannot_be_met(
    mesh_4x2: Mesh, constraints: dict[str, Any], words: list[str]
) -> None:
    state, x = shapes(rows=12)
    with refused(jaxplan.ConstraintError, "constraints can't be met", *words):
        jaxplan.plan(step, mesh_4x2, state, x, constraints=constraints)


def test_a_constraint_on_a_tree_is_one_on_its_leaves(mesh_4x2: Mesh) -> None:
    state, x = shapes()
    plan = jaxplan.plan(step, mesh_4x2, state, x, constraints={"state": P("model")})
    assert {str(spec) for path, spec in plan.specs.items() if path.startswith("state/")} == {str(P("model"))}


def test_all_bad_constraints_are_named_at_once(mesh_4x2: Mesh) -> None:
    state, x = shapes()
    with refused(jaxplan.ConstraintError, "state/kernel: ", "'rows'", "'nowhere' matches no"):
        jaxplan.plan(step, mesh_4x2, state, x, constraints={"state/kernel": P("rows"), "nowhere": P()})


def test_constraints_that_clash_across_an_alias(mesh_4x2: Mesh) -> None:
    """State keeps one sharding: its argument and its result can't be pinned to two."""
    state, x = shapes()
    with refused(
        jaxplan.ConstraintError, "state/kernel: ", "'data'", "result/0/kernel is its next value", "'model'"
    ):
        jaxplan.plan(
            step, mesh_4x2, state, x, constraints={"state/kernel": P("data"), "result/0/kernel": P("model")}
        )


# -- mesh, hardware, options ----------------------------------------------------------------------------------


def test_unknown_hardware(mesh_4x2: Mesh) -> None:
    with refused(jaxplan.HardwareError, "tpu-v99", "tpu-v5e"):
        jaxplan.auto_shard(step, mesh_4x2, hardware="tpu-v99")


def test_an_abstract_mesh_needs_hardware() -> None:
    with refused(jaxplan.MeshError, "an AbstractMesh has no devices", 'hardware="tpu-v5e"'):
        jaxplan.auto_shard(step, AbstractMesh((8,), ("data",)))


def test_not_a_mesh() -> None:
    with refused(jaxplan.MeshError, "got dict", "jax.make_mesh((4, 2)"):
        jaxplan.auto_shard(step, {"data": 8})


def test_no_mesh_at_all() -> None:
    with refused(jaxplan.ArgumentError, "needs a mesh", "jax.set_mesh(mesh)"):
        jaxplan.auto_shard(step)


def test_the_step_is_no_function(mesh_4x2: Mesh) -> None:
    with refused(jaxplan.ArgumentError, "must be the step, a function; got dict"):
        jaxplan.auto_shard({}, mesh_4x2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"serach": "ilp"}, ["unknown options ['serach']", "'search'"]),
        ({"search": "magic"}, ["options.search='magic'", "ilp", "mcmc", "zero1"]),
        ({"overlap": 1.5}, ["options.overlap=1.5", "[0, 1)"]),
        ({"time_limit_s": -1}, ["options.time_limit_s=-1", "positive"]),
        ({"while_trips": 0}, ["options.while_trips=0", "positive"]),
    ],
    ids=["field", "search", "overlap", "time", "trips"],
)
def test_bad_options(mesh_4x2: Mesh, options: dict[str, Any], words: list[str]) -> None:
    with refused(jaxplan.ArgumentError, *words):
        jaxplan.auto_shard(step, mesh_4x2, options=options)


def test_a_budget_that_is_no_size(mesh_4x2: Mesh) -> None:
    with refused(ValueError, "lots"):
        jaxplan.auto_shard(step, mesh_4x2, memory_budget="lots")
    with refused(ValueError, "0.8 is less than a byte"):  # a share of the memory is no size
        jaxplan.auto_shard(step, mesh_4x2, memory_budget=0.8)  # type: ignore[arg-type]


# -- the step -------------------------------------------------------------------------------------------------


def test_a_step_that_jax_cannot_trace_fails_with_jax_s_own_error(mesh_4x2: Mesh) -> None:
    def branches_on_a_value(x: jax.Array) -> jax.Array:
        return x if x.sum() > 0 else -x

    with pytest.raises(jax.errors.TracerBoolConversionError):
        jaxplan.plan(branches_on_a_value, mesh_4x2, jnp.ones(8))


def test_an_unbound_pmap_axis_gets_its_own_advice(mesh_4x2: Mesh) -> None:
    def pmapped(x: jax.Array) -> jax.Array:
        return jax.lax.pmean(x, "batch")

    with refused(jaxplan.TraceError, "`pmapped` can't be traced", "batch", "global batch"):
        jaxplan.plan(pmapped, mesh_4x2, jnp.ones(8))


def test_state_that_drifts_is_named(mesh_4x2: Mesh) -> None:
    def drifts(state: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        return {"a": state["a"] + x, "b": state["b"].astype(jnp.bfloat16), "c": state["c"] * 2}

    state = {name: jnp.ones(8) for name in "abc"}
    with refused(
        jaxplan.TraceError,
        "state `state` of `drifts`",
        "state/b: goes in as float32[8], comes out as bfloat16[8]",
        "Cast or reshape",
    ) as caught:
        jaxplan.plan(drifts, mesh_4x2, state, jnp.ones(8))
    assert "state/a" not in str(caught.value)


# -- arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((8.0, {"mode": "train"}), ["`options/mode` is a str, 'train'", "static_argnums"]),
        ((8.0, [1.0, jnp.sin]), ["`options/1` is a", "static_argnums"]),
        ((object(), 1.0), ["`x` is a object", "static_argnums"]),
    ],
)
def test_an_argument_that_is_no_array_is_named(mesh_4x2: Mesh, arguments: Any, words: list[str]) -> None:
    with refused(jaxplan.ArgumentError, *words):
        jaxplan.auto_shard(lambda x, options: x, mesh_4x2)(*arguments)


def test_a_mutable_array_is_named_beside_static_arguments(mesh_4x2: Mesh) -> None:
    with refused(jaxplan.ArgumentError, "`x` is a mutable array", "ref[...]"):
        jaxplan.auto_shard(lambda n, x: x[...] * n, mesh_4x2, static_argnums=0)(3, jax.new_ref(jnp.ones(8)))


@pytest.mark.parametrize("which", ["donate_argnums", "static_argnums"])
def test_numbers_of_arguments_that_there_are_not(mesh_4x2: Mesh, which: str) -> None:
    with refused(jaxplan.ArgumentError, f"{which}=(0, 2): `step` has 2 positional arguments"):
        jaxplan.auto_shard(step, mesh_4x2, **{which: (0, 2)})
    with refused(jaxplan.ArgumentError, f"{which}='x' must be numbers"):
        jaxplan.auto_shard(step, mesh_4x2, **{which: "x"})
    jaxplan.auto_shard(lambda *every: every, mesh_4x2, **{which: 2})


def test_what_was_donated_is_named_when_it_is_passed_again(mesh_4x2: Mesh) -> None:
    planned = jaxplan.auto_shard(step, mesh_4x2, donate_argnums=0, options={"compare_templates": False})
    state, x = arrays()
    planned(state, x)
    jax.tree.map(lambda leaf: leaf.delete(), state)  # as donating does where the layout allows it
    with refused(jaxplan.ArgumentError, "arguments of `step` are deleted: state/bias, state/kernel", "returned"):
        planned(state, x)


def test_a_batch_that_no_axis_divides_is_warned_of(mesh_8: Mesh) -> None:
    state, x = shapes(rows=8190)
    plan = jaxplan.plan(step, mesh_8, state, x, hardware="tpu-v5e")
    (told,) = [warning for warning in plan.warnings if "alike" in warning]
    assert told.startswith("all 8 devices of `data` do ") and "dimension 0 of x, 8190, is not divisible by 8" in told
    assert told.endswith("Pad the batch to 8192 or cut it to 8184")
    assert not jaxplan.plan(step, mesh_8, *shapes(rows=8192), hardware="tpu-v5e").warnings


def test_the_microbatches_of_a_loop_are_no_batch_to_pad(mesh_8: Mesh) -> None:
    def accumulated(state: Any, batches: Any) -> Any:
        return jax.lax.scan(lambda state, x: step(state, x), state, batches)

    state, x = shapes(rows=8190)
    batches = jax.ShapeDtypeStruct((3, *x.shape), x.dtype)
    plan = jaxplan.plan(accumulated, mesh_8, state, batches, hardware="tpu-v5e")
    (told,) = [warning for warning in plan.warnings if "alike" in warning]
    assert "dimension 1 of batches, 8190, is not divisible by 8" in told


def test_the_two_numbers_of_a_key_are_no_batch_to_pad() -> None:
    def step(params: Any, key: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.tanh(jax.random.normal(key, (6, 6)) @ params["w"]).sum()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    shapes = {"w": jax.ShapeDtypeStruct((6, 6), jnp.float32)}, jax.random.PRNGKey(0)
    mesh = AbstractMesh((4,), ("data",))
    assert not jaxplan.plan(step, mesh, *shapes, hardware="tpu-v5e", donate_argnums=0).warnings


def test_an_unhashable_static_argument(mesh_4x2: Mesh) -> None:
    def scaled(x: jax.Array, factors: list[float]) -> jax.Array:
        return x * factors[0]

    with refused(jaxplan.ArgumentError, "static argument of `scaled` can't be hashed", "[2.0]", "tuple"):
        jaxplan.auto_shard(scaled, mesh_4x2, static_argnums=1)(jnp.ones(8), [2.0])


def test_an_argument_on_another_sharding_is_named(mesh_4x2: Mesh) -> None:
    sharded = jaxplan.auto_shard(step, mesh_4x2, constraints={"state/kernel": P("data")})
    state, x = arrays()
    state["kernel"] = jax.device_put(state["kernel"], NamedSharding(mesh_4x2, P(None, "model")))
    for _ in range(2):  # the first call plans, the second takes the fast way
        with refused(
            jaxplan.ArgumentError,
            "1 arguments of `step` already lie on another sharding or other devices",
            "state/kernel: lies on",
            "planned is",
            "'data'",
            "on mesh {'data': 4, 'model': 2}",
            "jax.device_put(argument, plan.in_shardings[i])",
        ):
            sharded(state, x)
    moved = jax.device_put(state, sharded.plan(state, x).in_shardings[0])
    jax.block_until_ready(sharded(moved, x))


def test_an_argument_on_another_device_set_is_named(mesh_4x2: Mesh) -> None:
    sharded = jaxplan.auto_shard(step, mesh_4x2)
    state, x = arrays()
    half = Mesh(np.array(jax.devices()[4:8]), ("data",))
    elsewhere = jax.device_put(x, NamedSharding(half, P("data")))
    with refused(jaxplan.ArgumentError, "x: lies on", "planned is"):
        sharded(state, elsewhere)


def test_init_before_any_plan(mesh_4x2: Mesh) -> None:
    def make_state() -> dict[str, jax.Array]:
        return {"kernel": jnp.zeros((64, 64)), "bias": jnp.zeros(64)}

    sharded = jaxplan.auto_shard(step, mesh_4x2)
    with refused(
        jaxplan.ArgumentError, "`make_state`", "no planned argument of `step`", "Plan the step first"
    ):
        sharded.init(make_state)
    plan = sharded.plan(*shapes())
    made = sharded.init(make_state)
    for leaf, sharding in zip(jax.tree.leaves(made), jax.tree.leaves(plan.in_shardings[0]), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
