"""Measures what one of eight forced host devices gets of this machine, all eight working at once.

    python experiments/cpu_calibration/run.py        # about a minute; writes results.json beside this

Other programs on the machine only ever add time, so collectives are the fastest of many runs; and local rates,
where all devices keep all cores busy, are taken from processor time divided by the number of cores.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

N_DEVICES = 8
REPEATS = 12
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
COLLECTIVE_BYTES = tuple(2**power for power in (8, 12, 16, 18, 20, 22))


def busy_s() -> float:
    """Processor seconds of this process, spread over all cores."""
    return time.process_time() / len(os.sched_getaffinity(0))


def fastest_s(run: Callable[..., Any], *args: Any, clock: Callable[[], float]) -> float:
    """Seconds of the fastest of `REPEATS` calls, after one that compiles."""
    jax.block_until_ready(run(*args))
    times = []
    for _ in range(REPEATS):
        started = clock()
        jax.block_until_ready(run(*args))
        times.append(clock() - started)
    return min(times)


def seconds_an_iteration(
    body: Callable[[Any], Any],
    x: jax.Array,
    mesh: Mesh,
    trips: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds of `body` on every device's part of `x` (split on its first dim, mapped to itself).

    A loop in one program: the difference of two trip counts holds no dispatch of the program itself.  The trip
    count is an argument, so that XLA can't unroll the loop and fuse its iterations.
    """
    axes = PartitionSpec(mesh.axis_names)

    def per_device(x: jax.Array, n: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, n, lambda _, y: body(y), x)

    loop = jax.jit(
        jax.shard_map(
            per_device, mesh=mesh, in_specs=(axes, PartitionSpec()), out_specs=axes, check_vma=False
        )
    )
    x = jax.device_put(x, jax.NamedSharding(mesh, axes))
    long, short = (fastest_s(loop, x, np.int32(n), clock=clock) for n in (trips + 1, 1))
    return max(long - short, 1e-9) / trips


def local_rates(mesh: Mesh) -> dict[str, Any]:
    """Rates of one device while all of the mesh run the same."""
    products = []
    for m, k in ((256, 256), (512, 512), (1024, 1024)):
        weights = jnp.full((k, k), 1.0 / k, jnp.float32)
        body = functools.partial(jnp.matmul, b=weights)
        seconds = seconds_an_iteration(body, jnp.ones((N_DEVICES * m, k), jnp.float32), mesh, 8, busy_s)
        products.append({"m": m, "k": k, "n": k, "seconds": seconds, "flops_per_s": 2 * m * k * k / seconds})

    size = 2**24  # 64 MiB a device: beyond any cache
    streamed = seconds_an_iteration(
        lambda x: jax.lax.optimization_barrier(x + 1.0),
        jnp.ones(N_DEVICES * size, jnp.float32),
        mesh,
        8,
        busy_s,
    )

    def arithmetic(x: jax.Array) -> jax.Array:  # 16 polynomial steps on what stays in cache: 32 operations
        y = x
        for _ in range(16):
            y = y * x + 0.5
        return y

    cached = 2**14
    vector = seconds_an_iteration(
        arithmetic, jnp.full(N_DEVICES * cached, 0.25, jnp.float32), mesh, 512, busy_s
    )
    # A product: XLA would compile an elementwise loop into one kernel.
    small = jnp.full((8, 8), 0.125, jnp.float32)
    tiny = seconds_an_iteration(
        functools.partial(jnp.matmul, b=small), jnp.ones((N_DEVICES * 8, 8), jnp.float32), mesh, 2048, busy_s
    )
    return {
        "matmul_f32": products,
        "stream": {"bytes": 2 * 4 * size, "seconds": streamed, "bytes_per_s": 2 * 4 * size / streamed},
        "vector": {"flops": 32 * cached, "seconds": vector, "flops_per_s": 32 * cached / vector},
        "smallest_operation_s": tiny,
    }


def collective(kind: str, n: int) -> Callable[[jax.Array], jax.Array]:
    """A body over axis `d` of size n, from the local operand to one of the same shape, one collective in it."""
    if kind == "all_reduce":
        return lambda x: jax.lax.psum(x, "d") * (1.0 / n)
    if kind == "all_to_all":
        return lambda x: jax.lax.all_to_all(x, "d", 0, 0, tiled=True)
    if kind == "all_gather":  # its larger buffer is the result
        return lambda x: jax.lax.dynamic_slice_in_dim(jax.lax.all_gather(x, "d", tiled=True), 0, x.shape[0])
    return lambda x: jnp.tile(jax.lax.psum_scatter(x, "d", tiled=True) * (1.0 / n), n)


def collectives() -> list[dict[str, Any]]:
    """Seconds of every kind over 2, 4 and 8 devices; `bytes`: the larger local buffer, as in jaxplan.cost.

    Where the machine has more devices than the group, the other groups run the same at the same time.
    """
    rows = []
    for n in (2, 4, 8):
        mesh = Mesh(np.array(jax.devices()[:N_DEVICES]).reshape(N_DEVICES // n, n), ("other", "d"))
        for kind in KINDS:
            for size in COLLECTIVE_BYTES:
                items = size // 4 // (n if kind == "all_gather" else 1)
                x = jnp.ones(N_DEVICES * items, jnp.float32)
                trips = 64 if size < 2**18 else 8
                seconds = seconds_an_iteration(collective(kind, n), x, mesh, trips)
                rows.append({"kind": kind, "devices": n, "bytes": size, "seconds": seconds})
            timed = ", ".join(f"{row['seconds'] * 1e6:.0f}" for row in rows[-len(COLLECTIVE_BYTES) :])
            print(f"  {kind} over {n}: {timed} us")
    return rows


def fitted(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """launch_s, latency_s and bytes_per_s of the alpha-beta model: the least sum of |log(predicted / measured)|.

    seconds = times * (launch + (n - 1) * latency + (n - 1) / n * bytes / rate), times = 2 for an all_reduce
    (`jaxplan.cost.collectives`, one switch).  That sum, unlike one of squares, is not bent by the few rows that
    another program disturbed.
    """
    times = np.array([2.0 if row["kind"] == "all_reduce" else 1.0 for row in rows])
    n = np.array([row["devices"] for row in rows])
    share = (n - 1) / n * np.array([row["bytes"] for row in rows])
    measured = np.array([row["seconds"] for row in rows])

    def predicted(launch: float, latency: float, rate: float) -> np.ndarray:
        return times * (launch + (n - 1) * latency + share / rate)

    grids = [np.geomspace(low, high, 40) for low, high in ((1e-6, 2e-4), (1e-6, 5e-5), (1e8, 2e10))]
    best = min(
        itertools.product(*grids), key=lambda point: np.abs(np.log(predicted(*point) / measured)).sum()
    )
    ratio = predicted(*best) / measured
    return {
        "launch_s": float(best[0]),
        "latency_s": float(best[1]),
        "bytes_per_s": float(best[2]),
        "predicted_over_measured_median": float(np.median(ratio)),
        "predicted_over_measured_quartiles": [float(q) for q in np.quantile(ratio, (0.25, 0.75))],
    }


def main() -> None:
    if len(jax.devices()) < N_DEVICES:
        raise SystemExit(
            f"needs {N_DEVICES} devices, jax has {len(jax.devices())}: see XLA_FLAGS in this file"
        )
    mesh = Mesh(np.array(jax.devices()[:N_DEVICES]), ("d",))
    print(f"One of {N_DEVICES} forced host devices on {len(os.sched_getaffinity(0))} cores")
    local = local_rates(mesh)
    for row in local["matmul_f32"]:
        print(f"  matmul f32 {row['m']} x {row['k']} x {row['n']}: {row['flops_per_s'] / 1e9:.1f} GFLOP/s")
    print(f"  streaming {local['stream']['bytes_per_s'] / 1e9:.2f} GB/s")
    print(f"  elementwise in cache {local['vector']['flops_per_s'] / 1e9:.2f} GFLOP/s")
    print(f"  smallest operation {local['smallest_operation_s'] * 1e6:.2f} us")
    rows = collectives()
    fit = fitted(rows)
    print("  alpha-beta: " + ", ".join(f"{name} {value}" for name, value in fit.items()))
    result = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "local": local,
        "collectives": rows,
        "fit": fit,
    }
    path = Path(__file__).with_name("results.json")
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
