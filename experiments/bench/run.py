"""Rerun the README's figures: what a planned step's call costs beside plain jax.jit's, and how long planning takes.

    python experiments/bench/run.py [--only calls|planning]        # or: make bench.  Writes results.json beside this

Call overhead is compared side by side in one process, the two callables taking turns, in processor time of the
calling thread: other programs don't count.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp

import jaxplan
from jaxplan.units import format_seconds

LEAVES = (10, 300)
ROUNDS = 21
CALLS_A_ROUND = 50
CALL_LIMIT = 1.2
"""Times jax.jit's own: what a planned step's second call may cost."""

PLANNED = (
    ("models.gpt:gpt2", {"data": 8}),
    ("models.gpt:gpt2", {"data": 4, "model": 2}),
    ("models.gpt:gpt2-scan", {"data": 4, "model": 2}),
    ("models.gpt:gpt2-scan", {"data": 16, "model": 16}),
    ("models.llama:llama3-8b", {"data": 16, "model": 16}),
    ("models.moe:tiny", {"data": 4, "model": 2}),
)
"""Model and mesh, on the profile tpu-v5e."""

# The stages of planning, as `jaxplan.api` calls them; what is left of the whole is writing the plan up.
STAGES = {
    "trace": ("jaxplan.api.autoshard", "trace"),
    "build": ("jaxplan.api.candidates", "build"),
    "solve": ("jaxplan.api.candidates", "solve"),
    "check": ("jaxplan.api.candidates", "check"),
}


def tiny_step(state: list[jax.Array], scale: jax.Array) -> list[jax.Array]:
    """Next to no work on each leaf: what is timed is the call."""
    return [leaf + scale for leaf in state]


def call_overhead(n_leaves: int) -> dict[str, Any]:
    """Seconds of the calling thread, planned and plain, state in and state out; the median of the rounds' ratios."""
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    state = [jnp.zeros((8, 8), jnp.float32) for _ in range(n_leaves)]
    scale = jnp.float32(1.0)
    planned = jaxplan.auto_shard(tiny_step, mesh, donate_argnums=0)
    plan = planned.plan(state, scale)
    plain = jax.jit(
        tiny_step, in_shardings=plan.in_shardings, out_shardings=plan.out_shardings, donate_argnums=0
    )

    def a_round(step: Callable[..., Any], state: Any) -> tuple[float, Any]:
        """Seconds of dispatch a call: the state is waited for after the clock has stopped."""
        spent_s = 0.0
        for _ in range(CALLS_A_ROUND):
            started = time.thread_time()
            state = step(state, placed_scale)
            spent_s += time.thread_time() - started
            jax.block_until_ready(state)
        return spent_s / CALLS_A_ROUND, state

    placed, placed_scale = jax.device_put((state, scale), plan.in_shardings)
    states = {"planned": placed, "plain": jax.tree.map(jnp.copy, placed)}
    times: dict[str, list[float]] = {"planned": [], "plain": []}
    for number in range(ROUNDS + 1):
        order = [("planned", planned), ("plain", plain)]
        for name, step in order if number % 2 else reversed(order):
            seconds, states[name] = a_round(step, states[name])
            if number:  # the first round compiles
                times[name].append(seconds)
    ratios = [a / b for a, b in zip(times["planned"], times["plain"], strict=True)]
    return {
        "leaves": n_leaves,
        "planned_s": min(times["planned"]),
        "plain_s": min(times["plain"]),
        "ratio_of_fastest": min(times["planned"]) / min(times["plain"]),
        "ratio_median": statistics.median(ratios),
    }


@contextmanager
def stage_clock() -> Iterator[dict[str, float]]:
    """Seconds spent in each of `STAGES` while the block runs."""
    spent_s = dict.fromkeys(STAGES, 0.0)

    def clocked(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent_s[stage] += time.process_time() - started

        return run

    with ExitStack() as patches:
        for stage, (module, name) in STAGES.items():
            function = getattr(importlib.import_module(module), name)
            patches.enter_context(mock.patch(f"{module}.{name}", clocked(stage, function)))
        yield spent_s


def planning(target: str, axes: dict[str, int]) -> dict[str, Any]:
    """Processor seconds of planning one model on one tpu-v5e mesh, and of its stages."""
    module_name, config_name = target.split(":")
    model = importlib.import_module(module_name)
    config = model.CONFIGS[config_name]
    shapes = jax.eval_shape(lambda key: model.init_state(config, key), jax.random.key(0))
    mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
    step = jaxplan.auto_shard(model.make_train_step(config), mesh, donate_argnums=0, hardware="tpu-v5e")
    wall, started = time.perf_counter(), time.process_time()
    with stage_clock() as spent_s:
        plan = step.plan(shapes, model.batch_shapes(config))
    return {
        "model": target,
        "mesh": axes,
        "processor_s": time.process_time() - started,
        "wall_s": time.perf_counter() - wall,
        "stages_s": spent_s,
        "step_s": plan.cost.step_s,
        "peak_bytes": plan.cost.peak_bytes,
        "termination": plan.cost.termination,
        "gap": plan.cost.gap,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=("calls", "planning"))
    only = parser.parse_args().only
    path = Path(__file__).with_name("results.json")
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    results |= {"date": datetime.date.today().isoformat(), "jax": jax.__version__, "cores": os.cpu_count()}
    status = 0
    if only != "planning":
        print(
            f"Second call of a planned step beside jax.jit's own with the same shardings (limit {CALL_LIMIT})"
        )
        rows = [call_overhead(n) for n in LEAVES]
        for row in rows:
            print(
                f"  {row['leaves']:4} leaves  planned {format_seconds(row['planned_s']):>8}"
                f"  jax.jit {format_seconds(row['plain_s']):>8}"
                f"  ratio {row['ratio_median']:.3f} (of the fastest rounds {row['ratio_of_fastest']:.3f})"
            )
            status |= row["ratio_median"] > CALL_LIMIT
        results["calls"] = rows
    if only != "calls":
        print("Planning on tpu-v5e, processor seconds; templates planned and checked too")
        print(
            f"  {'model':24} {'mesh':18} {'total':>7} " + " ".join(f"{s:>7}" for s in STAGES) + "  step, gap"
        )
        results["planning"] = []
        for target, axes in PLANNED:
            row = planning(target, axes)
            results["planning"].append(row)
            mesh_text = ",".join(f"{name}={size}" for name, size in axes.items())
            stages = " ".join(f"{seconds:7.1f}" for seconds in row["stages_s"].values())
            print(
                f"  {target:24} {mesh_text:18} {row['processor_s']:7.1f} {stages}  "
                f"{format_seconds(row['step_s'])}, {row['gap']:.1e} {row['termination']}",
                flush=True,
            )
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
