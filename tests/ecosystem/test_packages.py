"""Train steps of public packages, as their users write them: traced, planned and compiled for eight TPU v5e chips."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ECOSYSTEM = Path(__file__).parents[2] / "experiments" / "ecosystem"

UNRULED_SHARE = 0.01
"""Of a step's time: what may be spent in one primitive that has no rule."""


def runner() -> Any:
    spec = importlib.util.spec_from_file_location("ecosystem_run", ECOSYSTEM / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RUN = runner()


@pytest.mark.ecosystem
@pytest.mark.parametrize("name", RUN.cases())
def test_the_step_is_planned_and_compiled_and_nothing_of_weight_has_no_rule(name: str) -> None:
    package, case = RUN.cases()[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: `pip install -e .[ecosystem]` into an environment of its own")
    row = RUN.run_case(name, case, compile_too=True)
    assert "error" not in row, row["error"]
    assert row["compiled_gib"] > 0 or row["parameters"] < 1e6
    assert {p: share for p, share in row["unruled_share"].items() if share > UNRULED_SHARE} == {}


def test_every_case_stands_in_the_list_that_is_read_without_importing_it() -> None:
    cases = RUN.cases()
    assert len({package for package, _ in cases.values()}) >= 12
    assert len(cases) >= 24


def test_a_case_that_fails_says_why() -> None:
    row = RUN.run_case("no_such_module/x", "x", compile_too=False)
    assert "No module named 'steps.no_such_module'" in row["error"], sys.executable
