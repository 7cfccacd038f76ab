"""The project from outside: what is shipped, declared and documented is what there is; house rules."""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxplan.cli.commands import command_parser

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jaxplan"
SOURCES = sorted(PACKAGE.rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()

MAX_LINES = 400
GRAB_BAGS = {"utils", "util", "helpers", "helper", "common", "misc", "data", "info"}


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every module that a file imports; `from a import b` gives `a`."""
    inside = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = inside[: -node.level] if node.level else ()
            yield node.lineno, ".".join((*base, *(node.module or "").split("."))).rstrip(".")


def test_every_file_that_is_not_python_is_shipped() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["jaxplan"]
    shipped = {pattern: set(PACKAGE.glob(pattern)) for pattern in patterns}
    assert all(shipped.values()), f"patterns that match nothing: {[p for p in patterns if not shipped[p]]}"
    # What is compiled, to bytecode and by numba, is made again wherever it is used.
    there = {p for p in PACKAGE.rglob("*") if p.is_file() and p.suffix != ".py" and p.parent.name != "__pycache__"}
    assert there == set().union(*shipped.values())


def test_every_folder_with_python_is_a_package() -> None:
    assert [p for p in {path.parent for path in SOURCES} if not (p / "__init__.py").is_file()] == []


def test_every_third_party_import_is_a_declared_dependency() -> None:
    declared = {re.split(r"[<>=\[]", line)[0] for line in PROJECT["project"]["dependencies"]}
    used = {name.split(".")[0] for path in SOURCES for _, name in _imports(path)}
    assert used - declared - set(sys.stdlib_module_names) - {"jaxplan"} == set()


def test_importing_jaxplan_loads_neither_the_solver_nor_the_models_libraries() -> None:
    heavy = ["ortools", "flax", "optax", "rich"]
    program = f"import sys, jaxplan; print([name for name in {heavy} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert (finished.stdout.strip(), finished.returncode) == ("[]", 0), finished.stderr


def test_packages_meet_at_their_front_doors() -> None:
    """`jaxplan.cost.model` is imported inside jaxplan/cost only; others import `jaxplan.cost`."""
    back_doors = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in SOURCES
        for line, name in _imports(path)
        if name.startswith("jaxplan.") and name.count(".") > 1
        if path.relative_to(ROOT).parts[1] != name.split(".")[1]
    ]
    assert back_doors == []


def test_no_file_is_too_long_to_be_read_at_once() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_no_module_is_a_grab_bag() -> None:
    assert [
        str(path) for path in SOURCES if GRAB_BAGS & set(path.relative_to(ROOT).with_suffix("").parts)
    ] == []


def test_the_readmes_picture_of_the_layers_is_the_contract() -> None:
    layers = PROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
    contract = [name for row in layers for name in row.split(" | ")]
    picture = README.split("## How it is laid out")[1].split("## License")[0]
    rows = re.findall(r"^    (\w+(?:(?:, | \| )\w+)*)  ", picture, re.MULTILINE)
    assert [name for row in rows for name in re.split(r", | \| ", row)] == contract


def test_every_make_target_that_is_named_exists_and_has_its_help_line() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    helped = set(re.findall(r"^  make ([a-z-]+) ", listed, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    assert helped == set(re.findall(r"^\.PHONY: ([a-z-]+)$", makefile, re.MULTILINE))
    texts = (README, (ROOT / ".ci" / "run").read_text(), str(PROJECT["tool"]["pytest"]))
    named = {
        name for text in texts for name in re.findall(r"(?:^|`|    |exec )make ([a-z-]+)", text, re.MULTILINE)
    }
    assert {"test", "demo"} <= named <= helped


def test_ci_runs_the_readmes_test_command() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-1] == "exec make test"


def _readme_commands() -> list[str]:
    return re.findall(r"^    jaxplan (.+)$", README, re.MULTILINE)


@pytest.mark.parametrize("command", _readme_commands())
def test_every_command_of_the_readme_is_one_that_jaxplan_takes(command: str) -> None:
    assert command_parser().parse_args(shlex.split(command, comments=True)).command is not None


def test_the_readme_shows_every_command() -> None:
    shown = {command.split()[0] for command in _readme_commands()}
    commands = next(a.choices for a in command_parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert shown == set(commands)


def test_importing_jaxplan_loads_neither_solver_nor_compiler() -> None:
    """They take seconds, and most commands need none of them."""
    code = "import sys, jaxplan; print(sorted({'numba', 'ortools', 'flax', 'rich'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
