"""What the command line hands to the planner, prints where and exits with; the planner is a recorder here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import jaxplan
from jaxplan.cli import main
from jaxplan.errors import InfeasibleError, PlanFileError
from jaxplan.frontier import Curve, DevicesPoint, Frontier, FrontierPoint
from jaxplan.hardware import dump_profile, load_profile
from jaxplan.plans import PlannedTask
from tests.plans.factory import make_plan

STEPS = """
import jax, jax.numpy as jnp

def step(w, x):
    return w + x.sum()

def shapes():
    return jax.ShapeDtypeStruct((4,), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.float32)

def factory():
    return step, shapes()
"""


class RecordedPlan:
    """Answers as a `Plan` does, with texts that tell which question was asked."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"table of {self.name}"

    def save(self, path: Path) -> None:
        Path(path).write_text("json")

    def to_html(self, path: Path) -> None:
        Path(path).write_text("html")

    def to_python(self) -> str:
        return "python"

    def explain(self, path: str) -> str:
        return f"{self.name}: why {path}"

    def diff(self, other: RecordedPlan) -> str:
        return f"{self.name} -> {other.name}"


class Recorder:
    """The facade's `plan`, `load_plan` and `Options`: keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def plan(self, *args: Any, **keywords: Any) -> RecordedPlan:
        self.calls.append((args, keywords))
        return RecordedPlan("planned")

    def load_plan(self, path: Path) -> RecordedPlan:
        return RecordedPlan(Path(path).stem)

    def options(self, *, search: str) -> dict[str, str]:
        return {"search": search}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recorder:
    """A working directory that holds the module `steps_here`, and a facade that records."""
    recorder = Recorder()
    for name, stand_in in (
        ("plan", recorder.plan),
        ("load_plan", recorder.load_plan),
        ("Options", recorder.options),
    ):
        monkeypatch.setattr(jaxplan, name, stand_in, raising=False)
    (tmp_path / "steps_here.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "steps_here", raising=False)
    return recorder


def test_plan_hands_over_the_mesh_in_the_order_written(recorder: Recorder) -> None:
    command = ["plan", "steps_here:factory", "--mesh", "model=2,data=4", "--hardware", "tpu-v5e"]
    assert main(command) == 0
    (step, mesh, weights, batch), keywords = recorder.calls[0]
    assert step.__name__ == "step"
    assert (mesh.axis_names, mesh.axis_sizes) == (("model", "data"), (2, 4))
    assert (weights.shape, batch.shape) == ((4,), (8,))
    assert keywords == {
        "hardware": "tpu-v5e",
        "memory_budget": None,
        "donate_argnums": (),
        "options": None,
    }


def test_plan_hands_over_every_option(recorder: Recorder) -> None:
    command = [
        "plan",
        "steps_here:step",
        "--args",
        "steps_here:shapes",
        "--mesh",
        "data=8",
        "--hardware",
        "h100",
    ]
    settings = ["--memory", "14GiB", "--search", "fsdp", "--donate", "0,1", "--annotations", "start"]
    assert main([*command, *settings]) == 0
    args, keywords = recorder.calls[0]
    assert [shape.shape for shape in args[2:]] == [(4,), (8,)]
    assert keywords == {
        "hardware": "h100",
        "memory_budget": "14GiB",
        "donate_argnums": (0, 1),
        "options": {"search": "fsdp", "annotations": "start"},
    }


@pytest.mark.aot_tpu
def test_plan_for_a_target_gets_a_mesh_over_its_devices(
    recorder: Recorder, tpu_topology: Callable[[str], Any]
) -> None:
    command = ["plan", "steps_here:factory", "--mesh", "data=4,model=2", "--target", "tpu-v5e:2x4"]
    assert main(command) == 0
    args, keywords = recorder.calls[0]
    assert keywords["hardware"] is None
    assert dict(args[1].shape) == {"data": 4, "model": 2}
    assert {device.device_kind for device in args[1].devices.flat} == {"TPU v5 lite"}


@pytest.mark.parametrize(
    ("donate", "expected"), [([], (0,)), (["--donate", ""], ()), (["--donate", "1"], (1,))]
)
def test_a_models_state_is_donated_unless_told_otherwise(
    recorder: Recorder, donate: list[str], expected: tuple[int, ...]
) -> None:
    assert main(["plan", "models.mlp:tiny", "--mesh", "data=2", "--hardware", "cpu-host", *donate]) == 0
    assert recorder.calls[0][1]["donate_argnums"] == expected


def test_the_plan_goes_to_stdout_and_files_and_what_was_written_to_stderr(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", "p.json", "--html", "p.html", "--python", "p.py"]
    assert main(["plan", "steps_here:factory", "--mesh", "data=2", "--hardware", "h100", *files]) == 0
    printed = capsys.readouterr()
    assert printed.out == "table of planned\n"
    assert [line.split()[-1] for line in printed.err.splitlines()] == ["p.json", "p.html", "p.py"]
    assert [Path(name).read_text() for name in ("p.json", "p.html", "p.py")] == ["json", "html", "python"]


def test_fewest_writes_the_constraints_that_matter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    mine = tmp_path / "mine.toml"  # a profile that no name is known of
    mine.write_text(dump_profile(replace(load_profile("cpu-host"), name="mine")), encoding="utf-8")
    command = ["plan", "models.mlp:tiny", "--mesh", "data=4,model=2", "--hardware", str(mine), "--fewest"]
    assert main(command) == 2
    assert "--fewest" in (said := capsys.readouterr()).err and "--python FILE" in said.err
    assert main([*command, "--python", str(tmp_path / "p.py")]) == 0
    assert "Export of the plan of `train_step`" in capsys.readouterr().out
    assert "def in_shardings" in (tmp_path / "p.py").read_text()


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 3)])
def test_verify_compiles_for_devices_and_exits_with_its_verdict(
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mesh_4x2: Any,
    ok: bool,
    code: int,
) -> None:
    class Verdict:
        def __init__(self) -> None:
            self.ok = ok

        def __str__(self) -> str:
            return "the verdict"

    seen: list[Any] = []
    monkeypatch.setattr(jaxplan, "auto_shard", lambda step, mesh, **settings: (step.__name__, mesh, settings))
    monkeypatch.setattr(jaxplan, "verify", lambda *args, **_: seen.extend(args) or Verdict())
    command = [
        "verify",
        "steps_here:factory",
        "--mesh",
        "data=4,model=2",
        "--search",
        "fsdp",
        "--donate",
        "0",
    ]
    assert main(command) == code
    assert capsys.readouterr().out == "the verdict\n"
    (name, mesh, settings), weights, batch = seen
    assert (name, weights.shape, batch.shape) == ("step", (4,), (8,))
    assert mesh.devices.shape == (4, 2)
    assert settings == {"donate_argnums": (0,), "memory_budget": None, "options": {"search": "fsdp"}}


def test_audit_hands_over_shardings_or_a_template(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(jaxplan, "audit", lambda *args, **settings: calls.append(settings) or "the audit")
    (tmp_path / "laid_here.py").write_text(
        "def laid():\n    return ('in', 'out')\n\ndef alone():\n    return 3\n"
    )
    command = ["audit", "steps_here:factory", "--mesh", "data=2", "--hardware", "h100"]
    assert main([*command, "--template", "fsdp"]) == 0
    assert main([*command, "--shardings", "laid_here:laid"]) == 0
    assert capsys.readouterr().out == "the audit\nthe audit\n"
    assert calls[0]["template"] == "fsdp" and "in_shardings" not in calls[0]
    assert (calls[1]["in_shardings"], calls[1]["out_shardings"]) == ("in", "out")
    assert main([*command, "--shardings", "laid_here:alone"]) == 2
    assert "must return a pair (in_shardings, out_shardings)" in capsys.readouterr().err


@pytest.mark.usefixtures("recorder")
def test_verify_needs_as_many_devices_as_the_mesh_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "steps_here:factory", "--mesh", "data=64"]) == 2
    assert "this machine 8" in capsys.readouterr().err


@pytest.mark.usefixtures("recorder")
def test_explain_and_diff_read_plan_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "a.json", "state/params/kernel"]) == 0
    assert main(["diff", "a.json", "b.json"]) == 0
    assert capsys.readouterr().out == "a: why state/params/kernel\na -> b\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mesh", "data"], "AXIS=SIZE"),
        (["--mesh", "data=0"], "size of 1 or more"),
        (["--mesh", "data=2,data=4"], "names axis 'data' twice"),
        (["--mesh", "data=2", "--donate", "state"], "argument positions"),
        (["--mesh", "data=2", "--json", "nowhere/p.json"], "there is no directory nowhere"),
        (["--mesh", "data=2", "--html", "."], "is a directory"),
        (["--mesh", "data=2", "--target", "tpu-v5e:2x4"], "not allowed with argument --hardware"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_planned(
    recorder: Recorder, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(["plan", "steps_here:factory", "--hardware", "h100", *arguments])
    assert refusal.value.code == 2
    assert said in capsys.readouterr().err
    assert recorder.calls == []


def _raising(error: BaseException) -> Callable[..., Any]:
    def stand_in(*_: Any, **__: Any) -> Any:
        raise error

    return stand_in


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InfeasibleError("no plan fits 1.00 GiB a device"), 2),
        (PlanFileError("plan a.json is cut short"), 2),
        (FileNotFoundError(2, "No such file or directory", "a.json"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
@pytest.mark.usefixtures("recorder")
def test_expected_errors_become_one_message_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    monkeypatch.setattr(jaxplan, "load_plan", _raising(error), raising=False)
    assert main(["explain", "a.json", "x"]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert (str(error) or "interrupted") in printed.err


@pytest.mark.usefixtures("recorder")
def test_an_error_of_the_users_own_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxplan, "plan", _raising(ZeroDivisionError("in the step")), raising=False)
    with pytest.raises(ZeroDivisionError, match="in the step"):
        main(["plan", "steps_here:factory", "--mesh", "data=2", "--hardware", "h100"])


def test_an_unknown_profile_exits_with_2_and_names_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["hardware", "tpu-v5ee"]) == 2
    assert "tpu-v5e" in capsys.readouterr().err


def test_models_lists_only_what_plan_accepts(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    targets = capsys.readouterr().out.split()
    tiny = [target for target in targets if target.endswith(":tiny")]
    assert {"models.mlp:tiny", "models.gpt:tiny"} <= set(tiny)
    for target in tiny:
        assert main(["plan", target, "--mesh", "data=2", "--hardware", "cpu-host"]) == 0
    assert len(recorder.calls) == len(tiny)


def test_a_reader_that_goes_away_is_not_an_error_message() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "jaxplan", "hardware", "tpu-v5e"]
    try:
        finished = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(writing)
    assert (finished.returncode, finished.stderr) == (141, "")


def test_simulate_writes_its_files_and_prints_where_the_time_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = PlannedTask(
        name="dot_general", kind="compute", streams=("compute",), seconds_s=1e-3, trips=1.0, after=(),
        where="step.py:1", bytes=7,
    )  # fmt: skip
    make_plan(tasks=(task,)).save(tmp_path / "plan.json")
    picture, trace = tmp_path / "step.svg", tmp_path / "step.json"
    assert main(["simulate", str(tmp_path / "plan.json"), "--svg", str(picture), "--trace", str(trace)]) == 0
    assert "1 ms a step" in capsys.readouterr().out
    assert picture.read_text().startswith("<svg")
    assert json.loads(trace.read_text())["traceEvents"]


def test_simulate_refuses_a_plan_without_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_plan().save(tmp_path / "plan.json")
    assert main(["simulate", str(tmp_path / "plan.json")]) == 2
    assert "has no tasks to simulate" in capsys.readouterr().err


def test_search_plans_by_the_search_that_was_named(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxplan, "Options", lambda **fields: fields)
    command = ["search", "steps_here:factory", "--mesh", "data=2", "--hardware", "h100", "--algo", "mcmc"]
    assert main([*command, "--budget", "5s", "--seed", "3", "--json", "found.json"]) == 0
    assert recorder.calls[0][1]["options"] == {"search": "mcmc", "time_limit_s": 5.0, "seed": 3}
    assert Path("found.json").read_text() == "json"


def test_compare_prints_every_search_beside_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "compared_step.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    command = ["compare", "compared_step:factory", "--mesh", "data=2", "--hardware", "tpu-v5e", "--budget", "5s"]
    assert main([*command, "--algos", "ilp,mcmc,templates"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "5 s each" in lines[0] and "best template" in lines[1]
    assert [line.split()[0] for line in lines[3:-1]] == ["ilp", "mcmc", "templates"]
    assert "without the copies" in lines[-1]
    assert " optimal" in lines[3]
    assert main([*command, "--algos", "magic"]) == 2
    assert "name some of" in capsys.readouterr().err


def test_frontier_writes_its_files_and_prints_its_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def frontier(step: Any, mesh: Any, *shapes: Any, **settings: Any) -> Frontier:
        asked.update(settings, mesh=dict(mesh.shape), shapes=len(shapes))
        points = (
            FrontierPoint(step_s=2e-3, peak_bytes=10, bound_s=2e-3, counted_bytes=10),
            FrontierPoint(step_s=1e-3, peak_bytes=20, bound_s=1e-3, counted_bytes=20),
        )
        return Frontier(
            name="step",
            mesh="data=2",
            hardware="tpu-v5e",
            memory_bytes=30,
            points=points,
            method="by hand",
            eps=0.0,
        )

    monkeypatch.setattr(jaxplan, "frontier", frontier)
    (tmp_path / "frontier_step.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    picture, saved = tmp_path / "frontier.svg", tmp_path / "frontier.json"
    command = [
        "frontier",
        "frontier_step:factory",
        "--mesh",
        "data=2",
        "--hardware",
        "tpu-v5e",
        "--limit",
        "5s",
    ]
    assert main([*command, "--svg", str(picture), "--json", str(saved)]) == 0
    assert asked == {
        "eps": 1e-3, "time_limit_s": 5.0, "donate_argnums": (), "hardware": "tpu-v5e", "mesh": {"data": 2}, "shapes": 2,
    }  # fmt: skip
    said = capsys.readouterr().out
    assert "2 plans\n  from end to end: 100 % more memory" in said and "\n  found by hand\n" in said
    assert picture.read_text().startswith("<svg")
    assert len(Frontier.from_json(saved).points) == 2


def test_curve_and_min_devices_ask_for_numbers_of_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, Any]] = []
    point = DevicesPoint(
        devices=4, axes=(("data", 4),), step_s=1e-3, bound_s=1e-3, peak_bytes=10,
        tried=("data=4: 1 ms", "data=2,model=2"),
    )  # fmt: skip

    def curve(step: Any, *shapes: Any, **settings: Any) -> Curve:
        asked.append({**settings, "shapes": len(shapes)})
        return Curve(name="step", hardware="v100", memory_bytes=30, points=(point,))

    def min_devices(step: Any, *shapes: Any, **settings: Any) -> DevicesPoint:
        asked.append({**settings, "shapes": len(shapes)})
        return point

    monkeypatch.setattr(jaxplan, "curve", curve)
    monkeypatch.setattr(jaxplan, "min_devices", min_devices)
    (tmp_path / "curve_step.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    picture, saved = tmp_path / "curve.svg", tmp_path / "curve.json"
    common = ["curve_step:factory", "--hardware", "v100", "--devices", "2,4"]
    assert main(["curve", *common, "--memory", "1GiB", "--svg", str(picture), "--json", str(saved)]) == 0
    assert main(["min-devices", *common, "--mesh-axes", "3"]) == 0
    same = {"devices": (2, 4), "hardware": "v100", "donate_argnums": (), "shapes": 2}
    assert asked == [
        {**same, "memory": "1GiB", "options": {"mesh_axes": 2}},
        {**same, "memory": None, "options": {"mesh_axes": 3}},
    ]
    out = capsys.readouterr().out
    assert "Curve of `step` on v100" in out and "4 devices as (data=4)" in out and "data=2,model=2" in out
    assert picture.read_text().startswith("<svg")
    assert Curve.from_json(saved).points == (point,)
    with pytest.raises(SystemExit):
        main(["curve", "curve_step:factory", "--hardware", "v100", "--devices", "4,2"])


def test_plan_chooses_the_mesh_of_a_number_of_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "devices_step.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "devices_step:factory", "--devices", "4", "--hardware", "tpu-v5e"]) == 0
    assert "data=2,model=2" in capsys.readouterr().out
    assert main(["plan", "devices_step:factory", "--mesh", "auto", "--hardware", "tpu-v5e"]) == 2
    assert "use --devices N" in capsys.readouterr().err
