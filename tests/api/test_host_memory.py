"""What a step keeps in its hosts' memory stays there: planned, priced, sharded and run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxplan
from jaxplan.hardware import load_profile
from jaxplan.lowering import compiled_memory

SPACE = jax.memory.Space
MOMENTUM = optax.sgd(1e-2, momentum=0.9)
WIDTH = 512


def loss(params: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


def updated(params: Any, moments: Any, x: Any) -> tuple[Any, Any]:
    changes, moments = MOMENTUM.update(jax.grad(loss)(params, x), moments, params)
    return optax.apply_updates(params, changes), moments


def offloaded(state: Any, x: Any) -> Any:
    """Momentum is brought to the devices for the update, and back."""
    params, moments = updated(state["params"], jax.device_put(state["moments"], SPACE.Device), x)
    return {"params": params, "moments": jax.device_put(moments, SPACE.Host)}


def resident(state: Any, x: Any) -> Any:
    params, moments = updated(state["params"], state["moments"], x)
    return {"params": params, "moments": moments}


def arguments() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    sizes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    params = {k: (0.05 * random.normal(size=size)).astype(np.float32) for k, size in sizes.items()}
    x = random.normal(size=(64, WIDTH)).astype(np.float32)
    return {"params": params, "moments": jax.tree.map(np.asarray, MOMENTUM.init(params))}, x


def kinds(tree: Any) -> set[str]:
    return {getattr(leaf, "sharding", leaf).memory_kind for leaf in jax.tree.leaves(tree)}


def check_steps(step: Callable[..., Any], state: Any, x: Any) -> None:
    """Three steps equal three unsharded ones, and moments stay in the host's memory."""
    wanted, found = arguments()[0], state
    for _ in range(3):
        wanted, found = jax.jit(resident)(wanted, x), step(found, x)
        assert kinds(found["moments"]) == {"pinned_host"}
        assert kinds(found["params"]) == {"device"}
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=2e-5 * max(np.abs(a).max(), 1e-6))


@pytest.mark.parametrize("search", ["ilp", "fsdp"])
def test_moments_stay_in_the_hosts_memory(search: str, mesh_4x2: Mesh) -> None:
    """Shapes, and the arrays of the first step, say nothing of a memory: the step does."""
    state, x = arguments()
    options = {"search": search, "compare_templates": False}
    step = jaxplan.auto_shard(offloaded, mesh_4x2, donate_argnums=0, hardware="tpu-v5e", options=options)
    plan = step.plan(*jax.eval_shape(lambda: (state, x)))
    assert {t.path.split("/")[1] for t in plan.inputs if t.host} == {"moments"}
    assert kinds(plan.in_shardings[0]["moments"]) == kinds(plan.out_shardings["moments"]) == {"pinned_host"}
    assert "f32<host>[" in str(plan) and not plan.warnings
    check_steps(step, state, x)
    assert "sharding" not in {finding.what for finding in jaxplan.verify(step, state, x).findings}
    made = step.init(lambda: jax.tree.map(jnp.asarray, state))
    assert kinds(made["moments"]) == {"pinned_host"}
    check_steps(step, made, x)


def test_they_take_no_memory_of_the_devices_and_the_time_of_the_transfer(mesh_4x2: Mesh) -> None:
    state, x = arguments()
    options = {"search": "fsdp", "compare_templates": False}
    plans = [
        jaxplan.plan(fn, mesh_4x2, state, x, donate_argnums=0, hardware="h100", options=options)
        for fn in (resident, offloaded)
    ]
    moments = sum(t.local_bytes for t in plans[1].inputs if t.host)
    assert plans[0].cost.peak_parts["optimizer"] == moments > 0
    assert "optimizer" not in plans[1].cost.peak_parts
    transfer_s = 2 * moments / load_profile("h100").host_bytes_per_s
    assert plans[1].cost.compute_s - plans[0].cost.compute_s == pytest.approx(transfer_s, rel=0.05)


def test_state_that_arrives_from_the_host_goes_back_there(mesh_4x2: Mesh) -> None:
    """As where the shardings of `jax.jit`'s results say so and the step itself doesn't."""

    def step_(state: Any, x: Any) -> Any:
        params, moments = updated(state["params"], jax.device_put(state["moments"], SPACE.Device), x)
        return {"params": params, "moments": moments}

    state, x = arguments()
    there = NamedSharding(mesh_4x2, PartitionSpec(), memory_kind="pinned_host")
    step = jaxplan.auto_shard(step_, mesh_4x2, donate_argnums=0, hardware="tpu-v5e")
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there), state["moments"])
    assert kinds(step.plan({**state, "moments": shapes}, x).out_shardings["moments"]) == {"pinned_host"}
    check_steps(step, {**state, "moments": jax.device_put(state["moments"], there)}, x)


def test_what_leaves_as_it_is_read_is_no_state(mesh_4x2: Mesh) -> None:
    """A step that reads its argument where it is, and hands a copy to the host, is planned as it is written."""

    def step_(state: Any) -> Any:
        return {"w": jax.device_put(jnp.sin(state["w"]), SPACE.Host)}

    step = jaxplan.auto_shard(step_, mesh_4x2, hardware="tpu-v5e")
    w = arguments()[0]["params"]["up"]
    found = step({"w": w})["w"]
    assert found.sharding.memory_kind == "pinned_host" and not step.plan({"w": w}).inputs[0].host
    np.testing.assert_allclose(np.asarray(found), np.sin(w), atol=1e-6)


def test_computing_with_what_is_in_the_hosts_memory_is_refused(mesh_4x2: Mesh) -> None:
    state, x = arguments()
    there = NamedSharding(mesh_4x2, PartitionSpec(), memory_kind="pinned_host")
    step = jaxplan.auto_shard(resident, mesh_4x2)
    with pytest.raises(jaxplan.TraceError, match=r"these arguments are: state/moments/0/trace/down, .*Space\.Device"):
        step({**state, "moments": jax.device_put(state["moments"], there)}, x)


def test_a_sharding_that_device_put_names_is_honoured(mesh_4x2: Mesh) -> None:
    """On a mesh of its own, as a sharding constraint is; left out with the others."""
    other = Mesh(mesh_4x2.devices, ("data", "model"))

    def step_(state: Any, x: Any) -> Any:
        cut = NamedSharding(other, PartitionSpec(None, "model"), memory_kind="device")
        moments = jax.device_put(state["moments"], cut)
        return {"moments": jax.device_put(0.9 * moments + x, SPACE.Host)}

    x = np.ones((64, 64), np.float32)
    state = {"moments": x}
    pinned = jaxplan.auto_shard(step_, mesh_4x2, hardware="tpu-v5e")
    assert pinned.plan(state, x).specs["state/moments"] == PartitionSpec(None, "model")
    np.testing.assert_allclose(np.asarray(pinned(state, x)["moments"]), 0.9 * x + x)
    free = jaxplan.plan(step_, mesh_4x2, state, x, hardware="tpu-v5e", options={"annotations": "ignore"})
    assert free.specs["state/moments"] != PartitionSpec(None, "model")


def rematerialised(offload: bool, weights: Any, x: Any) -> Any:
    policies = jax.checkpoint_policies
    policy = policies.save_only_these_names("layer")
    if offload:
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[], names_which_can_be_offloaded=["layer"], offload_src="device",
            offload_dst="pinned_host",
        )  # fmt: skip

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(h: Any, w: Any) -> tuple[Any, None]:
        h = checkpoint_name(h, "layer")
        return jnp.tanh(h @ w) @ w.T, None

    def whole(weights: Any) -> Any:
        return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

    return weights - 0.1 * jax.grad(whole)(weights)


def test_residuals_that_a_policy_offloads_take_no_memory_of_the_devices(mesh_4x2: Mesh) -> None:
    weights = np.random.default_rng(0).normal(size=(6, 64, 128)).astype(np.float32) * 0.1
    x = np.random.default_rng(1).normal(size=(1024, 64)).astype(np.float32)
    peaks, options = [], {"search": "fsdp", "compare_templates": False}
    for offload in (False, True):
        step = jaxplan.auto_shard(functools.partial(rematerialised, offload), mesh_4x2, options=options)
        peaks.append(step.plan(weights, x).cost.peak_parts.get("residuals", 0))
        wanted = jax.jit(functools.partial(rematerialised, False))(weights, x)
        np.testing.assert_allclose(np.asarray(step(weights, x)), np.asarray(wanted), rtol=0, atol=1e-5)
    assert peaks[0] - peaks[1] == 6 * x.nbytes // 8


@pytest.mark.slow
def test_the_tpu_compiler_keeps_them_there_too(tpu_topology: Callable[[str], Any]) -> None:
    """What is promised is what is compiled, with the state in the hosts' memory as without."""
    mesh = Mesh(np.array(tpu_topology("v5e:2x4").devices).reshape(4, 2), ("data", "model"))
    weights, x = jax.ShapeDtypeStruct((8, 2048, 8192), jnp.float32), jax.ShapeDtypeStruct((16384, 2048), jnp.float32)
    state, ratios = {"weights": weights, "momentum": weights}, []
    for there in (SPACE.Device, SPACE.Host):

        def step_(state: Any, x: Any, there: Any = there) -> Any:
            momentum = jax.device_put(state["momentum"], SPACE.Device)
            momentum = 0.9 * momentum + state["weights"] - rematerialised(False, state["weights"], x)
            return {"weights": state["weights"] - momentum, "momentum": jax.device_put(momentum, there)}

        step = jaxplan.auto_shard(step_, mesh, donate_argnums=0)
        plan, compiled = step.plan(state, x), step.lower(state, x).compile()
        ratios.append(plan.cost.peak_bytes / compiled_memory(compiled).peak_bytes)
        stats, (momentum, _, _) = compiled.memory_analysis(), plan.inputs
        kept = momentum.local_bytes if there is SPACE.Host else 0
        assert stats.host_argument_size_in_bytes == stats.host_alias_size_in_bytes == kept
    assert ratios == pytest.approx([1, 1], abs=0.05)


@pytest.mark.slow
def test_the_tpu_compiler_keeps_residuals_there(tpu_topology: Callable[[str], Any]) -> None:
    mesh = Mesh(np.array(tpu_topology("v5e:2x4").devices).reshape(4, 2), ("data", "model"))
    weights, x = jax.ShapeDtypeStruct((8, 1024, 4096), jnp.float32), jax.ShapeDtypeStruct((8192, 1024), jnp.float32)
    step = jaxplan.auto_shard(functools.partial(rematerialised, True), mesh, options={"search": "fsdp"})
    stats = step.lower(weights, x).compile().memory_analysis()
    assert stats.host_temp_size_in_bytes == 8 * x.size * 4 // 8
