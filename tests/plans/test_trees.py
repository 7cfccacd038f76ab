"""A tree's structure in JSON gives the same treedef back, and never runs what a file says."""

from __future__ import annotations

import collections
import dataclasses
import json
import sys
from typing import Any, NamedTuple

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxplan.errors import PlanMismatchError
from jaxplan.plans.serialize import plan_of_text, plan_text
from jaxplan.plans.trees import Structure, UnknownNodes, faults_of, structure_of, treedef_of
from tests.plans.factory import arguments, make_plan, shape


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    weights: Any
    step: Any


KEYS = st.dictionaries(st.text(max_size=3), st.none(), max_size=3).map(dict)
TREES = st.recursive(
    st.sampled_from([1.0, None]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(st.integers(-3, 3), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(collections.OrderedDict),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=12,
)


@given(TREES)
def test_every_tree_of_standard_containers_comes_back(tree: Any) -> None:
    treedef = jax.tree.structure(tree)
    text = json.dumps(structure_of(treedef).node, sort_keys=True)
    node = json.loads(text)
    assert faults_of(node, "tree") == []
    assert treedef_of(Structure(node)) == treedef


def test_a_class_of_an_unimported_module_is_not_imported() -> None:
    node = {"namedtuple": "this.module.is.never.imported:Pair", "fields": [["left", "*"]]}
    with pytest.raises(UnknownNodes, match=r"this\.module\.is\.never\.imported:Pair"):
        treedef_of(Structure(node))
    unused = "turtledemo.clock"
    assert unused not in sys.modules
    with pytest.raises(UnknownNodes):
        treedef_of(Structure({"namedtuple": f"{unused}:Clock", "fields": []}))
    assert unused not in sys.modules


@pytest.mark.parametrize(
    "name", ["os:system", "builtins:tuple", "subprocess:Popen", "tests.plans.test_trees:Pair"]
)
def test_a_file_can_only_name_a_namedtuple_of_these_fields(name: str) -> None:
    with pytest.raises(UnknownNodes):
        treedef_of(Structure({"namedtuple": name, "fields": [["other", "*"]]}))


def test_a_namedtuples_own_constructor_is_not_called() -> None:
    class Trap(Pair):
        def __new__(cls, *_: Any) -> Trap:
            raise AssertionError("the class of a file was called")

    trap = tuple.__new__(Trap, (1, 2))
    module = sys.modules[__name__]
    Trap.__module__, Trap.__qualname__ = __name__, "Trap"
    try:
        module.__dict__["Trap"] = Trap
        assert treedef_of(structure_of(jax.tree.structure(trap))) == jax.tree.structure(trap)
    finally:
        del module.__dict__["Trap"]


def custom_arguments() -> tuple[Any, Any]:
    state, batch = arguments(layers=1)
    return Registered(weights=state["params"], step=state["step"]), batch


def test_a_custom_node_needs_binding_and_binding_is_enough(mesh_4x2: Any) -> None:
    args = custom_arguments()
    plan = make_plan(mesh_4x2, args)
    read = dataclasses.replace(plan_of_text(plan_text(plan), "p"), mesh=mesh_4x2)
    with pytest.raises(PlanMismatchError, match=r"test_trees\.Registered.*plan\.bind\("):
        _ = read.in_shardings
    bound = read.bind(*args)
    assert bound.in_shardings == plan.in_shardings
    assert bound.out_shardings == plan.out_shardings
    assert plan_text(bound) == plan_text(plan) == plan_text(read)


def test_binding_names_leaves_that_are_new_gone_and_changed() -> None:
    plan = make_plan()
    state, batch = arguments()
    state["params"] = {**state["params"], "head": shape(3)}
    del state["params"]["embedding"]
    batch["inputs"] = shape(32, 8, dtype="int32")
    with pytest.raises(PlanMismatchError) as caught:
        plan.bind(state, batch)
    text = str(caught.value)
    assert f"3 of {len(plan.inputs) + 1} leaves differ" in text
    assert "state/params/head: new, float32[3]" in text
    assert "state/params/embedding: gone, was float32[256, 64]" in text
    assert "batch/inputs: int32[32, 16] -> int32[32, 8]" in text


def test_a_long_list_of_differences_is_cut() -> None:
    with pytest.raises(PlanMismatchError) as caught:
        make_plan(args=arguments(layers=30)).bind(*arguments(layers=1))
    lines = str(caught.value).splitlines()
    differing = 29 * 9
    assert f"{differing} of " in lines[0]
    assert lines[-2] == f"  and {differing - 8} more"
    assert len(lines) == 1 + 8 + 1 + 1


def test_binding_takes_keyword_arguments(mesh_4x2: Any) -> None:
    state, batch = arguments()
    plan = make_plan(mesh_4x2, in_tree=jax.tree.structure(((state,), {"batch": batch})))
    assert plan.bind(state, batch=batch).kwarg_shardings == plan.kwarg_shardings
    with pytest.raises(PlanMismatchError, match="batch/inputs: gone"):
        plan.bind(state)


def test_real_arrays_bind_as_their_shapes_do(mesh_4x2: Any) -> None:
    args = arguments(layers=1)
    plan = make_plan(mesh_4x2, args)
    arrays = jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), args)
    assert plan.bind(*arrays).in_shardings == plan.in_shardings
