"""A planned step is called as `jax.jit`'s own is: arguments, donation, meshes and contexts of every kind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan.api import autoshard

State = dict[str, jax.Array]

# Cut, so that no test passes because everything is replicated.
CUT = {"state/kernel": P("data", "model"), "x": P("data")}


def step(state: State, x: jax.Array) -> tuple[State, jax.Array]:
    def loss_of(s: State) -> jax.Array:
        return jnp.mean((jax.nn.relu(x @ s["kernel"] + s["bias"]) @ s["kernel"]) ** 2)

    loss, grad = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grad), loss


def arrays(rows: int = 16, width: int = 32) -> tuple[State, jax.Array]:
    random = np.random.default_rng(0)
    state = {
        "kernel": jnp.asarray(random.standard_normal((width, width)), jnp.float32),
        "bias": jnp.asarray(random.standard_normal(width), jnp.float32),
    }
    return state, jnp.asarray(random.standard_normal((rows, width)), jnp.float32)


def assert_equal(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6 * np.abs(b).max())


@pytest.fixture
def plannings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the steps that were planned, in order."""
    made: list[str] = []
    plan = autoshard.make_plan

    def counting(traced: Any, *rest: Any) -> Any:
        made.append(traced.name)
        return plan(traced, *rest)

    monkeypatch.setattr(autoshard, "make_plan", counting)
    return made


# -- meshes ---------------------------------------------------------------------------------------------------


def _auto() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def _explicit() -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


def _mixed() -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))


@pytest.mark.parametrize("make_mesh", [_auto, _explicit, _mixed])
@pytest.mark.parametrize("context", ["none", "set_mesh"])
def test_every_kind_of_mesh_and_context(make_mesh: Any, context: str) -> None:
    mesh = make_mesh()
    state, x = arrays()
    wanted = jax.jit(step)(*jax.jit(step)(state, x)[:1], x)
    sharded = jaxplan.auto_shard(step, mesh, constraints=CUT)

    def run() -> Any:
        return sharded(sharded(state, x)[0], x)

    if context == "set_mesh":
        with jax.set_mesh(mesh):
            found = run()
    else:
        found = run()
    assert_equal(found, wanted)
    assert found[0]["kernel"].addressable_shards[0].data.shape == (8, 16)


def test_arrays_that_lie_on_an_explicit_mesh() -> None:
    mesh = _explicit()
    state, x = arrays()
    on_mesh = jax.device_put(x, NamedSharding(mesh, P("data")))
    assert_equal(jaxplan.auto_shard(step, mesh, constraints=CUT)(state, on_mesh), jax.jit(step)(state, x))


def test_the_mesh_in_force_is_the_default(mesh_4x2: Mesh) -> None:
    with jax.set_mesh(mesh_4x2):
        sharded = jaxplan.auto_shard(step)
        assert dict(sharded.plan(*arrays()).axes) == {"data": 4, "model": 2}


@pytest.mark.parametrize("sizes", [(1,), (1, 1), (8, 1), (1, 2)])
def test_axes_of_size_one(sizes: tuple[int, ...]) -> None:
    names = ("data", "model")[: len(sizes)]
    mesh = Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), names)
    state, x = arrays()
    sharded = jaxplan.auto_shard(step, mesh, constraints={"x": P("data")})
    assert_equal(sharded(state, x), jax.jit(step)(state, x))
    if np.prod(sizes) == 1:
        plan = sharded.plan(state, x)
        assert plan.collectives == () and plan.cost.comm_s == 0


def test_an_abstract_mesh_plans_as_the_devices_do(mesh_4x2: Mesh) -> None:
    abstract = AbstractMesh((4, 2), ("data", "model"))
    settings: Any = {"hardware": "tpu-v5e", "constraints": CUT}
    planned = jaxplan.plan(step, abstract, *arrays(), **settings)
    assert planned.specs == jaxplan.plan(step, mesh_4x2, *arrays(), **settings).specs
    assert planned.cost.step_s > 0


# -- arguments ------------------------------------------------------------------------------------------------


def test_as_a_decorator(mesh_4x2: Mesh) -> None:
    @jaxplan.auto_shard(mesh=mesh_4x2, constraints={"x": P("data")})
    def doubled(x: jax.Array) -> jax.Array:
        """Twice x."""
        return 2 * x

    assert doubled.__name__ == "doubled" and doubled.__doc__ == "Twice x."
    assert_equal(doubled(jnp.arange(8.0)), 2 * jnp.arange(8.0))


def test_static_arguments_by_number_and_by_name(mesh_4x2: Mesh, plannings: list[str]) -> None:
    def power(x: jax.Array, exponent: int, *, offset: int = 0) -> jax.Array:
        assert isinstance(exponent, int) and isinstance(offset, int)
        return x**exponent + offset

    sharded = jaxplan.auto_shard(
        power, mesh_4x2, static_argnums=1, static_argnames="offset", constraints={"x": P("data")}
    )
    x = jnp.arange(8.0)
    for exponent, offset in ((2, 1), (3, 1), (2, 5), (2, 1)):
        assert_equal(sharded(x, exponent, offset=offset), x**exponent + offset)
    assert len(plannings) == 3


def test_keyword_arguments(mesh_4x2: Mesh) -> None:
    state, x = arrays()
    sharded = jaxplan.auto_shard(step, mesh_4x2, constraints=CUT)
    for _ in range(2):
        assert_equal(sharded(state, x=x), jax.jit(step)(state, x))
    plan = sharded.plan(state, x=x)
    assert plan.kwarg_shardings["x"].spec == P("data")


def test_python_scalars_and_numpy_arrays(mesh_4x2: Mesh) -> None:
    def scaled(x: jax.Array, factor: float) -> jax.Array:
        return x * factor

    x = np.arange(8.0, dtype=np.float32)
    sharded = jaxplan.auto_shard(scaled, mesh_4x2, constraints={"x": P("data")})
    assert_equal(sharded(x, 3.0), jax.jit(scaled)(x, 3.0))
    assert sharded(x, 3.0).dtype == jnp.float32


def test_donated_state_is_gone_and_its_buffer_reused(mesh_4x2: Mesh) -> None:
    state, x = arrays()
    sharded = jaxplan.auto_shard(step, mesh_4x2, donate_argnums=0, constraints=CUT)
    plan = sharded.plan(state, x)
    placed = jax.device_put(state, plan.in_shardings[0])
    wanted = jax.jit(step)(state, x)
    pointers = [s.data.unsafe_buffer_pointer() for s in placed["kernel"].addressable_shards]
    found = sharded(placed, x)
    assert placed["kernel"].is_deleted() and not x.is_deleted()
    assert pointers == [s.data.unsafe_buffer_pointer() for s in found[0]["kernel"].addressable_shards]
    assert_equal(found, wanted)


def test_a_donated_state_may_hold_an_array_twice(mesh_4x2: Mesh) -> None:
    def averaged(state: Any, x: Any) -> Any:
        params = jax.tree.map(lambda leaf: leaf - x.mean(), state["params"])
        return {
            "params": params,
            "average": jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["average"], params),
        }

    params = {"kernel": jnp.ones((8, 8)), "bias": jnp.zeros(8)}
    x = jnp.arange(8.0)
    whole = {name: P() for name in ("state/params/kernel", "state/average/kernel")}
    sharded = jaxplan.auto_shard(averaged, mesh_4x2, donate_argnums=0, constraints=whole)
    state = wanted = {"params": params, "average": params}
    for _ in range(2):
        wanted = jax.jit(averaged)(wanted, x)
        state = sharded(state, x)
        assert_equal(state, wanted)


def test_state_keeps_one_sharding(mesh_4x2: Mesh) -> None:
    state, x = arrays()
    sharded = jaxplan.auto_shard(step, mesh_4x2, constraints=CUT)
    plan = sharded.plan(state, x)
    assert {t.path: t.alias for t in plan.inputs if t.alias} == {
        "state/kernel": "result/0/kernel",
        "state/bias": "result/0/bias",
    }
    for name in ("kernel", "bias"):
        assert plan.in_shardings[0][name] == plan.out_shardings[0][name]


# -- when it plans --------------------------------------------------------------------------------------------


def test_one_planning_for_each_signature(mesh_4x2: Mesh, plannings: list[str]) -> None:
    sharded = jaxplan.auto_shard(step, mesh_4x2, constraints=CUT)
    state, x = arrays()
    for _ in range(3):
        state, _ = sharded(state, x)
    sharded.plan(state, x)
    sharded.lower(state, x)
    assert plannings == ["step"]
    other = arrays(rows=32)
    for state, x in (other, arrays(), other):
        assert_equal(sharded(state, x), jax.jit(step)(state, x))
    assert plannings == ["step", "step"]


def test_what_jit_would_not_recompile_is_not_planned_again(mesh_4x2: Mesh, plannings: list[str]) -> None:
    def scaled(x: jax.Array, factor: float) -> jax.Array:
        return x * factor

    sharded = jaxplan.auto_shard(scaled, mesh_4x2)
    for factor in (1.0, 2.0, 3.5):
        sharded(jnp.ones(8), factor)
    assert len(plannings) == 1


def test_planning_allocates_nothing(mesh_4x2: Mesh) -> None:
    huge = jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.float32)  # 4 TiB
    before = len(jax.live_arrays())
    plan = jaxplan.plan(
        lambda w: w * 2, AbstractMesh((4096,), ("data",)), huge, hardware="tpu-v5e", memory_budget="14GiB"
    )
    assert plan.cost.peak_bytes <= 14 << 30
    assert len(jax.live_arrays()) == before


# -- what comes out -------------------------------------------------------------------------------------------


def test_lowered_and_compiled_it_runs(mesh_4x2: Mesh) -> None:
    state, x = arrays()
    sharded = jaxplan.auto_shard(step, mesh_4x2, constraints=CUT)
    compiled = sharded.lower(
        *jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (state, x))
    ).compile()
    args = jax.device_put((state, x), sharded.plan(state, x).in_shardings)
    assert_equal(compiled(*args), jax.jit(step)(state, x))


def test_the_plan_s_shardings_serve_plain_jit(mesh_4x2: Mesh) -> None:
    state, x = arrays()
    plan = jaxplan.plan(step, mesh_4x2, state, x, constraints=CUT)
    plain = jax.jit(step, in_shardings=plan.in_shardings, out_shardings=plan.out_shardings)
    found = plain(state, x)
    assert_equal(found, jax.jit(step)(state, x))
    for leaf, sharding in zip(jax.tree.leaves(found), jax.tree.leaves(plan.out_shardings), strict=True):
        assert leaf.sharding == sharding


def test_dimensions_that_do_not_divide(mesh_4x2: Mesh) -> None:
    """Prime sizes: nothing is proposed at the boundary that jit would refuse, and the numbers are the same."""
    state, x = arrays(rows=13, width=37)
    sharded = jaxplan.auto_shard(step, mesh_4x2, hardware="tpu-v5e")
    assert_equal(sharded(state, x), jax.jit(step)(state, x))
    mixed_state, mixed_x = arrays(rows=16, width=37)
    cut = jaxplan.auto_shard(step, mesh_4x2, constraints={"x": P(("data", "model"))})
    assert_equal(cut(mixed_state, mixed_x), jax.jit(step)(mixed_state, mixed_x))


def _looped(w: jax.Array, x: jax.Array) -> Any:
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w) + x, c.sum()), x, None, length=3)


def _until(w: jax.Array, x: jax.Array) -> Any:
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))


def _either(w: jax.Array, x: jax.Array) -> Any:
    return jax.lax.cond(x[0, 0] > 0, lambda: (x @ w) @ w.T, lambda: x.T.reshape(16, 32) - 1)


def _learnt_with_remat(w: jax.Array, x: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        body = jax.checkpoint(lambda c, _: (jnp.tanh(c @ w), None))
        return jnp.sum(jax.lax.scan(body, x, None, length=3)[0] ** 2)

    return jax.value_and_grad(loss)(w)


@pytest.mark.parametrize("program", [_looped, _until, _either, _learnt_with_remat])
@pytest.mark.parametrize("x_spec", [P("data"), P(None, "model"), P("model", "data")])
def test_control_flow_computes_the_same(program: Any, x_spec: P, mesh_4x2: Mesh) -> None:
    state, x = arrays()
    w = state["kernel"] / 8
    planned = jaxplan.auto_shard(
        program, mesh_4x2, hardware="tpu-v5e", constraints={"w": P("model", "data"), "x": x_spec}
    )
    assert_equal(planned(w, x), jax.jit(program)(w, x))


# -- constraints ----------------------------------------------------------------------------------------------


@jax.custom_vjp
def one_way(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


one_way.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


def primal(x: jax.Array) -> jax.Array:
    """Of a function without forward derivatives: jax can't lower the tangent, and need not."""
    return jax.jvp(one_way, (x,), (jnp.ones_like(x),))[0]


@pytest.mark.parametrize(
    "program", [primal, jax.checkpoint(primal), lambda x: jax.lax.fori_loop(0, 3, lambda _, y: primal(y), x)]
)
def test_what_nothing_needs_is_not_lowered(program: Any, mesh_4x2: Mesh) -> None:
    x = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    found = jaxplan.auto_shard(program, mesh_4x2, constraints={"x": P("data")})(x)
    np.testing.assert_allclose(found, jax.jit(program)(x), rtol=1e-6)


def test_constraints_are_honoured(mesh_4x2: Mesh) -> None:
    state, x = arrays()
    plan = jaxplan.plan(
        step, mesh_4x2, state, x, constraints={"state/kernel": P(None, "data"), "state/b*": "replicated"}
    )
    assert plan.specs["state/kernel"] == P(None, "data") == plan.result_specs["result/0/kernel"]
    assert plan.specs["state/bias"] == P()


def test_a_pin_on_the_next_state_pins_both_ends(mesh_4x2: Mesh) -> None:
    plan = jaxplan.plan(step, mesh_4x2, *arrays(), constraints={"result/0/kernel": P("model")})
    assert plan.specs["state/kernel"] == P("model") == plan.result_specs["result/0/kernel"]


def test_unconstrained_dimensions_stay_free(mesh_8: Mesh) -> None:
    """The budget leaves room for an eighth of the kernel only; the pin leaves dimension 1 alone to cut."""
    state, x = arrays(rows=16, width=1024)
    plan = jaxplan.plan(
        step, mesh_8, state, x, donate_argnums=0, memory_budget="3MiB",
        constraints={"state/kernel": P(None, P.UNCONSTRAINED)},
    )  # fmt: skip
    assert plan.specs["state/kernel"] == P(None, "data")
    with pytest.raises(jaxplan.InfeasibleError):
        jaxplan.plan(
            step, mesh_8, state, x, donate_argnums=0, memory_budget="3MiB",
            constraints={"state/kernel": "replicated"},
        )  # fmt: skip


def test_pinned_tensors_count_in_memory(mesh_8: Mesh) -> None:
    state, x = arrays(rows=16, width=1024)
    whole, cut = (
        jaxplan.plan(step, mesh_8, state, x, donate_argnums=0, constraints={"state/kernel": pin})
        for pin in ("replicated", P("data"))
    )
    assert whole.cost.peak_parts["parameter"] - cut.cost.peak_parts["parameter"] == (1 << 22) * 7 // 8


def test_unconstrained_costs_no_more_than_any_pin(mesh_4x2: Mesh) -> None:
    """A pin can only take choices away."""
    state, x = arrays(rows=64, width=256)
    settings: Any = {"hardware": "tpu-v5e"}
    free = jaxplan.plan(step, mesh_4x2, state, x, **settings).cost.objective_s
    for pin in (P("data"), P("model", "data"), P(("data", "model")), "replicated"):
        pinned = jaxplan.plan(step, mesh_4x2, state, x, constraints={"state/kernel": pin}, **settings)
        assert free <= pinned.cost.objective_s * (1 + 1e-6)


# -- Ctrl-C ---------------------------------------------------------------------------------------------------


@pytest.fixture
def interrupt_after_first_incumbent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C, as the terminal sends it, as soon as a search reports its first assignment."""
    from jaxplan.search.base import Incumbent

    record = Incumbent._record
    sent = threading.Event()

    def recording(self: Incumbent) -> None:
        record(self)
        if self.assignment and not sent.is_set():
            sent.set()
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Incumbent, "_record", recording)
    # A job in a shell's background inherits an interrupt that is ignored.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)
    assert sent.is_set()


@pytest.mark.usefixtures("interrupt_after_first_incumbent")
def test_ctrl_c_gives_the_best_so_far(mesh_4x2: Mesh) -> None:
    state, x = arrays()
    sharded = jaxplan.auto_shard(step, mesh_4x2, options={"compare_templates": False})
    plan = sharded.plan(state, x)
    assert plan.cost.termination == "interrupted"
    assert_equal(sharded(state, x), jax.jit(step)(state, x))


@pytest.mark.parametrize("search", ["data", "zero1", "fsdp", "megatron", "tensor_fsdp"])
def test_never_worse_than_a_template(mesh_4x2: Mesh, search: str) -> None:
    state, x = arrays(rows=64, width=256)
    found = jaxplan.plan(step, mesh_4x2, state, x, hardware="tpu-v5e")
    template = jaxplan.plan(step, mesh_4x2, state, x, hardware="tpu-v5e", options={"search": search})
    assert template.search == search
    assert found.cost.step_s <= template.cost.step_s * (1 + 1e-6)
