"""A plan survives its file exactly; a file that is not the plan it should be is refused and named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, Mesh

from jaxplan.errors import PlanFileError, PlanMismatchError
from jaxplan.plans import Plan, load_plan
from jaxplan.plans.serialize import plan_of_text, plan_text
from tests.plans.factory import cost, make_plan

TEXT = plan_text(make_plan())


def edited(**changes: Any) -> str:
    return json.dumps(json.loads(TEXT) | changes)


def test_a_loaded_plan_is_the_saved_one(tmp_path: Path, mesh_4x2: Mesh) -> None:
    plan = make_plan(mesh_4x2)
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json", mesh_4x2)
    assert loaded == plan
    assert loaded.in_shardings == plan.in_shardings
    assert loaded.out_shardings == plan.out_shardings
    assert str(loaded) == str(replace(plan, cost=replace(plan.cost, search_s=0.0)))


@given(st.floats(allow_nan=False, allow_infinity=False), st.text(), st.integers(0, 2**63))
def test_any_number_and_any_text_come_back_exactly(number: float, text: str, size: int) -> None:
    plan = make_plan(
        name=text,
        warnings=(text,),
        cost=cost(step_s=number, peak_bytes=size, search_s=0.0),
        templates={text: number},
    )
    read = plan_of_text(plan_text(plan), "plan.json")
    assert read == plan
    assert plan_text(read) == plan_text(plan)


def test_numpy_numbers_are_written_as_numbers() -> None:
    plan = make_plan(budget_bytes=np.int64(2**34), cost=cost(step_s=np.float64(0.1), gap=np.float32(0.0)))
    assert plan_text(plan) == plan_text(make_plan(budget_bytes=2**34, cost=cost(step_s=0.1)))


def test_the_time_a_search_took_is_not_in_the_file() -> None:
    assert plan_text(make_plan(cost=cost(search_s=1.0))) == plan_text(make_plan(cost=cost(search_s=99.0)))


def test_one_leaf_changed_is_one_line_changed() -> None:
    plan = make_plan()
    other = replace(plan, inputs=(replace(plan.inputs[0], local_bytes=7), *plan.inputs[1:]))
    ours, theirs = plan_text(plan).splitlines(), plan_text(other).splitlines()
    changed = [line for line, new in zip(ours, theirs, strict=True) if line != new]
    assert len(changed) == 1 and plan.inputs[0].path in changed[0]


def test_fresh_processes_write_the_same_bytes() -> None:
    program = "import sys; from tests.plans.test_serialize import TEXT; sys.stdout.write(TEXT)"
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(["."])},
            capture_output=True, check=True, text=True, encoding="utf-8",
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert texts == {TEXT}


@given(st.integers(0, len(TEXT) - 3))
def test_a_file_cut_short_anywhere_is_named_as_such(length: int) -> None:
    with pytest.raises(PlanFileError, match=r"^plan\.json: cut short after \d+ bytes"):
        plan_of_text(TEXT[:length], "plan.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hello", r"p\.json: not a plan file: line 1, column 1 is not JSON"),
        ("[1, 2]", r"p\.json: JSON, but not a plan file: it has no `schema_version`"),
        (
            edited(schema_version=4),
            r"p\.json: written by a newer jaxplan \(schema 4; this one reads up to 3\)",
        ),
        (edited(schema_version=0), r"`schema_version` 0 never was"),
        (edited(schema_version=1), r"written by an older jaxplan \(schema 1; this one reads 3\): plan again"),
        (edited(schema_version=True), "no `schema_version`"),
        (edited(budget_bytes="16GiB"), r"  budget_bytes: must be a whole number, is '16GiB'"),
        (edited(axes=[["data", 4, 1]]), r"  axes\[0\]: must be a list of 2"),
        (edited(colour="red"), "  colour: unknown"),
        (edited(axes=[["data", 4]]), "is cut over 'model', no axis of the mesh"),
        (edited(inputs=[]), r"in_tree: has \d+ leaves, and the plan lists 0 tensors"),
        (edited(in_tree={"tuple": "x"}), r"in_tree\.tuple: must be a list"),
        (edited(out_tree={"exec": []}), "out_tree: not the structure of a tree"),
        (edited(templates={"fsdp": float("inf")}), r"templates\.fsdp: must be a number, is inf"),
    ],
)
def test_each_kind_of_wrong_file_is_told_apart(text: str, words: str) -> None:
    with pytest.raises(PlanFileError, match=words):
        plan_of_text(text, "p.json")


@pytest.mark.parametrize("field", sorted(json.loads(TEXT)))
def test_no_field_may_be_missing(field: str) -> None:
    document = json.loads(TEXT)
    del document[field]
    with pytest.raises(PlanFileError, match=field):
        plan_of_text(json.dumps(document), "p.json")


def test_a_binary_file_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\x80\xff")
    with pytest.raises(PlanFileError, match="byte 0 is not UTF-8"):
        load_plan(tmp_path / "x")


def test_a_failed_save_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "plan.json"
    make_plan().save(target)
    old = target.read_bytes()

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        make_plan(name="other").save(target)
    assert target.read_bytes() == old
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("sizes", "names", "words"),
    [
        ((2, 2), ("data", "model"), "axis 'data' has size 2 instead of 4"),
        ((4, 2), ("data", "tensor"), "axis 'model' is missing; axis 'tensor' is not in the plan"),
        ((2, 4), ("model", "data"), "the axes stand in another order"),
        ((4, 2, 1), ("data", "model", "more"), "axis 'more' is not in the plan"),
    ],
)
def test_a_mesh_of_other_axes_is_refused(sizes: Any, names: Any, words: str, tmp_path: Path) -> None:
    make_plan().save(tmp_path / "p")
    with pytest.raises(PlanMismatchError, match=words):
        load_plan(tmp_path / "p", AbstractMesh(sizes, names))


def test_another_device_kind_is_a_warning_once(tmp_path: Path, mesh_4x2: Mesh) -> None:
    plan = make_plan(device_kind="TPU v5e", warnings=())
    for _ in range(2):
        plan.save(tmp_path / "p")
        plan = load_plan(tmp_path / "p", mesh_4x2)
        assert len(plan.warnings) == 1 and "'TPU v5e'" in plan.warnings[0]


def test_a_plan_without_trees_can_be_saved() -> None:
    plan = replace(make_plan(), in_tree=None, out_tree=None)
    assert plan_of_text(plan_text(plan), "p").in_tree is None


def test_a_result_that_is_none_is_not_a_missing_tree(mesh_4x2: Mesh) -> None:
    plan = replace(make_plan(mesh_4x2), outputs=(), out_tree=jax.tree.structure(None))
    read: Plan = replace(plan_of_text(plan_text(plan), "p"), mesh=mesh_4x2)
    assert read.out_shardings is None
