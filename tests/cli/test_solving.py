"""`jaxplan solve` and `jaxplan export-problem`, run as commands are."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from jaxplan.cli import main
from jaxplan.cli.argument_types import duration_s, ratio
from jaxplan.search import evaluate, exhaustive, read_contest, write_contest
from tests.search.problems import grid, random_problem

STEP = """
import jax, jax.numpy as jnp

def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

def factory():
    return step, (jax.ShapeDtypeStruct((16, 8), jnp.float32), jax.ShapeDtypeStruct((32, 16), jnp.float32))
"""


@pytest.mark.parametrize(
    ("text", "seconds"), [("60s", 60), ("1min", 60), ("90", 90), ("0.5h", 1800), (".5s", 0.5), ("2.5", 2.5)]
)
def test_times(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-1", "1d", "s", "1 0", "nan", "inf"])
def test_times_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="such as 60s"):
        duration_s(text)


@pytest.mark.parametrize(("text", "part"), [("1%", 0.01), ("0.0001", 1e-4), ("0", 0.0)])
def test_gaps(text: str, part: float) -> None:
    assert ratio(text) == part


@pytest.mark.parametrize("text", ["", "100%", "-1", "x", "nan"])
def test_gaps_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"such as 0\.0001"):
        ratio(text)


def test_solve_prints_what_the_file_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "grid.json.gz"
    feasible = next(p for p in (grid(3, 3, seed) for seed in range(20)) if exhaustive.solve(p).assignment)
    write_contest(feasible, path, 1e-6)
    problem = read_contest(path).problem
    assert main(["solve", str(path), "--gap", "0", "--json", "-"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    optimum = exhaustive.solve(problem)
    assert found["cost"] == optimum.objective_s == evaluate(problem, found["choices"]).objective_s
    assert found["bound"] <= found["cost"] and found["gap"] == 0 and found["termination"] == "optimal"
    assert 0 <= found["time_to_best_s"] <= found["wall_s"]
    assert main(["solve", str(path), "--gap", "0", "--json", str(tmp_path / "out.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["choices"] == found["choices"]
    assert lines[0].split() == ["cost", str(found["cost"])]
    assert lines[-1].split() == ["choices", "in", str(tmp_path / "out.json")]
    assert main(["solve", str(path), "--gap", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1].removeprefix("choices")) == found["choices"]


def test_solve_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", str(tmp_path / "absent.json")]) == 2
    assert "absent.json" in capsys.readouterr().err
    path = tmp_path / "tight.json"
    seed = next(s for s in range(100) if exhaustive.solve(random_problem(s)).termination.value == "infeasible")
    write_contest(random_problem(seed), path, 1e-12)
    assert main(["solve", str(path)]) == 2
    captured = capsys.readouterr()
    assert "no feasible choice" in captured.err and not captured.out


def test_an_exported_step_can_be_solved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "exported_step.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    command = ["export-problem", "exported_step:factory", "--mesh", "data=4", "--hardware", "tpu-v5e"]
    assert main([*command, "--json", "step.json.gz"]) == 0
    assert "picoseconds" in capsys.readouterr().err
    before = Path("step.json.gz").read_bytes()
    assert main([*command, "--json", "step.json.gz"]) == 0
    assert Path("step.json.gz").read_bytes() == before
    assert main(["solve", "step.json.gz", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["termination"] == "optimal" and found["cost"] > 0
    assert len(found["choices"]) == read_contest("step.json.gz").count
    assert main([*command, "--json", "step.json", "--search", "fsdp"]) == 2
