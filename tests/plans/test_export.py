"""The exported Python runs by itself and makes the shardings of the plan."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxplan.plans import Plan
from tests.plans.factory import arguments, make_plan


def run(plan: Plan) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(compile(plan.to_python(), "exported.py", "exec"), namespace)
    return namespace


def result() -> Any:
    return arguments()[0], {"loss": 0.0}


def test_its_shardings_are_the_plans(mesh_4x2: Mesh) -> None:
    plan = make_plan(mesh_4x2)
    exported = run(plan)
    mesh = exported["make_mesh"]()
    assert (mesh.axis_names, dict(mesh.shape)) == (mesh_4x2.axis_names, dict(mesh_4x2.shape))
    assert exported["in_shardings"](mesh_4x2, *arguments()) == plan.in_shardings
    assert exported["out_shardings"](mesh_4x2, result()) == plan.out_shardings
    args = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), arguments())
    state, _ = jax.jit(lambda s, b: (s, b), in_shardings=exported["in_shardings"](mesh, *args))(*args)
    kernel = state["params"]["layer_0"]["mlp"]["up"]["kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(64, 32)}


def test_it_needs_jax_alone() -> None:
    imports = [
        node
        for node in ast.walk(ast.parse(make_plan().to_python()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    modules = {
        name.name if isinstance(node, ast.Import) else node.module for node in imports for name in node.names
    }
    assert modules == {"jax", "jax.sharding"}


def test_keyword_arguments_are_keywords(mesh_4x2: Mesh) -> None:
    state, batch = arguments()
    plan = make_plan(mesh_4x2, in_tree=jax.tree.structure(((state,), {"batch": batch})))
    exported = run(plan)
    assert exported["in_shardings"](mesh_4x2, state, batch=batch) == plan.in_shardings
    assert exported["kwarg_shardings"](mesh_4x2, state, batch=batch) == plan.kwarg_shardings


def test_pinned_values_are_listed_with_their_lines() -> None:
    (line,) = [line for line in make_plan().to_python().splitlines() if "step.py:7 (loss)" in line]
    assert line.startswith("#") and "P('data')" in line and "dot_general (32, 256)" in line


def test_pinned_values_that_are_alike_are_one_line() -> None:
    plan = make_plan()
    (pinned,) = plan.constraints
    free = replace(pinned, why="propagation")
    text = make_plan(constraints=(free, pinned, free, free)).to_python()
    lines = [line for line in text.splitlines() if "step.py:7 (loss)" in line]
    assert len(lines) == 2 and lines[0].endswith(f"for {pinned.why}")
    assert lines[1].endswith("for propagation (3 times)")


def test_names_can_not_break_out_of_their_quotes(mesh_4x2: Mesh) -> None:
    hostile = '"""\nraise SystemExit(1)\n"""'
    plan = make_plan(mesh_4x2, args=({"a'b\"c\\": arguments()[0]["step"]},), roots=("state",), name=hostile)
    assert set(run(plan)["SPECS"]) == {"state/a'b\"c\\"}
