"""How long planning takes and on what, how small the proved gap is, and what depth costs; see README.md beside this."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pkgutil
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import jaxplan
from jaxplan.api import model_of
from jaxplan.api.arguments import collector_paused
from jaxplan.api.meshes import target_of
from jaxplan.api.options import Options
from jaxplan.errors import InfeasibleError
from jaxplan.ir import trace
from jaxplan.search import StrategyProblem, build, solve, solve_folded
from jaxplan.sharding import graph_rules
from models import get, get_config, names

HARDWARE = "tpu-v5p"
DEPTHS = (12, 48)
SEARCHES = {"folded": solve_folded, "whole": solve}
RESULTS = Path(__file__).with_name("results.json")
GAPS = Path(__file__).with_name("gaps.json")

ROWS: dict[str, tuple[str, str, dict[str, Any], dict[str, int], float]] = {
    "gpt2 scanned": ("gpt", "gpt2-scan", {}, {"data": 8}, 3.0),
    "gpt3-175b scanned": ("gpt", "gpt3-175b", {}, {"data": 64, "model": 8}, 3.0),
    "gpt2 unrolled": ("gpt", "gpt2", {}, {"data": 8}, 4.0),
    "gpt3-175b unrolled": ("gpt", "gpt3-175b", {"scan_layers": False}, {"data": 64, "model": 8}, 15.0),
    "llama3-8b unrolled": ("llama", "llama3-8b", {"scan_layers": False}, {"data": 8, "model": 8}, 8.0),
    "llama3-70b unrolled": (
        "llama", "llama3-70b", {"scan_layers": False}, {"data": 16, "fsdp": 4, "model": 4}, 20.0,
    ),
    "mixtral-8x7b": ("moe", "mixtral-8x7b", {}, {"data": 8, "model": 8}, 10.0),
    "vit-l16": ("vit", "vit-l16", {}, {"data": 4, "model": 2}, 10.0),
    "resnet50": ("resnet", "resnet50", {}, {"data": 8}, 10.0),
    "resnet152": ("resnet", "resnet152", {}, {"data": 4, "model": 2}, 10.0),
    "inception-v3": ("inception", "inception-v3", {}, {"data": 4, "model": 2}, 10.0),
    "unet 256": ("unet", "ddpm-256", {}, {"data": 4, "model": 2}, 10.0),
    "big-lstm": ("lstm", "big-lstm", {}, {"data": 4, "model": 2}, 10.0),
    "llama2-7b scanned 2x2x2": ("llama", "llama2-7b", {}, {"data": 2, "fsdp": 2, "model": 2}, 10.0),
    "llama3-8b scanned 4x4x4": ("llama", "llama3-8b", {}, {"data": 4, "fsdp": 4, "model": 4}, 10.0),
    "llama3-8b scanned 8x8x8": ("llama", "llama3-8b", {}, {"data": 8, "fsdp": 8, "model": 8}, 10.0),
}  # fmt: skip
"""Name -> model, config, what is changed in it, mesh, limit in wall seconds on two idle cores."""

WARMING = "mixtral-8x7b"
"""Planned once with no clock: Numba compiles the search's kernels at their first use in an installation."""

MESHES: tuple[dict[str, int], ...] = (
    {"data": 8}, {"data": 4, "model": 4}, {"data": 8, "model": 8}, {"data": 64, "model": 8},
)  # fmt: skip

STAGES: dict[str, tuple[str, str, Callable[[Any], str]]] = {
    "trace": ("jaxplan.api.autoshard", "trace", lambda r: f"{len(r.graph.ops)} operations"),
    "build": ("jaxplan.api.candidates", "build", lambda r: size_of(r.problem)),
    "fold": ("jaxplan.search.folds", "tie", lambda r: f"{len(r.problem.nodes) if r else 0} nodes left"),
    "reduce": ("jaxplan.search.ilp", "reduce", lambda r: f"{len(r.problem.nodes)} nodes left"),
    "solve": ("jaxplan.api.candidates", "solve", lambda r: f"gap {r.gap:.0e}"),
    "solve folded": ("jaxplan.api.candidates", "solve_folded", lambda r: f"gap {r.gap:.0e}"),
    "templates": ("jaxplan.api.templates_beside", "rival", lambda r: ""),
    "memory": ("jaxplan.api.candidates", "step_memory", lambda r: f"{r.peak_bytes / 2**30:.2f} GiB a device"),
    "orders": ("jaxplan.api.turning", "resolve_orders", lambda r: ""),
    "shorten": ("jaxplan.lowering.check", "shortened", lambda r: f"{len(r.kept)} equations left" if r else "no"),
    "lower": ("jaxplan.lowering.check", "lower_flat", lambda r: ""),
    "import": ("jaxplan.lowering.check", "Asked", lambda r: ""),
    "partition": ("jaxplan.sharding.beside", "Asked.partition", lambda r: f"{len(r.collectives)} collectives"),
}
"""Stage -> module, function, and the size of what it returns; reduce is part of both solves and of templates, and so is
fold of one, and templates have memories of their own.  Templates are priced beside the check: their wall seconds and
those of lowering overlap; a large program's are searched, and it is partitioned, in a process of its own, whose
processor seconds are in no row."""


def size_of(problem: StrategyProblem) -> str:
    """Nodes, edges, strategies, and what the distinct arrays of a problem take."""
    arrays = [node.costs_s for node in problem.nodes] + [usage.bytes for usage in problem.usages]
    arrays += [array for edge in problem.edges for array in (edge.costs_s, edge.allowed) if array is not None]
    distinct_bytes = sum({id(array): array.nbytes for array in arrays}.values())
    strategies = sum(node.costs_s.size for node in problem.nodes)
    return (
        f"{len(problem.nodes)} nodes, {len(problem.edges)} edges, {strategies} strategies, "
        f"{distinct_bytes / 2**20:.0f} MiB"
    )


def shapes_of(model: str, config: Any) -> tuple[Any, Any]:
    """The step's arguments, abstract."""
    module = get(model)
    return jax.eval_shape(lambda key: module.init_state(config, key), jax.random.key(0)), module.batch_shapes(
        config
    )


def planned(
    model: str, name: str, changes: dict[str, Any], axes: dict[str, int], **options: Any
) -> dict[str, Any]:
    """Plan one config on one mesh; seconds and sizes of the stages, and what was proved."""
    config = dataclasses.replace(get_config(model, name), **changes)
    shapes = shapes_of(model, config)
    mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
    step = jaxplan.auto_shard(
        get(model).make_train_step(config), mesh, donate_argnums=0, hardware=HARDWARE, options=options
    )
    stages: dict[str, dict[str, Any]] = {}

    def clocked(stage: str, function: Any, size: Callable[[Any], str]) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            wall, processor = time.perf_counter(), time.thread_time()
            result = function(*args, **kwargs)
            spent = stages.setdefault(
                stage, {"runs": 0, "wall_s": 0.0, "processor_s": 0.0, "size": size(result)}
            )
            spent["runs"] += 1
            spent["wall_s"] += time.perf_counter() - wall
            spent["processor_s"] += time.thread_time() - processor
            return result

        return run

    wall, processor = time.perf_counter(), time.process_time()
    with ExitStack() as patches:
        for stage, (module, function, size) in STAGES.items():
            found = pkgutil.resolve_name(f"{module}:{function}")
            patches.enter_context(mock.patch(f"{module}.{function}", clocked(stage, found, size)))
        try:
            cost = step.plan(*shapes).cost
            outcome = {"step_s": cost.step_s, "gap": cost.gap, "termination": cost.termination}
        except InfeasibleError as error:
            outcome = {"infeasible": str(error)[:200]}
    return {
        "wall_s": time.perf_counter() - wall,
        "processor_s": time.process_time() - processor,
        "load": os.getloadavg()[0],
        "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "stages": stages,
        **outcome,
    }


def depth() -> list[dict[str, Any]]:
    """Processor seconds of the search alone, folded and whole, by number of layers: of the first search in a process,
    which loads compiled kernels, and the least of the next three; without the collector, as planning does."""
    return [apart({"layers": layers, "search": search}) for layers in DEPTHS for search in SEARCHES]


def searched(layers: int, search: str) -> dict[str, Any]:
    """One row of `depth`."""
    target = target_of(jax.sharding.AbstractMesh((4, 2), ("data", "model")), HARDWARE)
    config = dataclasses.replace(get_config("gpt", "gpt2"), n_layers=layers)
    graph = trace(
        get("gpt").make_train_step(config), shapes_of("gpt", config), {}, donate_argnums=(0,)
    ).graph
    space = build(graph, model_of(target, Options()), rules=graph_rules(graph), max_strategies=96)
    row: dict[str, Any] = {"layers": layers, "search": search, "nodes": len(space.problem.nodes)}
    spent: list[float] = []
    with collector_paused():
        for _ in range(4):
            started = time.process_time()
            result = SEARCHES[search](space.problem)
            spent.append(time.process_time() - started)
    return {
        **row, "first_processor_s": spent[0], "next_processor_s": min(spent[1:]),
        "objective_s": result.objective_s, "gap": result.gap,
    }  # fmt: skip


def apart(request: dict[str, Any]) -> Any:
    """The answer of a process of its own: its memory is its own, and nothing is warm."""
    done = subprocess.run(
        [sys.executable, __file__, "--request", json.dumps(request)],
        capture_output=True,
        text=True,
        check=False,
    )
    return json.loads(done.stdout.splitlines()[-1]) if not done.returncode else {"error": done.stderr[-300:]}


def show(title: str, row: dict[str, Any], limit_s: float | None = None) -> None:
    """Print one row and its stages."""
    if "error" in row or "infeasible" in row:
        print(f"{title:42} {row.get('infeasible') or row['error']}", flush=True)
        return
    limit = "" if limit_s is None else f" (limit {limit_s:g} s)"
    print(
        f"{title:42} {row['wall_s']:6.1f} s wall{limit}, {row['processor_s']:.1f} s processor, "
        f"{row['memory_bytes'] / 2**30:.2f} GiB, load {row['load']:.0f}, gap {row['gap']:.1e} ({row['termination']})",
        flush=True,
    )
    for stage, spent in row["stages"].items() if limit_s is not None else ():
        print(f"    {stage:14} {spent['processor_s']:6.1f} s in {spent['runs']:2} runs  {spent['size']}")


def keep(results: dict[str, Any], path: Path = RESULTS) -> None:
    """Write what there is so far: a run may be stopped."""
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def gaps(*, again: bool) -> None:
    """Every published config on `MESHES`, from 8 devices up; goes on after the rows that are there, unless `again`."""
    rows: dict[str, Any] = {} if again or not GAPS.exists() else json.loads(GAPS.read_text(encoding="utf-8"))
    for axes in MESHES:
        for model in names():
            for name in (name for name in get(model).CONFIGS if not name.startswith("tiny")):
                title = f"{model}:{name} on {math.prod(axes.values())}"
                if title in rows:
                    continue
                row = apart({"model": model, "name": name, "changes": {}, "axes": axes, "compare_templates": False})
                show(title, row)
                rows[title] = {key: value for key, value in row.items() if key != "stages"}
                keep(rows, GAPS)
    proved = [row["gap"] for row in rows.values() if "gap" in row]
    refused = sum("infeasible" in row for row in rows.values())
    print(
        f"{len(proved)} plans, gap {max(proved):.2%} at most, {sum(gap > 0.01 for gap in proved)} above 1 %; "
        f"{refused} fit no device; {len(rows) - len(proved) - refused} failed"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=sorted(ROWS), default=list(ROWS))
    parser.add_argument("--gaps", action="store_true")
    parser.add_argument("--again", action="store_true", help="with --gaps: forget the rows that are there")
    parser.add_argument("--depth", action="store_true")
    parser.add_argument("--request", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.request:
        request = json.loads(args.request)
        print(json.dumps(searched(**request) if "layers" in request else planned(**request)))
        return 0
    if not args.depth:
        model, name, changes, axes, _ = ROWS[WARMING]
        apart({"model": model, "name": name, "changes": changes, "axes": axes})
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if not args.gaps and not args.depth:
        for title in args.only:
            model, name, changes, axes, limit_s = ROWS[title]
            results[title] = apart({"model": model, "name": name, "changes": changes, "axes": axes})
            show(title, results[title], limit_s)
            keep(results)
    if args.gaps:
        gaps(again=args.again)
    if args.depth:
        results["depth"] = depth()
        print(json.dumps(results["depth"], indent=1))
        keep(results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
