"""Run the steps on the GPU at hand, as plain jax and without jaxplan, and write down what they take.

    PYTHONPATH=. python experiments/gpu_truth/measure.py OUT [--case NAME ...] [--jobs 8]

needs jax with its CUDA plug-in, Flax and optax.  Every step is compiled first, several at a time, in processes that end
with it (the compiler tries kernels out on the GPU, and keeps the memory); then each has the GPU for itself.
OUT/<case>.json has seconds, memory and the seconds of every kernel, OUT/<case>.hlo.gz the program.
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cases import CASES, Case

WARM, CALLS, TRACED = 3, 10, 2
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
"""Kernels that are started as one graph carry no names in the profiler: what is traced is started one by one."""


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Nothing else that holds this lock."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def programs(case: Case) -> dict[str, Any]:
    """What is run of a case, compiled: `init` and `batch` make the arguments of `step`; `traced` is the same step."""
    import jax

    options = NO_GRAPHS if jax.devices()[0].platform == "gpu" else {}
    step = jax.jit(case.step(), donate_argnums=0).lower(*case.shapes())
    key = jax.eval_shape(lambda: jax.random.key(0))
    return {
        "step": step.compile(),
        "traced": step.compile(compiler_options=options),
        "init": jax.jit(lambda key: case.model.init_state(case.config, key)).lower(key).compile(),
        "batch": jax.jit(lambda key: case.model.make_batch(case.config, key)).lower(key).compile(),
    }


def measure(case: Case, out: Path) -> None:
    """One case, in this process."""
    import jax

    device, run = jax.devices()[0], programs(case)
    text = run["step"].as_text()
    (out / f"{case.name}.hlo.gz").write_bytes(gzip.compress(text.encode()))
    with alone(out / "gpu.lock"):
        state, batch = run["init"](jax.random.key(0)), run["batch"](jax.random.key(1))
        jax.block_until_ready((state, batch))
        before = dict(device.memory_stats() or {})
        state, seconds, together = timed(run["step"], state, batch)
        after = dict(device.memory_stats() or {})
        state, one_by_one, _ = timed(run["traced"], state, batch)
        kernels, state = profiled(run["traced"], state, batch)
        metrics = {name: float(value) for name, value in run["traced"](state, batch)[1].items()}
    memory = run["step"].memory_analysis()
    row = {
        "case": case.name, "what": case.what, "device": device.device_kind, "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"), "seconds": together, "calls_s": seconds, "no_graphs_s": one_by_one,
        "metrics": metrics,
        "compiled_bytes": {
            name: getattr(memory, f"{name}_size_in_bytes") for name in ("argument", "output", "alias", "temp")
        },
        "memory": {"before": before, "after": after},
        "kernels": kernels,
    }  # fmt: skip
    (out / f"{case.name}.json").write_text(json.dumps(row, default=str), encoding="utf-8")


def timed(run: Any, state: Any, batch: Any) -> tuple[Any, list[float], float]:
    """The state after, seconds of single calls, and seconds a call of several of which none is waited for."""
    import jax

    for _ in range(WARM):
        state, _metrics = jax.block_until_ready(run(state, batch))
    single = []
    for _ in range(CALLS):
        started = time.perf_counter()
        state, _metrics = jax.block_until_ready(run(state, batch))
        single.append(time.perf_counter() - started)
    started = time.perf_counter()
    for _ in range(CALLS):
        state, _metrics = run(state, batch)
    jax.block_until_ready(state)
    return state, single, (time.perf_counter() - started) / CALLS


def profiled(run: Any, state: Any, batch: Any) -> tuple[list[dict[str, Any]], Any]:
    """Rows of (line of the device, name of the kernel, operation) with how often and how long a step, and the state."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(TRACED):
                state, _metrics = run(state, batch)
            jax.block_until_ready(state)
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        rows = kernel_rows(jax.profiler.ProfileData.from_file(str(files[0]))) if files else []
    return rows, state


def kernel_rows(data: Any) -> list[dict[str, Any]]:
    """The events of a profile's device planes, those of one kernel and operation together."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for plane in data.planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            for event in line.events:
                stats = {str(name): value for name, value in event.stats}
                op = str(stats.get("hlo_op", stats.get("name", "")))
                row = found.setdefault(
                    (line.name, event.name, op),
                    {
                        "line": line.name, "kernel": event.name[:120], "op": op, "runs": 0.0, "seconds": 0.0,
                        "facts": {name: str(value)[:160] for name, value in stats.items()} if len(found) < 40 else {},
                    },
                )  # fmt: skip
                row["runs"] += 1 / TRACED
                row["seconds"] += event.duration_ns * 1e-9 / TRACED
    return sorted(found.values(), key=lambda row: -row["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--case", action="append", choices=[*CASES])
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile at a time")
    parser.add_argument("--one", choices=["compile", "measure"], help="in this process (what the others are told)")
    given = parser.parse_args()
    if given.one == "compile":
        programs(CASES[given.case[0]])
    elif given.one == "measure":
        measure(CASES[given.case[0]], given.out)
    else:
        given.out.mkdir(parents=True, exist_ok=True)
        cases = given.case or [*CASES]
        each(given.out, cases, "compile", given.jobs)
        each(given.out, cases, "measure", 3)


def each(out: Path, cases: list[str], what: str, jobs: int) -> None:
    """Run `what` for every case in a process of its own, `jobs` at a time."""
    started, waiting, running = time.monotonic(), [*cases], dict[str, subprocess.Popen[bytes]]()
    environment = {
        **os.environ,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the limit is the same
        "JAX_COMPILATION_CACHE_DIR": str(out / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            command = [sys.executable, __file__, str(out), "--one", what, "--case", name]
            with (out / f"{name}.log").open("w") as log:
                running[name] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        for name in [name for name, process in running.items() if process.poll() is not None]:
            refused = running.pop(name).returncode
            done = outcome(out, name) if what == "measure" and not refused else "compiled"
            said = last_line(out / f"{name}.log") if refused else done
            print(f"{time.monotonic() - started:5.0f} s  {name}: {said}", flush=True)
        time.sleep(0.1)


def last_line(path: Path) -> str:
    """Of what a process that failed has said."""
    return "failed: " + (path.read_text(encoding="utf-8").strip().splitlines() or ["nothing said"])[-1][:150]


def outcome(out: Path, name: str) -> str:
    """What came of a case, in a line."""
    row = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
    kernels = sum(each["seconds"] for each in row["kernels"] if not each["line"].startswith("XLA"))
    return (
        f"{row['seconds'] * 1e3:.2f} ms ({min(row['calls_s']) * 1e3:.2f} a call waited for, "
        f"{min(row['no_graphs_s']) * 1e3:.2f} without graphs, {kernels * 1e3:.2f} of kernels)"
    )


if __name__ == "__main__":
    main()
