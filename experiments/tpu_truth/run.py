"""Judges plans by what XLA's own TPU compiler makes of them: jaxplan's beside the ones experts write by hand.

    python experiments/tpu_truth/run.py [--only NAME ...] [--plan NAME ...] [--mesh 4x2 ...] [--text FOLDER]

Needs jaxplan with its extra `tpu-aot` (libtpu), no TPU; 7 to 60 s a compile on two cores.  Rows go into
`results.json` beside this as soon as they are there; rows of other cases and meshes stay.  The table in
`README.md` is written from them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-16")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
from cases import CASES, Case
from experts import expert_rules, shardings
from judge import Judge, lowered_by_hand, mesh_of
from table import write_readme

import jaxplan
from jaxplan.inspection.matching import planned_parts

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"


def expert_row(judge: Judge, case: Case, name: str) -> tuple[dict[str, Any], str]:
    """The row of a hand-written plan, and the compiled text."""
    rule = expert_rules(judge.mesh)[name]
    state, batch = case.shapes()
    step = case.step()
    metrics = jax.eval_shape(step, state, batch)[1]
    placed = shardings(rule, state, judge.mesh, "state")
    inside = (placed, shardings(rule, batch, judge.mesh, "batch"))
    whole = jax.tree.map(lambda _: jax.sharding.NamedSharding(judge.mesh, jax.P()), metrics)
    return judge.compile(lambda: lowered_by_hand(step, (state, batch), inside, (placed, whole)))


def jaxplan_row(judge: Judge, case: Case, name: str) -> tuple[dict[str, Any], str]:
    """The row of jaxplan's plan, with what it predicted, and the compiled text."""
    state, batch = case.shapes()
    search = "ilp" if name == "jaxplan" else name.removeprefix("jaxplan ")
    step = jaxplan.auto_shard(case.step(), judge.mesh, donate_argnums=(0,), options={"search": search})
    started = time.perf_counter()
    plan = step.plan(state, batch)
    plan_s = time.perf_counter() - started
    row, text = judge.compile(lambda: step.lower(state, batch))
    cost = plan.cost
    row["predicted"] = {
        "plan_s": round(plan_s, 1),
        "search": plan.search,
        "termination": cost.termination,
        "compute_ms": round(cost.compute_s * 1e3, 3),
        "comm_ms": round(cost.comm_s * 1e3, 3),
        "step_ms": round((cost.compute_s + cost.comm_s) * 1e3, 3),
        "objective_ms": round(cost.objective_s * 1e3, 3),
        "comm_bytes": cost.comm_bytes,
        "memory_mb": round(cost.peak_bytes / 1e6, 1),
        "memory_parts": dict(cost.peak_parts),
        "memory_where": cost.peak_where,
        "templates_ms": {n: round(s * 1e3, 3) for n, s in plan.templates.items()},
        "warnings": list(plan.warnings),
        "specs": {path: str(spec) for path, spec in plan.specs.items()},
        "collectives": judge.collectives(
            (p.kind, p.names, p.bytes, p.trips, p.where) for p in planned_parts(plan.collectives, plan.axes)
        ),
    }
    return row, text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=[c.name for c in CASES], help="only these cases")
    parser.add_argument(
        "--plan", action="append", help='only these plans: "jaxplan", "jaxplan fsdp", "data", ...'
    )
    parser.add_argument("--mesh", action="append", choices=["4x2", "8"], help="only these meshes")
    parser.add_argument("--text", type=Path, help="keep the compiled text of every plan in this folder")
    parser.add_argument("--table", action="store_true", help="compile nothing, only write the table")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": {}}
    for shape in [] if options.table else options.mesh or ["4x2", "8"]:
        judge = Judge(mesh_of(tuple(map(int, shape.split("x")))))
        for case in CASES:
            if options.only and case.name not in options.only:
                continue
            for name in options.plan or [*expert_rules(judge.mesh), "jaxplan"]:
                judged = jaxplan_row if name.startswith("jaxplan") else expert_row
                row, text = judged(judge, case, name)
                results["jax"] = jax.__version__
                results["rows"].setdefault(shape, {}).setdefault(case.name, {})[name] = row
                RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
                if options.text:
                    options.text.mkdir(parents=True, exist_ok=True)
                    (options.text / f"{case.name}.{shape}.{name.replace(' ', '_')}.txt").write_text(text)
                shown = {k: v for k, v in row.items() if isinstance(v, (int, float))}
                print(shape, case.name, name, shown, flush=True)
    write_readme(HERE / "README.md", results, {case.name: case.what for case in CASES})


if __name__ == "__main__":
    main()
