"""Some twenty plans a model, from good to bad: is their order as predicted, and by how much is each off?

    python experiments/quality/timing.py [--case NAME ...] [--target NAME ...] [--count 20] [--seed 0] [--again]

Small steps, each plan compiled to the end and priced by `jaxplan/lowering/yardstick.py`; with asynchronous collectives
laid out along the compiler's own schedule too, which is what the simulator's timeline is held against.  Rows go into
`timing.jsonl` as they come; plans that are there already are left alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import jax
from cases import SMALL
from diverse import diverse_plans, pipeline_of
from targets import TARGETS

import jaxplan
from jaxplan.api import Pipeline, finished_plan, target_of
from jaxplan.api.found import Candidate
from jaxplan.hardware import compiler_options
from jaxplan.lowering import compiled_memory, compiled_price, lower_flat, scheduled_seconds

HERE = Path(__file__).parent
RESULTS = HERE / "timing.jsonl"
MESH = "4x2"


def compiled(pipeline: Pipeline, candidate: Candidate) -> dict[str, Any]:
    """What the target's compiler makes of a plan."""
    mesh, traced = pipeline.target.mesh, pipeline.traced
    program = lower_flat(
        traced, candidate.checked.constraints, mesh, candidate.inputs, candidate.outputs,
        donate=traced.graph.donated,
    ).compile(compiler_options=compiler_options(mesh))  # fmt: skip
    text = program.as_text()
    price = compiled_price(text, pipeline.model)
    return {
        "compute_s": price.compute_s,
        "comm_s": price.comm_s,
        "scheduled_s": scheduled_seconds(text, pipeline.model),
        "peak_bytes": compiled_memory(program).peak_bytes,
    }


def predicted(pipeline: Pipeline, candidate: Candidate) -> dict[str, Any]:
    """What the plan promises, the search's own belief and the simulated timeline included."""
    plan = finished_plan(pipeline, candidate, {}, 0.0)
    return {
        "objective_s": candidate.found.result.objective_s,
        "compute_s": candidate.compute_s,
        "comm_s": candidate.comm_s,
        "simulated_s": jaxplan.simulate(plan).step_s,
        "peak_bytes": candidate.found.memory.peak_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=[*SMALL])
    parser.add_argument("--target", action="append", choices=[*TARGETS])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the random pins: another one makes other plans")
    parser.add_argument("--again", action="store_true", help="also what is there already")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    lines = given.results.read_text(encoding="utf-8").splitlines() if given.results.exists() else []
    there = {(row["case"], row["target"], row["plan"]) for row in map(json.loads, lines)}
    for target in given.target or TARGETS:
        for name in given.case or SMALL:
            if MESH not in TARGETS[target]:
                continue
            case = SMALL[name]
            mesh = jaxplan.target(target).mesh(**dict(TARGETS[target][MESH]))
            pipeline = pipeline_of(case.step(), case.shapes(), target_of(mesh))
            for label, candidate in diverse_plans(pipeline, given.count, given.seed):
                if (name, target, label) in there and not given.again:
                    continue
                row: dict[str, Any] = {"case": name, "target": target, "plan": label}
                row |= {"date": datetime.date.today().isoformat(), "jax": jax.__version__}
                row["predicted"] = predicted(pipeline, candidate)
                try:
                    row["compiled"] = compiled(pipeline, candidate)
                except jax.errors.JaxRuntimeError as refused:
                    print(f"{name} {target} {label}: the compiler refuses: {str(refused).splitlines()[0]}", flush=True)
                    continue
                with given.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(summary(row), flush=True)


def summary(row: dict[str, Any]) -> str:
    """One line of a row, in ms: predicted, then compiled."""
    said, made = row["predicted"], row["compiled"]
    columns = {"compute": ("compute_s",) * 2, "sent": ("comm_s",) * 2, "overlapped": ("simulated_s", "scheduled_s")}
    words = (f"{what} {said[one] * 1e3:.3f} {made[other] * 1e3:.3f}" for what, (one, other) in columns.items())
    return f"{row['case']} {row['target']} {row['plan']}: {', '.join(words)}"


if __name__ == "__main__":
    main()
