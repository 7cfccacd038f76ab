"""Trains a small Llama-style model on the Python standard library's source, sharded by jaxplan, over 8 host devices.

    python experiments/demo/run.py                  # or: make demo.  About two minutes on two cores
    python experiments/demo/run.py --processes 2    # or: make demo-processes: four devices in each of two processes

The same steps run unsharded beside it, in the first process.  Exit status 1 when the loss doesn't fall or the two runs
part.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The timeout: eight devices share the cores there are, a loaded machine is no deadlock.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=300",
)

import jax
import numpy as np
from jax.experimental import multihost_utils

import jaxplan
from jaxplan.units import format_bytes
from models import llama

# Four sequences: the axis "data" can split them, "model" has to find something else to split.
CONFIG = replace(llama.CONFIGS["bytes-3m"], batch_size=4)
# A device's share.  The unsharded state alone is 35 MiB: data parallelism alone does not fit.
MEMORY_BUDGET = "24MiB"
STEPS = 200
REPORT_EVERY = 20

# What rounding may do in f32.  The two runs add the same numbers in another order, 6e-8 of each sum, and training
# amplifies that: Adam divides each gradient by its own size.  The limits leave some thirty times what was measured
# (README.md).  A missing or doubled collective changes a gradient by whole factors and the loss within a few steps
# by percents.
LOSS_TOLERANCE = 1e-5
PARAMS_TOLERANCE = 3e-5
FALLEN = 0.6
"""The loss must fall under this share of its start, ln 256: a uniform guess of the next byte."""


def standard_library() -> np.ndarray:
    """The standard library's own modules, without tests and installed packages, as one array of bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    files = [p for p in sorted(root.rglob("*.py")) if not left_out & set(p.relative_to(root).parts)]
    text = np.frombuffer(b"\n".join(path.read_bytes() for path in files), np.uint8)
    if text.size < 1_000_000:
        raise SystemExit(
            f"{root} holds {len(files)} source files, {text.size} bytes: this Python came without the "
            "standard library's sources. Run the demo with one that has them: make demo PYTHON=..."
        )
    print(f"Text: {len(files)} files of {root}, {text.size / 1e6:.1f} MB")
    return text


def batches(text: np.ndarray, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Random windows of the text: `inputs` and, one byte ahead, `targets`, each [batch_size, seq_len] int32."""
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, text.size - CONFIG.seq_len - 1, CONFIG.batch_size)
        windows = np.stack([text[s : s + CONFIG.seq_len + 1] for s in starts]).astype(np.int32)
        yield {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


def device_bytes(state: Any) -> int:
    """Bytes of the state that lie on this process's first device."""
    first = jax.local_devices()[0]
    shards = [s for leaf in jax.tree.leaves(state) for s in leaf.addressable_shards if s.device == first]
    return sum(shard.data.nbytes for shard in shards)


def params_difference(state: Any, other: Any) -> float:
    """Largest relative difference of a parameter tensor: |a - b| / |b| in the Euclidean norm.

    All processes call it: each holds a part of `state`.
    """
    whole = multihost_utils.process_allgather(state["params"], tiled=True)
    pairs = zip(jax.tree.leaves(whole), jax.tree.leaves(other["params"]), strict=True)
    return max(
        float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b))) for a, b in pairs
    )


def fed(plan: jaxplan.Plan, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """The global batch, of which this process has only the rows that its plan asks it for."""
    return {
        name: jax.make_array_from_process_local_data(
            plan.in_shardings[1][name], rows[plan.process_batch_slice(f"batch/{name}")], rows.shape
        )
        for name, rows in batch.items()
    }


def train(
    step: Any, plan: jaxplan.Plan, text: np.ndarray, key: jax.Array, steps: int
) -> tuple[list[float], float, float]:
    """Both runs, step by step: (sharded losses, largest relative loss difference, that of params at the end)."""

    def init(key: jax.Array) -> Any:
        return llama.init_state(CONFIG, key)

    state = step.init(init, key)
    with jax.default_device(jax.local_devices()[0]):
        alone = jax.jit(init)(key)
    alone_step = jax.jit(llama.make_train_step(CONFIG), donate_argnums=0)
    print(
        f"State: {format_bytes(device_bytes(state))} on each of {jax.device_count()} devices; "
        f"unsharded {format_bytes(device_bytes(alone))} on one"
    )
    print(
        f"{'step':>6}  {'loss':>8}  {'unsharded':>9}  {'difference':>10}  {'bits/byte':>9}  params differ by"
    )
    losses: list[float] = []
    loss_difference = 0.0
    spent_s = {"sharded": 0.0, "unsharded": 0.0}
    for number, batch in zip(range(steps + 1), batches(text, seed=0), strict=False):
        started = time.perf_counter()
        state, metrics = step(state, batch if jax.process_count() == 1 else fed(plan, batch))
        loss = float(metrics["loss"])
        between = time.perf_counter()
        alone, alone_metrics = alone_step(alone, batch)
        alone_loss = float(alone_metrics["loss"])
        if number:  # the first call compiles
            spent_s["sharded"] += between - started
            spent_s["unsharded"] += time.perf_counter() - between
        losses.append(loss)
        difference = abs(loss - alone_loss) / abs(alone_loss)
        loss_difference = max(loss_difference, difference) if math.isfinite(difference) else math.inf
        if number % REPORT_EVERY == 0:
            print(
                f"{number:6}  {loss:8.4f}  {alone_loss:9.4f}  {difference:10.1e}  {loss / math.log(2):9.2f}  "
                f"{params_difference(state, alone):.1e}",
                flush=True,
            )
    for name, seconds in spent_s.items():
        print(f"{name}: {1e3 * seconds / steps:.0f} ms a step", end="; ")
    print("the 8 devices share this machine's cores with the one, so no speedup is to be had here")
    return losses, loss_difference, params_difference(state, alone)


def in_processes(count: int, arguments: list[str]) -> int:
    """This script in `count` connected processes of 8 / `count` devices; what the first one prints is seen."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={8 // count}")
    command = [sys.executable, __file__, *arguments, "--address", address, "--process"]
    running = [
        subprocess.Popen(
            [*command, str(index)], env={**os.environ, "XLA_FLAGS": flags},
            stdout=None if index == 0 else subprocess.DEVNULL,
        )
        for index in range(count)
    ]  # fmt: skip
    try:
        return max(abs(process.wait()) for process in running)
    finally:
        for process in running:
            process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default {STEPS}")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the plan's page and file")
    parser.add_argument("--processes", type=int, default=1, choices=(1, 2, 4, 8), help="default 1")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.processes > 1 and arguments.process is None:
        return in_processes(arguments.processes, sys.argv[1:])
    if arguments.process is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(arguments.address, arguments.processes, arguments.process)
    if jax.device_count() < 8:
        raise SystemExit(f"the demo needs 8 devices and jax has {jax.device_count()}: unset XLA_FLAGS")

    text = standard_library()
    mesh = jax.make_mesh((4, 2), ("data", "model"), devices=jax.devices()[:8])
    key = jax.random.key(0)
    step = jaxplan.auto_shard(
        llama.make_train_step(CONFIG), mesh, donate_argnums=0, memory_budget=MEMORY_BUDGET
    )
    print("Planning (some ten seconds) ...", flush=True)
    started = time.perf_counter()
    shapes = jax.eval_shape(lambda key: llama.init_state(CONFIG, key), key)
    plan = step.plan(shapes, llama.batch_shapes(CONFIG))
    print(f"Planned in {time.perf_counter() - started:.1f} s\n\n{plan}\n")
    if jax.process_index() == 0:
        arguments.out.mkdir(parents=True, exist_ok=True)
        page, file = arguments.out / "demo_plan.html", arguments.out / "demo_plan.json"
        plan.to_html(page)
        plan.save(file)
        print(f"Written: {page}, {file}\n")

    losses, loss_difference, params_apart = train(step, plan, text, key, arguments.steps)
    start, end = losses[0], float(np.mean(losses[-10:]))
    fallen = end < FALLEN * start
    agree = loss_difference <= LOSS_TOLERANCE and params_apart <= PARAMS_TOLERANCE
    print(f"\nLoss {start:.3f} -> {end:.3f} (mean of the last ten): {'falls' if fallen else 'DOES NOT FALL'}")
    print(
        f"Sharded and unsharded {'agree' if agree else 'DISAGREE'}: losses within {loss_difference:.1e} "
        f"(limit {LOSS_TOLERANCE:.0e}), parameters within {params_apart:.1e} (limit {PARAMS_TOLERANCE:.0e})"
    )
    return 0 if fallen and agree else 1


if __name__ == "__main__":
    sys.exit(main())
