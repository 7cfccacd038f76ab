"""Budgets of 60 % of what data parallelism needs: is a plan found wherever a template fits, and what does it cost?

    python experiments/quality/tight.py [--case NAME ...] [--target NAME] [--mesh NAME]

Compiles nothing.  Rows go into `tight.jsonl` as they come; the last one of a case, target and mesh counts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from pathlib import Path
from typing import Any

from cases import CASES
from run import OWN, planned
from targets import TARGETS

import jaxplan
from jaxplan.api.options import TEMPLATES

RESULTS = Path(__file__).parent / "tight.jsonl"
SHARE = 0.6
_QUICK = (
    "block", "gpt-block", "gpt2", "vit-l16", "resnet50", "lstm-ptb", "mlp-wide", "mlp-batch", "t5-base", "dlrm-kaggle",
)  # fmt: skip


def attempt(case: str, target: str, mesh: str, name: str, budget: int | None) -> dict[str, Any]:
    """Seconds and peak of the plan of that name, or why there is none."""
    started = time.process_time()
    try:
        plan, _ = planned(case, target, mesh, name, budget)
    except jaxplan.JaxplanError as error:
        return {"impossible": str(error).splitlines()[0], "cpu_s": round(time.process_time() - started, 1)}
    return {
        "step_s": plan.cost.step_s,
        "peak_bytes": plan.cost.peak_bytes,
        "cpu_s": round(time.process_time() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=[*CASES])
    parser.add_argument("--target", default="tpu-v5e:2x4", choices=[*TARGETS])
    parser.add_argument("--mesh", default="4x2")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    for case in given.case or _QUICK:
        whole = attempt(case, given.target, given.mesh, "data", 2**50)
        budget = int(SHARE * whole["peak_bytes"])
        found = {name: attempt(case, given.target, given.mesh, name, budget) for name in (OWN, *TEMPLATES)}
        row = {
            "case": case, "target": given.target, "mesh": given.mesh, "budget_bytes": budget,
            "data_parallel": whole, "found": found, "date": datetime.date.today().isoformat(),
        }  # fmt: skip
        with given.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(summary(row), flush=True)


def summary(row: dict[str, Any]) -> str:
    """One line of a row."""
    fitting = {name: x["step_s"] for name, x in row["found"].items() if "step_s" in x}
    rivals = {name: seconds for name, seconds in fitting.items() if name != OWN}
    line = f"{row['case']} {row['target']} {row['mesh']}, {row['budget_bytes'] / 1e6:.0f} MB: "
    line += f"fit {', '.join(sorted(rivals)) or 'no template'}; ours "
    if OWN not in fitting:
        return line + "none: " + row["found"][OWN]["impossible"]
    best = min(rivals, key=lambda name: rivals[name], default=None)
    share = f", {fitting[OWN] / rivals[best]:.3f} of {best}" if best else ""
    return f"{line}{fitting[OWN] * 1e3:.2f} ms in {row['found'][OWN]['peak_bytes'] / 1e6:.0f} MB{share}"


if __name__ == "__main__":
    main()
