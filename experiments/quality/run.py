"""Plans every model for machines that are not there, compiles plan and templates, and prices what was compiled.

    python experiments/quality/run.py [--case NAME ...] [--target NAME ...] [--plan NAME ...] [--whole] [--again]

Rows go into `results.jsonl` as they come, one line each; a second run goes on where the first one stopped.  With
`--whole` a TPU program is compiled to its end, which takes a minute or two on a core and gives the compiler's cycles;
without, compilation stops once buffers are assigned: memory and collectives alone, in seconds.  The plan `fsdp by hand`
is the template's shardings of arguments and results alone, the rest left to XLA's propagation.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
from assigned import peak_bytes
from cases import CASES
from targets import TARGETS, abstract_mesh, hardware, is_gpu

import jaxplan
from jaxplan.api.options import TEMPLATES
from jaxplan.cost import CostModel, collective_wire_bytes
from jaxplan.hardware import axis_links, load_profile
from jaxplan.inspection.matching import planned_parts
from jaxplan.lowering.hlo import compiled_collectives
from jaxplan.lowering.yardstick import compiled_price

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
OWN = "jaxplan"
BY_HAND = " by hand"


def cost_model(target: str, mesh: str) -> CostModel:
    """Links and rates of the target, for the collectives of its compiled programs."""
    profile, axes = load_profile(hardware(target)), TARGETS[target][mesh]
    links = axis_links(profile, axes)
    return CostModel(profile=profile, axes=axes, links=tuple(links[name] for name, _ in axes))


def sent(
    found: Iterable[tuple[str, tuple[str, ...], float, float]], model: CostModel
) -> list[dict[str, Any]]:
    """(kind, axes, bytes, runs) of collectives, as rows: bytes that a device sends and seconds, of a step."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for kind, axes, size, trips in found:
        names = [name for name, _ in model.axes] if axes == ("?",) else list(axes)
        row = rows.setdefault(
            (kind, "+".join(axes)),
            {"kind": kind, "axes": "+".join(axes), "runs": 0.0, "wire_bytes": 0.0, "seconds": 0.0},
        )
        row["runs"] += trips
        row["wire_bytes"] += (
            float(collective_wire_bytes(kind, size, [model.link(n).size for n in names])) * trips
        )
        row["seconds"] += model.collective_over(kind, size, names) * trips
    return sorted(rows.values(), key=lambda row: -row["seconds"])


def planned(case_name: str, target: str, mesh: str, name: str, budget: int | None) -> tuple[Any, float]:
    """The plan of that name, and the processor seconds that it took."""
    case = CASES[case_name]
    state, batch = case.shapes()
    options: dict[str, Any] = {"search": "ilp" if name == OWN else name, "compare_templates": name == OWN}
    step = jaxplan.auto_shard(
        case.step(), abstract_mesh(target, mesh), donate_argnums=(0,), hardware=hardware(target),
        memory_budget=budget, options=options,
    )  # fmt: skip
    started = time.process_time()
    return step.plan(state, batch), time.process_time() - started


def predicted(plan: Any, model: CostModel) -> dict[str, Any]:
    """What the plan promises."""
    cost = plan.cost
    return {
        "found_by": plan.search,
        "termination": cost.termination,
        "compute_s": cost.compute_s,
        "comm_s": cost.comm_s,
        "objective_s": cost.objective_s,
        "peak_bytes": cost.peak_bytes,
        "peak_parts": dict(cost.peak_parts),
        "peak_where": cost.peak_where,
        "collectives": sent(
            ((p.kind, p.names, p.bytes, p.trips) for p in planned_parts(plan.collectives, plan.axes)), model
        ),
        "templates_s": dict(plan.templates),
        "warnings": list(plan.warnings),
    }


def compiled(
    case: str, target: str, mesh: str, plan_path: Path, model: CostModel, whole: bool, text: Path, by_hand: bool
) -> dict[str, Any]:
    """What the compiler made of a saved plan."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [
            sys.executable, str(HERE / "compile_one.py"), case, target, mesh, str(plan_path), str(out),
            "--text", str(text), "--report", str(text.with_suffix(".memory.txt")),
        ]  # fmt: skip
        root = str(HERE.parent.parent)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
        command += ["--whole"] * whole + ["--by-hand"] * by_hand
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if not out.exists():
            lines = done.stderr.strip().splitlines()
            said = [line for line in lines if "Error: " in line or "RESOURCE_EXHAUSTED" in line]
            return {"failed": [line.strip()[:300] for line in (said or lines)[-1:]]}
        row: dict[str, Any] = json.loads(out.read_text())
    found = text.read_text()
    row["collectives"] = sent(
        ((c.kind, c.axes, c.bytes, c.trips) for c in compiled_collectives(found, model.axes)), model
    )
    if row["whole"]:
        price = compiled_price(found, model)
        row |= {"compute_s": price.compute_s, "comm_s": price.comm_s, "rule": price.rule}
    row["peak_bytes"] = peak_bytes(row["memory"])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=[*CASES])
    parser.add_argument("--target", action="append", choices=[*TARGETS])
    parser.add_argument("--mesh", action="append")
    parser.add_argument("--plan", action="append", help=f'"{OWN}", a template, or "fsdp{BY_HAND}"')
    parser.add_argument("--budget", help="memory a device, instead of all there is")
    parser.add_argument(
        "--whole", action="store_true", help="compile TPU programs to the end, for their cycles"
    )
    parser.add_argument("--again", action="store_true", help="also what is there already")
    parser.add_argument(
        "--keep", type=Path, default=Path("out/quality"), help="folder for plans and programs"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    given.keep.mkdir(parents=True, exist_ok=True)
    there = set()
    if given.results.exists():
        for line in given.results.read_text().splitlines():
            row = json.loads(line)
            there.add((row["case"], row["target"], row["mesh"], row["plan"], row["budget"], row["whole"]))
    for target in given.target or TARGETS:
        for mesh in TARGETS[target]:
            for case in given.case or CASES:
                for name in given.plan or (OWN, *TEMPLATES, *(name + BY_HAND for name in TEMPLATES)):
                    whole = given.whole or is_gpu(target)
                    key = (case, target, mesh, name, given.budget, whole)
                    if (key in there and not given.again) or (given.mesh and mesh not in given.mesh):
                        continue
                    row = dict(zip(("case", "target", "mesh", "plan", "budget"), key, strict=False))
                    row |= {"whole": whole, "date": datetime.date.today().isoformat(), "jax": jax.__version__}
                    model = cost_model(target, mesh)
                    stem = "-".join(map(str, key[:5])).replace(":", "_").replace(" ", "_")
                    path = given.keep / f"{stem}.json"
                    try:
                        plan, plan_s = planned(case, target, mesh, name.removesuffix(BY_HAND), given.budget)
                    except jaxplan.JaxplanError as error:
                        row["impossible"] = str(error).splitlines()[0]
                    else:
                        plan.save(path)
                        if not name.endswith(BY_HAND):
                            row |= {"plan_cpu_s": round(plan_s, 1), "predicted": predicted(plan, model)}
                        row["compiled"] = compiled(
                            case, target, mesh, path, model, whole, given.keep / f"{stem}.txt", name.endswith(BY_HAND)
                        )
                    with given.results.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(summary(row), flush=True)


def summary(row: dict[str, Any]) -> str:
    """One line of a row."""
    where = " ".join((row["case"], row["target"], row["mesh"], row["plan"]))
    if "impossible" in row:
        return f"{where}: impossible: {row['impossible']}"
    made, said = row["compiled"], row.get("predicted")
    if "failed" in made:
        return f"{where}: the compiler refuses: {made['failed']}"
    if said is None:
        return f"{where}: memory {made['peak_bytes'] / 1e6:.0f} MB; sent " + ", ".join(
            f"{c['wire_bytes'] / 1e6:.0f} MB {c['kind']} {c['axes']}" for c in made["collectives"][:4]
        )
    line = (
        f"{where}: memory {made['peak_bytes'] / 1e6:.0f} MB, predicted {said['peak_bytes'] / 1e6:.0f} "
        f"({said['peak_bytes'] / made['peak_bytes'] - 1:+.1%}); sent "
        f"{sum(c['wire_bytes'] for c in made['collectives']) / 1e6:.1f} MB, predicted "
        f"{sum(c['wire_bytes'] for c in said['collectives']) / 1e6:.1f}"
    )
    if "compute_s" in made:
        line += (
            f"; compute {made['compute_s'] * 1e3:.3f} ms, predicted {said['compute_s'] * 1e3:.3f}; "
            f"communication {made['comm_s'] * 1e3:.3f} ms, predicted {said['comm_s'] * 1e3:.3f}"
        )
    return line


if __name__ == "__main__":
    main()
