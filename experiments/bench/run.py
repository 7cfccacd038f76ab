"""What a planned step's call costs beside plain jax.jit's.

    python experiments/bench/run.py        # or: make bench.  Writes results.json beside this

Call overhead is compared side by side in one process, the two callables taking turns, in processor time of the
calling thread: other programs don't count.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def main() -> int:
    path = Path(__file__).with_name("results.json")
    print(f"Second call of a planned step beside jax.jit's own with the same shardings (limit {CALL_LIMIT})")
    rows = [call_overhead(n) for n in LEAVES]
    for row in rows:
        print(
            f"  {row['leaves']:4} leaves  planned {format_seconds(row['planned_s']):>8}"
            f"  jax.jit {format_seconds(row['plain_s']):>8}"
            f"  ratio {row['ratio_median']:.3f} (of the fastest rounds {row['ratio_of_fastest']:.3f})"
        )
    made = {"date": datetime.date.today().isoformat(), "jax": jax.__version__, "cores": os.cpu_count()}
    path.write_text(json.dumps({**made, "calls": rows}, indent=1) + "\n", encoding="utf-8")
    return int(any(row["ratio_median"] > CALL_LIMIT for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
