"""What a program says about its own shardings is honoured, begun with, or left out, as the user says."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplan

RULES = (("batch", "data"), ("mlp", "model"), ("embed", None))
MOST_CUT = (("embed", "data"), ("mlp", ("model",)))
QUICK = {"compare_templates": False}


def assert_equal(found: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


# -- Linen ----------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Two layers, one boxed by mesh axes and one by logical names; `rules` go into the second box."""

    rules: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        normal = nn.initializers.lecun_normal()
        x = nn.relu(nn.Dense(64, kernel_init=nn.with_partitioning(normal, (None, "model")))(x))
        return nn.Dense(
            16, kernel_init=nn.with_logical_partitioning(normal, ("mlp", "embed"), rules=self.rules)
        )(x)


def linen(rules: Any = None) -> tuple[Callable[..., Any], Any, jax.Array]:
    """(step, boxed state, batch)."""
    model, optimizer = Mlp(rules), optax.adam(1e-2)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((16, 16)), jnp.float32)
    params = model.init(jax.random.key(0), x)

    def step(state: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((model.apply(p, x) - x) ** 2))(state["params"])
        updates, moments = optimizer.update(grads, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss

    return step, {"params": params, "moments": optimizer.init(params)}, x


def asked_of_flax(state: Any, mesh: Mesh, rules: Any) -> list[NamedSharding]:
    """What Flax itself makes of the boxes: Partitioned as it stands, LogicallyPartitioned by the rules."""
    specs = nn.get_partition_spec(state)
    logical = nn.logical_to_mesh_sharding(specs, mesh, [*rules, ("model", "model")])
    return jax.tree.leaves(logical)


@pytest.mark.parametrize(
    ("source", "rules"), [("options", RULES), ("options", MOST_CUT), ("box", MOST_CUT), ("context", RULES)]
)
def test_boxes_are_pinned_as_flax_reads_them(source: str, rules: Any, mesh_4x2: Mesh) -> None:
    step, state, x = linen(rules if source == "box" else None)
    options = {**QUICK, **({"axis_rules": rules} if source == "options" else {})}
    with nn.logical_axis_rules(rules if source == "context" else ()):
        sharded = jaxplan.auto_shard(step, mesh_4x2, options=options)
        plan = sharded.plan(state, x)
    boxed = jax.tree.leaves(
        jax.tree.map(
            lambda leaf: isinstance(leaf, nn.Partitioned),
            state,
            is_leaf=lambda x: isinstance(x, nn.Partitioned),
        )
    )
    assert sum(boxed) == 6  # two kernels, and two moments of each
    found = jax.tree.leaves(plan.in_shardings[0])
    for is_boxed, mine, theirs in zip(boxed, found, asked_of_flax(state, mesh_4x2, rules), strict=True):
        assert not is_boxed or mine.is_equivalent_to(theirs, 2)
    assert "6 arguments pinned as they say" in plan.assumptions[-1]
    assert_equal(sharded(state, x), step(state, x))


def test_the_search_begins_with_annotations_and_is_never_worse(mesh_4x2: Mesh) -> None:
    step, state, x = linen()
    pinned, started, free = (
        jaxplan.plan(
            step, mesh_4x2, state, x, hardware="tpu-v5e",
            options={**QUICK, "annotations": mode, "axis_rules": MOST_CUT, "time_limit_s": limit},
        )
        for mode, limit in (("pin", None), ("start", None), ("ignore", None))
    )  # fmt: skip
    assert started.cost.objective_s == pytest.approx(free.cost.objective_s, rel=1e-4)
    assert started.cost.objective_s < pinned.cost.objective_s
    assert started.templates == {"as annotated": pytest.approx(pinned.cost.objective_s, rel=1e-4)}
    assert "where the search started" in started.assumptions[-1]
    assert not any("argument" in line for line in free.assumptions)


def test_a_search_without_time_returns_where_it_began(
    mesh_4x2: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start is an assignment of the free problem that costs what it cost under its pins."""
    from jaxplan.api import candidates

    step, state, x = linen()
    seen: list[tuple[float, float]] = []
    solve = candidates.solve

    def watching(problem: Any, **settings: Any) -> Any:
        found = solve(problem, **settings)
        if settings.get("hint") is not None:
            at_start = jaxplan.search.evaluate(problem, settings["hint"])
            seen.append((at_start.objective_s if at_start.feasible else np.inf, found.objective_s))
        else:
            seen.append((np.nan, found.objective_s))
        return found

    monkeypatch.setattr(candidates, "solve", watching)
    options = {**QUICK, "annotations": "start", "axis_rules": MOST_CUT}
    jaxplan.plan(step, mesh_4x2, state, x, hardware="tpu-v5e", options=options)
    (_, pinned_s), (start_s, found_s) = seen
    assert start_s == pytest.approx(pinned_s, rel=1e-9)
    assert found_s <= start_s


def test_a_template_does_not_begin_anywhere(mesh_4x2: Mesh) -> None:
    step, state, x = linen()
    options = {"search": "fsdp", "axis_rules": RULES}
    templates = [
        jaxplan.plan(step, mesh_4x2, state, x, options={**options, "annotations": mode})
        for mode in ("start", "ignore")
    ]
    assert templates[0].specs == templates[1].specs


def test_constraints_overrule_annotations_at_both_ends(mesh_4x2: Mesh) -> None:
    step, state, x = linen()
    plan = jaxplan.plan(
        step, mesh_4x2, state, x, options={**QUICK, "axis_rules": RULES},
        constraints={"state/params/**/Dense_0/kernel/value": P("data"), "result/0/params/**/Dense_1/kernel/value": P()},
    )  # fmt: skip
    assert plan.specs["state/params/params/Dense_0/kernel/value"] == P("data")
    assert plan.specs["state/params/params/Dense_1/kernel/value"] == P()
    assert plan.specs["state/moments/0/mu/params/Dense_1/kernel/value"] == P("model")


def test_logical_names_without_rules_say_nothing_but_are_told(mesh_4x2: Mesh) -> None:
    """As in Flax, where they are nothing until rules are in force."""
    step, state, x = linen()
    plan = jaxplan.plan(step, mesh_4x2, state, x, options=QUICK)
    assert plan.specs["state/params/params/Dense_0/kernel/value"] == P(None, "model")
    assert "3 arguments bear logical names (embed, mlp)" in plan.warnings[-1]
    assert "3 arguments pinned as they say" in plan.assumptions[-1]
    assert plan.logical_axes["state/params/params/Dense_1/kernel/value"] == ("mlp", "embed")
    free = jaxplan.plan(step, mesh_4x2, state, x, options={**QUICK, "annotations": "ignore"})
    assert not any("logical names" in line for line in free.warnings)


def test_a_placed_array_speaks_where_its_box_says_nothing(mesh_4x2: Mesh) -> None:
    placed = jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh_4x2, P("model")))
    box = nn.LogicallyPartitioned(placed, names=("a", "b"))
    plan = jaxplan.plan(lambda w: jax.tree.map(jnp.sin, w), mesh_4x2, box, options=QUICK)
    assert plan.specs == {"w/value": P("model")} and plan.logical_axes == {"w/value": ("a", "b")}


def test_mesh_axes_that_are_not_there_are_refused_by_name(mesh_4x2: Mesh) -> None:
    box = nn.Partitioned(jnp.ones((8, 8)), names=("tensor", None))
    with pytest.raises(
        jaxplan.ConstraintError,
        match=r"(?s)w/value: .*names 'tensor', neither an axis.*axis_rules.*so says flax's Partitioned.*annotations",
    ):
        jaxplan.plan(lambda w: jax.tree.map(jnp.sin, w), mesh_4x2, box)
    jaxplan.plan(
        lambda w: jax.tree.map(jnp.sin, w), mesh_4x2, box, options={**QUICK, "annotations": "ignore"}
    )


def test_an_annotation_that_does_not_divide(mesh_4x2: Mesh) -> None:
    box = nn.Partitioned(jnp.ones((6, 8)), names=("data", None))
    for mode, error in (("pin", True), ("start", False)):
        options = {**QUICK, "annotations": mode}
        if error:
            with pytest.raises(jaxplan.ConstraintError, match=r"w/value: .*4 pieces, which doesn't divide 6"):
                jaxplan.plan(lambda w: jax.tree.map(jnp.sin, w), mesh_4x2, box, options=options)
        else:
            jaxplan.plan(lambda w: jax.tree.map(jnp.sin, w), mesh_4x2, box, options=options)


def test_an_unknown_mode(mesh_4x2: Mesh) -> None:
    with pytest.raises(
        jaxplan.ArgumentError, match=r"options.annotations='obey' is unknown: use one of 'pin', 'start'"
    ):
        jaxplan.auto_shard(lambda x: x, mesh_4x2, options={"annotations": "obey"})


# -- NNX ------------------------------------------------------------------------------------------------------


class NnxMlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        normal = nnx.initializers.lecun_normal()
        up, down = (
            nnx.with_partitioning(normal, (None, "model")),
            nnx.with_partitioning(normal, ("mlp", "embed")),
        )
        self.up = nnx.Linear(16, 64, kernel_init=up, rngs=rngs)
        self.down = nnx.Linear(64, 16, kernel_init=down, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(nnx.relu(self.up(x))))


def test_nnx_metadata_is_pinned_as_nnx_reads_it(mesh_4x2: Mesh) -> None:
    with nnx.use_eager_sharding(False):
        model = NnxMlp(nnx.Rngs(0))
        structure, state = nnx.split((model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)))

        def step(state: Any, x: jax.Array) -> Any:
            model, optimizer = nnx.merge(structure, state)
            loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x) ** 2))(model)
            optimizer.update(model, grads)
            return nnx.state((model, optimizer)), loss

        x = jnp.asarray(np.random.default_rng(0).standard_normal((16, 16)), jnp.float32)
        sharded = jaxplan.auto_shard(step, mesh_4x2, options={**QUICK, "axis_rules": RULES})
        plan = sharded.plan(state, x)
        with nn.logical_axis_rules(RULES):
            wanted = jax.tree.leaves(nnx.get_partition_spec(state))
        found = [sharding.spec for sharding in jax.tree.leaves(plan.in_shardings[0])]
        said = [(mine, theirs) for mine, theirs in zip(found, wanted, strict=True) if len(theirs)]
        assert len(said) == 6
        for mine, theirs in said:
            assert NamedSharding(mesh_4x2, mine).is_equivalent_to(NamedSharding(mesh_4x2, theirs), 2)
        assert_equal(sharded(state, x)[1], step(state, x)[1])


def test_nnx_names_are_known_while_rules_are_in_force(mesh_4x2: Mesh) -> None:
    """The plan is as the rules say, and can be written as rules of the names themselves."""
    with nnx.use_eager_sharding(False), nn.logical_axis_rules([("mlp", "model"), ("embed", None)]):
        weight = nnx.Param(jnp.ones((64, 16)), out_sharding=("mlp", "embed"))
        plan = jaxplan.plan(lambda state, x: x @ state["w"].get_value(), mesh_4x2, {"w": weight}, jnp.ones((8, 64)),
                            options=QUICK)  # fmt: skip
    (names,) = plan.logical_axes.values()
    assert names == ("mlp", "embed")
    assert [t.layout.spec() for t in plan.inputs if t.path.startswith("state")] == [P("model")]
    assert ("mlp", "model") in plan.to_logical_axis_rules().rules


# -- inside the step ------------------------------------------------------------------------------------------


def constrained(sharding: Any) -> Callable[..., jax.Array]:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(jax.lax.with_sharding_constraint(x @ w, sharding)) @ w.T

    return step


def _other_meshes() -> dict[str, tuple[Any, str | None]]:
    """A sharding as the user's code names it, and what it is on mesh (data=4, model=2); None: it is refused."""
    devices = np.array(jax.devices())
    mesh = functools.partial(Mesh, axis_types=None)
    return {
        "a bare spec": (P("data"), '[{"data"}, {}]'),
        "the same mesh": (NamedSharding(mesh(devices.reshape(4, 2), ("data", "model")), P("model")), '[{"model"}, {}]'),
        "fewer devices": (NamedSharding(mesh(devices[:2], ("model",)), P(None, "model")), '[{}, {"model"}]'),
        "another size": (NamedSharding(mesh(devices, ("data",)), P("data")), '[{"data"}, {}]'),
        "other names": (
            NamedSharding(mesh(devices.reshape(4, 2), ("x", "y")), P("y", "x")), '[{"model"}, {"data"}]',
        ),
        "axes of size one": (
            NamedSharding(mesh(devices[:4].reshape(4, 1), ("data", "expert")), P(("data", "expert"))), '[{"data"}, {}]',
        ),
        "two axes in another order": (
            NamedSharding(mesh(devices.reshape(4, 2), ("data", "model")), P(("model", "data"))),
            '[{"model", "data"}, {}]',
        ),
        "a dimension left open": (
            NamedSharding(mesh(devices.reshape(4, 2), ("data", "model")), P(P.UNCONSTRAINED, "model")),
            '[{?}, {"model"}]',
        ),
        "unknown axes": (NamedSharding(mesh(devices.reshape(2, 2, 2), ("a", "b", "c")), P("a")), None),
        "one device": (jax.sharding.SingleDeviceSharding(devices[3]), None),
    }  # fmt: skip


@pytest.mark.parametrize("case", list(_other_meshes()))
def test_constraints_inside_hold_on_the_plan_s_mesh(case: str, mesh_4x2: Mesh) -> None:
    sharding, wanted = _other_meshes()[case]
    random = np.random.default_rng(0)
    w, x = (jnp.asarray(random.standard_normal(s), jnp.float32) for s in ((64, 128), (32, 64)))
    step = constrained(sharding)
    unsharded = jnp.tanh(x @ w) @ w.T
    if wanted is None:
        with pytest.raises(
            jaxplan.ConstraintError, match=r"with_sharding_constraint at test_annotations.py:\d+ \(.*step\)"
        ):
            jaxplan.plan(step, mesh_4x2, w, x, options=QUICK)
    else:
        sharded = jaxplan.auto_shard(step, mesh_4x2, hardware="tpu-v5e", options=QUICK)
        assert_equal(sharded(w, x), unsharded)
        assert f"sharding_constraint %0 <@mesh, {wanted}>" in _product_first(sharded.lower(w, x).as_text())
        assert sharded.plan(w, x).warnings == ()
    free = jaxplan.auto_shard(step, mesh_4x2, options={**QUICK, "annotations": "ignore"})
    assert_equal(free(w, x), unsharded)
    assert free.plan(w, x).specs == jaxplan.plan(
        lambda w, x: jnp.tanh(x @ w) @ w.T, mesh_4x2, w, x, options=QUICK
    ).specs  # fmt: skip


def _product_first(text: str) -> str:
    """Lowered text with the first product called %0, whatever else was made before it, and what the plan pins of it."""
    name = re.search(r"(%\w+) = stablehlo.dot_general", text)
    assert name is not None
    text = re.sub(rf"{re.escape(name[1])}\b", "%0", text)
    for pinned in re.findall(r"(%\w+) = sdy.sharding_constraint %0 ", text):
        text = re.sub(rf"{re.escape(pinned)}\b", "%0", text)
    return text


def test_flax_s_constraints_hold_under_set_mesh(mesh_4x2: Mesh) -> None:
    """They are nothing without a mesh in force, so the step must be traced in one."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(nn.with_logical_constraint(x @ w, ("batch", "mlp"))) @ w.T

    w, x = jnp.ones((64, 128)), jnp.ones((32, 64))
    sharded = jaxplan.auto_shard(step, mesh_4x2, options=QUICK)
    with jax.set_mesh(mesh_4x2), nn.logical_axis_rules(RULES):
        text = sharded.lower(w, x).as_text()
        found = sharded(w, x)
    assert 'sharding_constraint %0 <@mesh, [{"data"}, {"model"}]>' in _product_first(text)
    assert_equal(found, step(w, x))


# -- placed arrays --------------------------------------------------------------------------------------------


def update(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return w + x.T @ jnp.tanh(x @ w), x.sum()


@pytest.mark.parametrize("spec", [P(None, "data"), P(("model", "data")), P("model", "data")])
@pytest.mark.parametrize("kind", ["array", "shape"])
def test_a_cut_argument_stays_as_it_is(spec: P, kind: str, mesh_4x2: Mesh) -> None:
    w, x = jnp.ones((32, 32)), jnp.ones((16, 32))
    sharding = NamedSharding(mesh_4x2, spec)
    placed = (
        jax.device_put(w, sharding)
        if kind == "array"
        else jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding)
    )
    sharded = jaxplan.auto_shard(update, mesh_4x2, options=QUICK)
    assert sharded.plan(placed, x).in_shardings[0].is_equivalent_to(sharding, 2)
    assert_equal(sharded(jax.device_put(w, sharding), x), update(w, x))
    free = jaxplan.plan(update, mesh_4x2, placed, x, options={**QUICK, "annotations": "ignore"})
    assert free.specs == jaxplan.plan(update, mesh_4x2, w, x, options=QUICK).specs


def test_a_state_that_was_planned_keeps_its_layout_at_another_batch_size(mesh_4x2: Mesh) -> None:
    """A shorter last batch is another plan, and the state must not have to move for it."""
    sharded = jaxplan.auto_shard(update, mesh_4x2, constraints={"x": P()}, options=QUICK)
    w, _ = sharded(
        jax.device_put(jnp.ones((32, 32)), NamedSharding(mesh_4x2, P("data", "model"))), jnp.ones((16, 32))
    )
    shorter = jnp.ones((8, 32))
    found = sharded(w, shorter)
    assert found[0].sharding.is_equivalent_to(w.sharding, 2)
    assert_equal(found, update(w, shorter))


def test_whole_copies_on_every_device_are_cut_without_a_word(mesh_4x2: Mesh) -> None:
    """Under jax.set_mesh every new array is one."""
    sharded = jaxplan.auto_shard(
        update, mesh_4x2, constraints={"w": P("data"), "x": P("model")}, options=QUICK
    )
    with jax.set_mesh(mesh_4x2):
        w, x = jnp.full((32, 32), 0.1), jnp.ones((16, 32))
        assert w.committed and w.sharding.is_fully_replicated
        for _ in range(2):
            found = sharded(w, x)
    assert sharded.plan(w, x).specs == {"w": P("data"), "x": P("model")}
    assert_equal(found, update(np.full((32, 32), np.float32(0.1)), np.ones((16, 32), np.float32)))


def test_one_device_s_array_is_refused_as_jit_refuses_it(mesh_4x2: Mesh) -> None:
    sharded = jaxplan.auto_shard(update, mesh_4x2, constraints={"w": P("data")}, options=QUICK)
    w = jax.device_put(jnp.ones((32, 32)), jax.devices()[3])
    x = jnp.ones((16, 32))
    for _ in range(2):
        with pytest.raises(jaxplan.ArgumentError, match=r"w: lies on SingleDeviceSharding.*planned is"):
            sharded(w, x)
