"""TensorOpt's experiment: step time against devices and against memory on V100 nodes; see README.md beside this."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import jaxplan
from jaxplan.frontier import Frontier
from models import abstract_arguments, get, get_config

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "quality"))

from assigned import peak_bytes, until_assigned  # noqa: E402  (that folder's own)

RESULTS = HERE / "results.json"
HARDWARE, COUNTS = "v100", (8, 16, 32)
TARGET = "tpu-v5e:2x4"
BUDGETS = 50
PARTS = ["curve", "frontier", "compiled"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One network: its model and config, and what it is in words."""

    model: str
    config: str
    what: str

    def step(self) -> Callable[..., Any]:
        """`(state, batch) -> (state, metrics)`, for one device."""
        step: Callable[..., Any] = get(self.model).make_train_step(get_config(self.model, self.config))
        return step


CASES = {
    "vgg16": Case(model="vgg", config="vgg16", what="VGG-16, 512 images of 224 x 224"),
    "wide-resnet": Case(
        model="resnet", config="wide-resnet50-2", what="WideResNet-50-2, images of 224 x 224"
    ),
    "lstm": Case(model="lstm", config="ptb-large", what="LSTM, Penn Treebank, large"),
    "transformer": Case(model="gpt", config="gpt2-scan", what="Transformer: GPT-2 small, layers scanned"),
}


def scalarisation_regret(frontier: Frontier) -> dict[str, float]:
    """What one price on memory can't reach: at budgets from end to end, the best corner of the convex hull against
    the frontier, as the share of time lost (mean, max).
    """
    points = [(p.peak_bytes, p.step_s) for p in frontier.points]
    hull: list[tuple[int, float]] = []
    for size, step_s in points:
        while len(hull) > 1 and _right(hull[-2], hull[-1], (size, step_s)):
            hull.pop()
        hull.append((size, step_s))
    low, high = points[0][0], points[-1][0]
    lost = []
    for part in range(BUDGETS):
        budget = low * (high / low) ** (part / (BUDGETS - 1)) * (1 + 1e-12)
        best = min(step_s for size, step_s in points if size <= budget)
        lost.append(min(step_s for size, step_s in hull if size <= budget) / best - 1)
    return {"mean": sum(lost) / len(lost), "max": max(lost), "corners": len(hull)}


def _right(first: tuple[int, float], middle: tuple[int, float], last: tuple[int, float]) -> bool:
    """Whether the middle is on or over the line between the others."""
    slope = (last[1] - first[1]) / (last[0] - first[0])
    return middle[1] >= first[1] + slope * (middle[0] - first[0])


def curves(name: str) -> dict[str, Any]:
    """The curve over device counts, and its picture."""
    case = CASES[name]
    started, used = time.perf_counter(), sum(os.times()[:4])
    found = jaxplan.curve(
        case.step(),
        *abstract_arguments(case.model, case.config),
        devices=COUNTS,
        hardware=HARDWARE,
        donate_argnums=0,
    )
    found.plot(HERE / f"curve-{name}.svg")
    return {
        "wall_s": round(time.perf_counter() - started, 1), "processor_s": round(sum(os.times()[:4]) - used, 1),
        "memory_bytes": found.memory_bytes, "too_few": [few.devices for few in found.too_few],
        "points": [
            {"devices": p.devices, "mesh": dict(p.axes), "step_s": p.step_s, "bound_s": p.bound_s,
             "peak_bytes": p.peak_bytes, "tried": list(p.tried)}
            for p in found.points
        ],
    }  # fmt: skip


def frontiers(name: str, limit_s: float, hardware: str, mesh: Any) -> tuple[Frontier, dict[str, Any]]:
    """The frontier on eight devices, and what is told of it."""
    case = CASES[name]
    started, used = time.perf_counter(), sum(os.times()[:4])
    found = jaxplan.frontier(
        case.step(), mesh, *abstract_arguments(case.model, case.config), hardware=hardware, donate_argnums=0,
        time_limit_s=limit_s,
    )  # fmt: skip
    row = {
        "wall_s": round(time.perf_counter() - started, 1), "processor_s": round(sum(os.times()[:4]) - used, 1),
        "method": found.method, "mesh": found.mesh, "hardware": found.hardware, "regret_bound": found.regret_bound,
        "points": [[p.peak_bytes, p.step_s, p.bound_s] for p in found.points],
        "scalarisation_regret": scalarisation_regret(found),
    }  # fmt: skip
    return found, row


def compiled(name: str, limit_s: float) -> dict[str, Any]:
    """Both ends and the knee of the frontier on eight TPU v5e chips, compiled for them until buffers are assigned."""
    mesh = jaxplan.target(TARGET).mesh(data=4, model=2)
    found, row = frontiers(name, limit_s, TARGET.partition(":")[0], mesh)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for point in dict.fromkeys((found.points[0], found.knee, found.points[-1])):
            plan, path = point.plan, Path(folder) / str(len(rows)) / "plan.json"
            path.parent.mkdir()
            plan.save(path)
            made = _child(name, "one", limit_s, path)
            rows.append(
                {
                    "predicted_bytes": plan.cost.peak_bytes,
                    "compiled_bytes": made and made["peak_bytes"],
                    "step_s": point.step_s,
                }
            )
    sizes = [one["compiled_bytes"] for one in rows if one["compiled_bytes"]]
    return {**row, "points": len(found.points), "compiled": rows, "order_kept": sizes == sorted(sizes)}


def one_compiled(name: str, path: Path) -> dict[str, Any]:
    """The memory of one plan, saved in a folder of its own; the process has to end then."""
    case, target = CASES[name], jaxplan.target(TARGET)
    mesh = target.mesh(data=4, model=2)
    step = jaxplan.auto_shard(
        case.step(), mesh, donate_argnums=0, options={"plan": jaxplan.load_plan(path, mesh)}
    )
    lowered = step.lower(*abstract_arguments(case.model, case.config))
    memory, _ = until_assigned(lowered, target.compiler_options, path.parent / "dump")
    return {"memory": memory, "peak_bytes": peak_bytes(memory)}


def main() -> None:
    """All parts of all networks, each in a process of its own; what is there already is kept with --keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, "one"), default=PARTS)
    parser.add_argument("--plan", type=Path, help="of the part `one`: the file of the plan that is compiled")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of a frontier")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--here", action="store_true", help="one part of one network, in this process")
    given = parser.parse_args()
    if given.here:
        if given.parts == ["one"]:
            print(json.dumps(one_compiled(given.only[0], given.plan)), flush=True)
            os._exit(0)  # the compiler's threads are in the middle of code generation
        print(json.dumps(_part(given.only[0], given.parts[0], given.limit)))
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, part in itertools.product(given.only, given.parts):
        if given.keep and part in results.get(name, {}):
            continue
        made = _child(name, part, given.limit)
        if made is None:
            print(f"{name} {part}: failed", file=sys.stderr)
            continue
        results.setdefault(name, {"what": CASES[name].what})[part] = made
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        print(f"{name} {part}: done")


def _child(name: str, part: str, limit_s: float, plan: Path | None = None) -> dict[str, Any] | None:
    """One part in a process of its own; None where that failed."""
    command = [sys.executable, __file__, "--here", "--only", name, "--parts", part, "--limit", str(limit_s)]
    command += ["--plan", str(plan)] if plan else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    made: dict[str, Any] | None = None if done.returncode else json.loads(done.stdout.splitlines()[-1])
    return made


def _part(name: str, part: str, limit_s: float) -> dict[str, Any]:
    if part == "curve":
        return curves(name)
    if part == "compiled":
        return compiled(name, limit_s)
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    found, row = frontiers(name, limit_s, HARDWARE, mesh)
    found.plot(HERE / f"frontier-{name}.svg")
    return row


if __name__ == "__main__":
    main()
