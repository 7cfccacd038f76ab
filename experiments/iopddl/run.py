"""The search on the field's own benchmark: problems of the ASPLOS 2025 contest IOPDDL.

Each answer is priced again here, by the contest's rules and from its file, in code that shares nothing with
jaxplan.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from jaxplan.search import StrategyProblem, solve

HERE = Path(__file__).parent
SOURCE = "https://github.com/google/iopddl (Apache-2.0), as asplos-2025-iopddl-<letter>.json.gz"

#: Per problem: the contest's time limit in seconds, the best cost of any contest team, and the best lower
#: bound published since (asplos-contest/2025, misc/iopddl_final_results.csv; ti2-group/iopddl_experiments,
#: lower_bounds/results.db).
PUBLISHED: dict[str, tuple[int, int, float]] = {
    "A": (60, 6_548_641_531, 6.514e9),
    "G": (120, 217_039, 216_931),
    "K": (180, 2_274_276_676, 2.066e9),
    "M": (180, 49_928_460_991, 4.941e10),
    "S": (240, 1_534_613_444, 1.5112e9),
    "V": (300, 1_632_051, 1_617_084),
}

FORBIDDEN = 10**18


def contest_cost(content: dict[str, Any], assignment: tuple[int, ...]) -> int:
    """The cost by the contest's rules, exact integers; ValueError when the assignment breaks one."""
    nodes, edges = content["nodes"], content["edges"]
    total = sum(costs[s] for costs, s in zip(nodes["costs"], assignment, strict=False))
    for (tail, head), costs in zip(edges["nodes"], edges["costs"], strict=True):
        total += costs[assignment[tail] * len(nodes["costs"][head]) + assignment[head]]
    if total >= FORBIDDEN:
        raise ValueError("a forbidden choice was taken")
    delta: dict[int, int] = {}
    for (start, stop), used, s in zip(nodes["intervals"], nodes["usages"], assignment, strict=False):
        if start < stop:
            delta[start] = delta.get(start, 0) + used[s]
            delta[stop] = delta.get(stop, 0) - used[s]
    alive = 0
    for step in sorted(delta):
        alive += delta[step]
        if alive > content.get("usage_limit", alive):
            raise ValueError(f"{alive} bytes at time step {step} exceed the limit {content['usage_limit']}")
    return total


def measure(path: Path, letter: str, time_limit_s: float | None) -> dict[str, Any]:
    """Read, solve, and price one problem."""
    contest_limit_s, best_known, bound_known = PUBLISHED[letter]
    start = time.perf_counter()
    problem = StrategyProblem.from_iopddl(path)
    read_s = time.perf_counter() - start
    limit_s = time_limit_s or float(contest_limit_s)
    result = solve(
        problem,
        # The contest's clock starts before the file is read.
        time_limit_s=max(limit_s - read_s, 1.0),
        on_progress=lambda best, bound: print(
            f"  {letter}: cost {best:.10g}, bound {bound:.10g}", file=sys.stderr
        ),
    )
    with gzip.open(path) as file:
        content = json.loads(file.read())["problem"]
    cost = contest_cost(content, result.assignment) if result.assignment else None
    return {
        "problem": letter,
        "nodes": len(content["nodes"]["costs"]),
        "edges": len(content["edges"]["costs"]),
        "cost": cost,
        "bound": round(result.bound_s),
        "gap": None if cost is None else round(result.gap, 6),
        "termination": result.termination.value,
        "read_s": round(read_s, 1),
        "search_s": round(result.wall_s, 1),
        "time_limit_s": limit_s,
        "best_published_cost": best_known,
        "best_published_bound": bound_known,
        "score": None if cost is None else round(best_known / cost, 6),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the contest's files")
    parser.add_argument(
        "--problems", default="GA", help=f"letters, any of {''.join(PUBLISHED)} (default: GA)"
    )
    parser.add_argument("--time-limit", type=float, help="seconds a problem; default: the contest's own")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    if options.out.exists():
        rows = {row["problem"]: row for row in json.loads(options.out.read_text())["rows"]}
    absent = []
    for letter in options.problems:
        path = options.data / f"asplos-2025-iopddl-{letter}.json.gz"
        if not path.exists():
            absent.append(str(path))
            continue
        rows[letter] = measure(path, letter, options.time_limit)
        print(json.dumps(rows[letter]))
        machine = f"{os.cpu_count()} shared cores, {platform.system()}, Python {platform.python_version()}"
        content = {"machine": machine, "rows": [rows[key] for key in sorted(rows)]}
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    if absent:
        print(f"absent: {', '.join(absent)}; get them from {SOURCE}", file=sys.stderr)
    return 1 if absent else 0


if __name__ == "__main__":
    sys.exit(main())
