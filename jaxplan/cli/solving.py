"""`jaxplan solve`: search problems in the format of the IOPDDL contest."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from ..errors import InfeasibleError, SolverError
from .argument_types import duration_s, ratio

#: On stderr the search is followed at most this often.
SECONDS_A_LINE = 1.0


def add_solve(commands: Any) -> None:
    solve = commands.add_parser(
        "solve", help="solve a problem of the IOPDDL contest, or one of export-problem"
    )
    solve.add_argument("problem", type=Path, metavar="FILE", help=".json or .json.gz")
    solve.add_argument(
        "--limit", type=duration_s, metavar="TIME", help="60s, 5min; default: until it is proved"
    )
    solve.add_argument(
        "--gap",
        type=ratio,
        default=1e-4,
        metavar="PART",
        help="proved is enough within this part; default: 0.0001",
    )
    solve.add_argument("--seed", type=int, default=0, metavar="N", help="of the random choices; default: 0")
    solve.add_argument("--json", metavar="FILE", help="write the result; - prints that instead of the text")
    solve.set_defaults(command=_solve)


def _solve(arguments: argparse.Namespace) -> None:
    from ..search import Termination, read_contest, solve

    # The limit is for the whole command, loading included.
    started = time.monotonic() - (_lived_s() if arguments.is_process else 0.0)
    contest = read_contest(arguments.problem)
    read_s = time.monotonic() - started
    said_s = started

    def follow(cost: float, bound: float) -> None:
        nonlocal said_s
        now = time.monotonic()
        if now - said_s >= SECONDS_A_LINE:
            said_s = now
            print(f"jaxplan: {now - started:6.1f} s  cost {cost:.12g}  bound {bound:.12g}", file=sys.stderr)

    result = solve(
        contest.problem,
        # The file has to be read within the limit, too.
        time_limit_s=None if arguments.limit is None else max(arguments.limit - read_s, 0.1),
        relative_gap=arguments.gap,
        seed=arguments.seed,
        on_progress=follow,
    )
    if result.termination is Termination.INFEASIBLE:
        raise InfeasibleError(f"{arguments.problem} has no feasible choice: {result.reason}")
    if not result.found:
        if result.termination is Termination.INTERRUPTED:
            raise KeyboardInterrupt
        raise SolverError(
            f"nothing feasible was found in {arguments.problem} within {result.wall_s:.1f} s: allow more with --limit"
        )
    found = {
        "cost": _whole(result.objective_s),
        "bound": _whole(result.bound_s),
        "gap": result.gap,
        "termination": result.termination.value,
        "time_to_best_s": round(read_s + result.best_at_s, 3),
        "wall_s": round(read_s + result.wall_s, 3),
        "peak_usage": result.peak_bytes,
        "usage_limit": contest.problem.limit_bytes,
        "choices": contest.choices(result.assignment),
    }
    text = json.dumps(found) + "\n"
    if arguments.json == "-":
        sys.stdout.write(text)
    else:
        if arguments.json is not None:
            Path(arguments.json).write_text(text, encoding="utf-8")
        _print_result(found, arguments.json)
    if result.termination is Termination.INTERRUPTED:
        raise KeyboardInterrupt


def _lived_s() -> float:
    """Seconds since this process began; where the system does not tell, those that the processor was at work for it."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # /proc and this clock are Linux's
        return time.process_time()


def _print_result(found: dict[str, Any], written: str | None) -> None:
    limit = found["usage_limit"]
    print(f"cost          {found['cost']}")
    print(f"bound         {'none' if found['bound'] is None else found['bound']}")
    print(f"gap           {found['gap']:.4%} ({found['termination'].replace('_', ' ')})")
    print(f"time to best  {found['time_to_best_s']:.1f} s of {found['wall_s']:.1f} s")
    print(f"peak usage    {found['peak_usage']}" + ("" if limit is None else f" of {limit}"))
    print(f"choices       {found['choices'] if written is None else 'in ' + written}")  # tens of thousands, often


def _whole(value: float) -> int | float | None:
    """Contest costs are integers; a bound need not be, and may be missing."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else value
