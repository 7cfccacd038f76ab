"""Logical axis rules say what the plan says, as Flax reads them, and name every tensor for which they don't."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan.plans import Plan, dims_by_rules
from jaxplan.sharding import Layout
from tests.plans.factory import make_plan, shape

AXES = st.sampled_from(["data", "model", ("data", "model"), ("model",), None])
NAME = st.sampled_from("abcde")
RULES = st.lists(st.tuples(NAME, AXES), max_size=6)
NAMES = st.lists(st.none() | NAME, min_size=1, max_size=4).filter(
    lambda names: len({n for n in names if n}) == len([n for n in names if n])
)


def spec_of(dims: Any) -> P:
    return Layout(dims=tuple(dims)).spec()


def by_flax(names: Any, rules: Any) -> P:
    spec = nn.logical_to_mesh_axes(tuple(names), rules)
    assert spec is not None
    dims = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
    return spec_of(dims)


@given(names=NAMES, rules=RULES)
def test_rules_are_read_as_flax_reads_them(names: Any, rules: Any) -> None:
    assert spec_of(dims_by_rules(names, rules)) == by_flax(names, rules)


def plan_of(tensors: dict[str, tuple[Any, Any]]) -> Plan:
    """A plan whose arguments have these (names, dims), 8 in each dimension."""
    state = {name: shape(*(8 for _ in names)) for name, (names, _) in tensors.items()}
    plan = make_plan(args=(state,), roots=("state",))
    inputs = tuple(
        dataclasses.replace(
            t, layout=Layout(dims=tuple(tensors[t.path.removeprefix("state/")][1])), kind="parameter"
        )
        for t in plan.inputs
    )
    logical = {f"state/{name}": tuple(n or "" for n in names) for name, (names, _) in tensors.items()}
    return dataclasses.replace(plan, inputs=inputs, logical_axes=logical)


@settings(max_examples=40)
@given(all_names=st.lists(NAMES, min_size=1, max_size=6), rules=RULES)
def test_what_rules_made_rules_are_found_for_or_conflicts_named(all_names: Any, rules: Any) -> None:
    """Exactly the tensors that the found rules don't lay as planned are named, whatever the search for rules missed."""
    plan = plan_of({f"t{i}": (names, dims_by_rules(names, rules)) for i, names in enumerate(all_names)})
    found = plan.to_logical_axis_rules()
    off = {
        path for path, names in plan.logical_axes.items()
        if by_flax([n or None for n in names], found.rules) != plan.specs[path]
    }  # fmt: skip
    assert off == {path for conflict in found.conflicts for path in conflict.paths}


def test_a_name_on_two_axes_is_a_conflict() -> None:
    plan = plan_of(
        {
            "big": (("vocab", "embed"), ((), ("data",))),
            "cube": (("x", "y", "embed"), ((), (), ("model",))),
        }
    )
    found = plan.to_logical_axis_rules()
    (conflict,) = found.conflicts
    assert (conflict.name, conflict.paths) == ("embed", ("state/big",))  # the cube is larger
    assert (conflict.planned, conflict.ruled) == (("data",), ("model",))
    assert "# 'embed' would need data for state/big; the rules give model" in str(found)


def test_precedence_says_what_one_rule_a_name_can_not() -> None:
    """`embed` lies over model where `mlp` leaves it free."""
    plan = plan_of({
        "mlp": (("embed", "mlp"), ((), ("model",))), "norm": (("embed",), (("model",),)),
    })  # fmt: skip
    found = plan.to_logical_axis_rules()
    assert found.conflicts == ()
    assert [name for name, _ in found.rules] == ["mlp", "embed"]


def test_optimizer_state_does_not_decide() -> None:
    """ZeRO: moments bear their parameters' names and lie otherwise."""
    plan = plan_of(
        {"w": (("embed", "mlp"), ((), ("model",))), "w2": (("embed", "mlp"), (("data",), ("model",)))}
    )
    inputs = tuple(
        dataclasses.replace(t, kind="optimizer", bytes=1 << 40) if t.path.endswith("w2") else t
        for t in plan.inputs
    )
    found = dataclasses.replace(plan, inputs=inputs).to_logical_axis_rules()
    assert dict(found.rules) == {"mlp": "model", "embed": None} and found.conflicts == ()
    assert [conflict.paths for conflict in found.state_conflicts] == [("state/w2",)]


def test_names_by_hand_and_maxtext_s_form() -> None:
    plan = plan_of({"a": (("", ""), (("data", "model"), ())), "b": (("",), ((),))})
    found = plan.to_logical_axis_rules({"state/a": ("embed", None), "**/b": ("norm",)})
    assert str(found) == "logical_axis_rules: [\n  ['embed', ['data', 'model']],\n  ['norm', null],\n]\n"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (None, "no argument of `train_step` has logical axis names"),
        ({"state/a": ("x",)}, r"state/a: the names \('x',\) don't fit"),
        ({"state/a": ("x", "x")}, "none of them twice"),
    ],
)
def test_names_that_do_not_fit(names: Any, words: str) -> None:
    plan = dataclasses.replace(plan_of({"a": (("", ""), ((), ()))}), logical_axes={}, name="train_step")
    with pytest.raises(jaxplan.ArgumentError, match=words):
        plan.to_logical_axis_rules(names)


def test_they_lead_back_to_the_plan(mesh_4x2: jax.sharding.Mesh) -> None:
    """Found for a plan that was searched freely, and given as rules to pin by: the same specs."""

    def step(params: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            up, down = (p[name].unbox(apply_constraint=False) for name in ("up", "down"))
            return ((jax.nn.relu(x @ up) @ down) ** 2).mean()

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    params = {
        name: nn.LogicallyPartitioned(shape(*extents), names=names)
        for name, extents, names in (
            ("up", (512, 2048), ("embed", "mlp")),
            ("down", (2048, 512), ("mlp", "embed")),
        )
    }
    x, quick = shape(16, 512), {"compare_templates": False}
    free = jaxplan.plan(step, mesh_4x2, params, x, options={**quick, "annotations": "ignore"})
    found = free.to_logical_axis_rules()
    assert found.conflicts == () and any(axes for _, axes in found.rules)
    pinned = jaxplan.plan(step, mesh_4x2, params, x, options={**quick, "axis_rules": found.rules})
    assert pinned.specs == free.specs
