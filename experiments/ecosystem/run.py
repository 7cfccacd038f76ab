"""Train steps of public packages, traced, planned and compiled for eight TPU v5e chips without a TPU.

    python experiments/ecosystem/run.py [--only NAME ...] [--no-compile]

Each case runs in a process of its own, so that packages that can't be imported together, and crashes, don't matter.
Packages that are not installed are named and skipped.  Rows go into `results.json` beside this as they come; the table
in `README.md` is written from them.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
README = HERE / "README.md"
MARK = "<!-- table -->"
SECONDS_A_CASE = 3600


def cases() -> dict[str, tuple[str, str]]:
    """(package, case) of every case by `module/case`, read from the sources: nothing is imported."""
    found = {}
    for path in sorted((HERE / "steps").glob("*.py")):
        names = {}
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names[node.target.id] = node.value
        if {"PACKAGE", "CASES"} <= set(names):
            package = ast.literal_eval(names["PACKAGE"])
            for key in names["CASES"].keys:
                found[f"{path.stem}/{ast.literal_eval(key)}"] = (package, ast.literal_eval(key))
    return found


def run_case(name: str, case: str, *, compile_too: bool) -> dict[str, Any]:
    """The row of one case; of one that fails, `error`: the last lines of what it said."""
    program = (
        "import json, sys; from measure import measure; "
        f"print('ROW', json.dumps(measure({name.split('/')[0]!r}, {case!r}, compile_too={compile_too})))"
    )
    try:
        finished = subprocess.run(
            [sys.executable, "-c", program],
            cwd=HERE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])},
            capture_output=True,
            text=True,
            timeout=SECONDS_A_CASE,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not finished in {SECONDS_A_CASE} s"}
    rows = [line for line in finished.stdout.splitlines() if line.startswith("ROW ")]
    if rows:
        return json.loads(rows[-1].removeprefix("ROW "))
    return {"error": "\n".join(finished.stderr.strip().splitlines()[-12:])[-3000:]}


def _results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def write_table(results: dict[str, Any]) -> str:
    """The table of README.md, which is rewritten below its mark."""
    lines = [
        "| package | train step of | equations | trace, s | plan, s | compile, s | step, ms | memory planned, GiB "
        "| compiled, GiB | without a rule, share of the step | day |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in sorted(results.items()):
        package = f"{row['package']} {row['version']}"
        if "error" in row:
            why = row["error"].splitlines()[-1][:160]
            lines.append(f"| {package} | {name.split('/')[1]} | fails: {why} | | | | | | | | {row.get('day', '')} |")
            continue
        unruled = ", ".join(f"{p} {share:.2%}" for p, share in row["unruled_share"].items()) or "none"
        lines.append(
            f"| {package} | {name.split('/')[1]} | {row['equations']:,} | {row['trace_s']} | {row['plan_s']} "
            f"| {row.get('compile_s', '')} | {row['step_ms']} | {row['peak_gib']} | {row.get('compiled_gib', '')} "
            f"| {unruled} | {row.get('day', '')} |"
        )
    table = "\n".join(lines)
    if README.exists():
        README.write_text(README.read_text(encoding="utf-8").split(MARK)[0] + f"{MARK}\n{table}\n", encoding="utf-8")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="only cases whose `module/case` contains this")
    parser.add_argument("--no-compile", action="store_true", help="trace and plan only")
    options = parser.parse_args()
    for name, (package, case) in cases().items():
        if options.only and not any(text in name for text in options.only):
            continue
        if importlib.util.find_spec(package) is None:
            print(f"{name}: skipped, {package} is not installed (`make test-ecosystem` installs it)")
            continue
        distributions = importlib.metadata.packages_distributions().get(package, [package])
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        row = {"package": distributions[0], "version": importlib.metadata.version(distributions[0]), "day": today}
        row |= run_case(name, case, compile_too=not options.no_compile)
        # Read again: another run may have written meanwhile.
        results = _results()
        results[name] = row
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(name, {key: value for key, value in row.items() if key != "warnings"}, flush=True)
    print(write_table(_results()))


if __name__ == "__main__":
    main()
