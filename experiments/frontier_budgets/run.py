"""Frontiers against the exact search at fifty memory budgets each; see README.md beside this."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from jaxplan.api import model_of
from jaxplan.api.meshes import target_of
from jaxplan.api.options import Options
from jaxplan.ir import trace
from jaxplan.search import StrategyProblem, Tradeoff, build, solve, tradeoff
from jaxplan.sharding import graph_rules
from models import abstract_arguments, get, get_config

RESULTS = Path(__file__).with_name("results.json")
CASES = {"gpt": "gpt2-scan", "moe": "switch-base", "resnet": "resnet50"}
HARDWARE = "tpu-v5e"
EPS, EVEN, NEAR = 1e-3, 26, 24


def problem_of(model: str, config: str) -> StrategyProblem:
    """The strategy problem of a train step on a mesh of eight."""
    target = target_of(jax.sharding.AbstractMesh((4, 2), ("data", "model")), HARDWARE)
    step = get(model).make_train_step(get_config(model, config))
    graph = trace(step, abstract_arguments(model, config), {}, donate_argnums=(0,)).graph
    return build(graph, model_of(target, Options()), rules=graph_rules(graph)).problem


def budgets(found: Tradeoff) -> list[int]:
    """Fifty from end to end: evenly, and by equal factors towards the small end, down to what isn't told apart."""
    low, span = found.points[0].peak_bytes, found.points[-1].peak_bytes - found.points[0].peak_bytes
    shares = [*np.linspace(0, 1, EVEN), *np.geomspace(EPS, 1, NEAR, endpoint=False)]
    return sorted(low + int(np.ceil(span * share)) for share in shares)


def compared(model: str, limit_s: float, each_s: float) -> dict[str, Any]:
    """The frontier, and at each budget: bytes, its seconds and bound, and the exact search's seconds and bound."""
    problem = problem_of(model, CASES[model])
    started, used = time.perf_counter(), sum(os.times()[:4])
    found, method = tradeoff(problem, eps=EPS, time_limit_s=limit_s)
    wall_s, processor_s = time.perf_counter() - started, sum(os.times()[:4]) - used
    rows = []
    for budget in budgets(found):
        point = found.at_memory(budget)
        assert point is not None
        exact = solve(replace(problem, limit_bytes=budget), time_limit_s=each_s, relative_gap=EPS / 100)
        best_s = exact.objective_s if exact.assignment else None
        rows.append([budget, point.objective_s, found.bound_at(budget), best_s, exact.bound_s])
    return {
        "config": CASES[model], "nodes": len(problem.nodes), "method": method, "points": len(found.points),
        "regret_bound": found.regret_bound, "grain_bytes": found.grain_bytes, "wall_s": round(wall_s, 1),
        "processor_s": round(processor_s, 1), "budgets": rows,
        "ends": [[p.peak_bytes, p.objective_s] for p in (found.points[0], found.points[-1])], **verdict(rows),
    }  # fmt: skip


def verdict(rows: list[list[Any]]) -> dict[str, Any]:
    """How far the frontier is behind the exact search at worst, and how often under a bound, as it must never be."""
    behind = [point_s / best_s - 1 for _, point_s, _, best_s, _ in rows if best_s is not None]
    return {
        "worst_behind": max(behind), "best_ahead": -min(behind), "exact_found_none": len(rows) - len(behind),
        "within_a_thousandth": sum(one <= 1e-3 for one in behind) + len(rows) - len(behind),
        "under_exact_bound": sum(point_s < bound_s * (1 - 1e-9) for _, point_s, _, _, bound_s in rows),
        "exact_under_frontier_bound": sum(
            best_s < floor_s * (1 - 1e-9) for _, _, floor_s, best_s, _ in rows if best_s is not None
        ),
    }  # fmt: skip


def main() -> None:
    """Every case in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a frontier")
    parser.add_argument("--each", type=float, default=10.0, help="seconds of the exact search at a budget")
    parser.add_argument("--here", action="store_true", help="one case, in this process")
    given = parser.parse_args()
    if given.here:
        print(json.dumps(compared(given.only[0], given.limit, given.each)))
        return
    for name in given.only:
        command = [sys.executable, __file__, "--here", "--only", name, "--limit", str(given.limit)]
        done = subprocess.run([*command, "--each", str(given.each)], stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        keep(name, found)
        print(name, {key: found[key] for key in ("points", "regret_bound", "worst_behind", "wall_s")})


def keep(name: str, found: dict[str, Any]) -> None:
    """Put a case among the results, whoever else is doing so."""
    with RESULTS.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        results = {**json.loads(file.read() or "{}"), name: found}
        file.truncate(0)
        file.write(json.dumps(results, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
