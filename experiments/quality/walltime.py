"""Predicted against measured seconds on forced host devices: several plans a model, measured in turns.

    python experiments/quality/walltime.py [--case NAME ...] [--rounds 12] [--shipped]

Writes `walltime.json`.  The machine is calibrated first (`jaxplan.calibrate`), a minute: the shipped profile `cpu-host`
is of another machine, or of another hour of this one; `--shipped` takes it all the same.

The plans of a model are run one after the other, round after round, and the fastest round of
each counts: other programs only ever add time, and to all alike.  What eight devices do the cores do in turns:
seconds are processor seconds over their number, beside the fastest wall clock.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
from cases import HOST

import jaxplan

HERE = Path(__file__).parent
PLANS = ("jaxplan", "data", "zero1", "fsdp", "megatron", "tensor_fsdp")


def prepared(case: Any, name: str, mesh: Any, hardware: Any) -> tuple[Any, Callable[[], None]]:
    """The plan, and a function that runs one step of it."""
    state_shapes, batch_shapes = case.shapes()
    options = {"search": "ilp" if name == "jaxplan" else name, "compare_templates": False}
    step = jaxplan.auto_shard(case.step(), mesh, donate_argnums=(0,), hardware=hardware, options=options)
    plan = step.plan(state_shapes, batch_shapes)
    state = step.init(lambda: case.model.init_state(case.config, jax.random.key(0)))
    batch = jax.device_put(
        jax.tree.map(lambda shape: jax.numpy.ones(shape.shape, shape.dtype), batch_shapes), plan.in_shardings[1]
    )
    kept = [state]

    def run() -> None:
        kept[0], metrics = step(kept[0], batch)
        jax.block_until_ready((kept[0], metrics))

    run()
    return plan, run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=[*HOST])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--results", type=Path, default=HERE / "walltime.json")
    parser.add_argument("--shipped", action="store_true", help="with the shipped profile, nothing calibrated")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        hardware = None if given.shipped else jaxplan.calibrate(Path(folder) / "host.toml", say=print)
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    cores = len(os.sched_getaffinity(0))
    rows = []
    for name in given.case or HOST:
        made = {plan: prepared(HOST[name], plan, mesh, hardware) for plan in PLANS}
        wall_s = dict.fromkeys(PLANS, float("inf"))
        busy_s = dict.fromkeys(PLANS, float("inf"))
        for _ in range(given.rounds):
            for plan, (_, run) in made.items():
                wall, busy = time.perf_counter(), time.process_time()
                run()
                wall_s[plan] = min(wall_s[plan], time.perf_counter() - wall)
                busy_s[plan] = min(busy_s[plan], (time.process_time() - busy) / cores)
        for plan, (planned, _) in made.items():
            cost = planned.cost
            rows.append(
                {"case": name, "plan": plan, "compute_s": cost.compute_s, "comm_s": cost.comm_s,
                 "wall_s": wall_s[plan], "busy_s": busy_s[plan]}
            )  # fmt: skip
            print(
                f"{name} {plan}: predicted {cost.step_s * 1e3:.1f} ms, {cost.comm_s * 1e3:.1f} of it sent; measured "
                f"{wall_s[plan] * 1e3:.1f} ms wall, {busy_s[plan] * 1e3:.1f} ms of all cores",
                flush=True,
            )
    head = {"date": datetime.date.today().isoformat(), "jax": jax.__version__, "cores": cores, "devices": 8,
            "calibrated": hardware is not None}
    given.results.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
