"""What one H100 made of the steps: its files are of the cases there are, and its events are added up."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from jaxplan.hardware import load_profile

HERE = Path(__file__).parents[2] / "experiments" / "gpu_truth"
MEASURED = json.loads((HERE / "measured.json").read_text(encoding="utf-8"))


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the folder, which imports its neighbours by name as a script does."""
    monkeypatch.setattr(sys, "path", [str(HERE), *sys.path])
    monkeypatch.delitem(sys.modules, "cases", raising=False)
    found = importlib.util.spec_from_file_location(f"gpu_truth_{name}", HERE / f"{name}.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    monkeypatch.delitem(sys.modules, "cases", raising=False)  # other experiments have one, too
    return module


def test_what_was_measured_is_of_the_cases_that_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    table = script("table", monkeypatch)
    assert {row["case"] for row in MEASURED} <= set(table.CASES) and len(MEASURED) == 14
    assert all(sum(k["seconds"] for k in row["kernels"]) <= 1.01 * row["kernels_s"] for row in MEASURED)
    profile = load_profile("h100")
    assert table.picture(MEASURED, profile).count("<circle") == sum(len(row["kernels"]) for row in MEASURED)


def test_a_quantile_is_weighted(monkeypatch: pytest.MonkeyPatch) -> None:
    table = script("table", monkeypatch)
    assert table._weighted([(1.0, 0.1), (2.0, 0.8), (9.0, 0.1)], 0.5) == 2.0
    assert table._weighted([(1.0, 0.6), (2.0, 0.4)], 0.5) == 1.0


def test_events_of_one_kernel_and_operation_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = script("measure", monkeypatch)

    def event(name: str, op: str, ns: int) -> Any:
        return SimpleNamespace(name=name, duration_ns=ns, stats=[("hlo_op", op)])

    stream = SimpleNamespace(
        name="Stream #1", events=[event("k", "dot.1", 2000), event("k", "dot.1", 4000), event("k", "dot.2", 500)]
    )
    host = SimpleNamespace(name="/host:CPU", lines=[SimpleNamespace(name="python", events=[event("k", "dot.1", 9)])])
    planes = [host, SimpleNamespace(name="/device:GPU:0", lines=[stream])]
    rows = measure.kernel_rows(SimpleNamespace(planes=planes))
    assert [(row["op"], row["runs"]) for row in rows] == [("dot.1", 1.0), ("dot.2", 0.5)]
    assert [row["seconds"] for row in rows] == pytest.approx([3e-6, 2.5e-7])


def test_the_profile_that_was_calibrated_there_loads() -> None:
    profile = load_profile(HERE / "h100-calibrated.toml")
    assert profile.device_kinds == load_profile("h100").device_kinds
    assert 0.7e15 < profile.peak_flops_per_s["bf16"] < 0.8e15
