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

from jaxplan.search import read_contest, solve

HERE = Path(__file__).parent
SOURCE = "https://github.com/google/iopddl (Apache-2.0), as asplos-2025-iopddl-<letter>.json.gz"

#: Per problem: the contest's time limit in seconds, the best cost of any contest team, and the best lower
#: bound published since (asplos-contest/2025, misc/iopddl_final_results.csv; ti2-group/iopddl_experiments,
#: lower_bounds/results.db).
PUBLISHED: dict[str, tuple[int, int, int]] = {
    "A": (60, 6_548_641_531, 6_513_812_172),
    "B": (60, 532_843, 532_843),
    "C": (60, 84_102_445_260, 82_509_087_987),
    "D": (60, 313_613_524_736, 298_253_500_099),
    "E": (60, 338_965_335_230, 323_089_251_082),
    "F": (120, 364_364_563_561, 353_665_926_894),
    "G": (120, 217_039, 216_931),
    "H": (120, 527_715_404_257, 508_115_382_755),
    "I": (120, 583_706_456_444, 556_699_743_834),
    "J": (120, 1_360_981_630_371, 1_114_418_889_948),
    "K": (180, 2_274_276_676, 2_065_623_588),
    "L": (180, 1_970_993_742, 1_918_617_707),
    "M": (180, 49_928_460_991, 49_407_421_919),
    "N": (180, 202_739_586_553, 172_940_125_421),
    "O": (180, 222_880_199_765, 191_170_000_000),
    "P": (240, 651_833_115_436, 616_246_285_726),
    "Q": (240, 526_776_842_042, 505_549_458_726),
    "R": (240, 371_899_551_572, 304_520_000_000),
    "S": (240, 1_534_613_444, 1_511_240_135),
    "T": (240, 682_895_254_913, 585_686_829_498),
    "U": (300, 2_569_342_178, 2_018_900_000),
    "V": (300, 1_632_051, 1_617_084),
    "W": (300, 11_818_845_467_155, 10_728_053_095_208),
    "X": (300, 280_461_191_177, 244_891_532_778),
    "Y": (300, 621_176_568_278, 495_260_745_493),
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
    problem = read_contest(path).problem
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
        "--problems", default="".join(PUBLISHED), help="letters (default: all that the folder has)"
    )
    parser.add_argument("--time-limit", type=float, help="seconds a problem; default: the contest's own")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    if options.out.exists():
        rows = {row["problem"]: row for row in json.loads(options.out.read_text())["rows"]}
    absent, scores = [], []
    for letter in options.problems:
        path = options.data / f"asplos-2025-iopddl-{letter}.json.gz"
        if not path.exists():
            absent.append(letter)
            continue
        rows[letter] = measure(path, letter, options.time_limit)
        print(json.dumps(rows[letter]))
        machine = f"{os.cpu_count()} shared cores, {platform.system()}, Python {platform.python_version()}"
        content = {"machine": machine, "rows": [rows[key] for key in sorted(rows)]}
        options.out.write_text(json.dumps(content, indent=1) + "\n")
        scores.append(rows[letter]["score"] or 0.0)
    if scores:
        print(f"best published cost / ours: least {min(scores):.4f}, mean {sum(scores) / len(scores):.4f}")
    if absent:
        print(f"skipped, not in {options.data}: {', '.join(absent)}; they are {SOURCE}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
