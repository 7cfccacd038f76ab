"""Measures what the XLA TPU compiler expects of each TPU, and compares the profiles' roofline with it.

    python experiments/tpu_calibration/run.py        # two to three minutes on two cores, no TPU needed

Needs `libtpu` (extra `tpu-aot`).  Every operation is compiled for a topology without a TPU; its cost is the
sum of `estimated_cycles` in the scheduled HLO.  Cycles become seconds by the clock that the datasheet's bf16
peak implies: clock = peak / (flops a cycle of the device's matrix units).  Writes `results.json` beside this.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-16")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from vector_kernels import VECTOR_KERNELS
from windows import windows

from jaxplan.cost import roofline_seconds
from jaxplan.hardware import load_profile


@dataclass(frozen=True, kw_only=True)
class Target:
    """A profile, the topology that stands for it, and bf16 flops a cycle of one device."""

    profile: str
    topology: str
    options: dict[str, str]
    flops_per_cycle: int


# 2 flops x rows x columns x units: v4 and v5p have two cores of four 128 x 128 units, v5e one such core.
# The clocks of v6e and TPU7x are not published: 2**19 flops a cycle implies 1.75 and 2.2 GHz, as their
# neighbours have, but every figure in seconds of these two rests on it.
TARGETS = (
    Target(
        profile="tpu-v4",
        topology="v4:2x2x1",
        options={"chip_config_name": "megacore"},
        flops_per_cycle=2 * 128 * 128 * 8,
    ),
    Target(profile="tpu-v5e", topology="v5e:2x4", options={}, flops_per_cycle=2 * 128 * 128 * 4),
    Target(profile="tpu-v5p", topology="v5p:2x2x2", options={}, flops_per_cycle=2 * 128 * 128 * 8),
    Target(profile="tpu-v6e", topology="v6e:4x4", options={}, flops_per_cycle=2 * 256 * 256 * 4),
    Target(profile="tpu-v7x", topology="tpu7x:2x2x1", options={}, flops_per_cycle=2 * 256 * 256 * 4),
)
MATMULS = (
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (16384, 4096, 4096),
    (16384, 1024, 4096),
    (4096, 16384, 4096),
    (8192, 8192, 1024),
    (2048, 2048, 2048),
)
# Below the tile, or too thin to be bound by the matrix unit: reported, not fitted.
THIN_MATMULS = ((8192, 8192, 64), (8192, 8192, 128), (8192, 64, 8192), (64, 8192, 8192), (1024, 1024, 128))


def _chain(x: jax.Array) -> jax.Array:
    for _ in range(64):
        x = x * x + 0.5
    return x


# A million elements in whole tiles, and in tiles of one row: eight times as many.
WHOLE_TILES, SINGLE_ROWS = (1024, 8, 128), (8192, 1, 128)


class Compiler:
    """Compiles for one device of a topology and reads the expected cycles."""

    def __init__(self, target: Target) -> None:
        topology = topologies.get_topology_desc(
            topology_name=target.topology, platform="tpu", **target.options
        )
        mesh = jax.sharding.Mesh(np.array(topology.devices), ("all",))
        self.sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        self.device_kind = topology.devices[0].device_kind

    def compile(self, function: Callable[..., Any], *shapes: tuple[tuple[int, ...], Any]) -> Any:
        arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
        placed = jax.jit(function, in_shardings=self.sharding, out_shardings=self.sharding)
        return placed.lower(*arguments).compile()

    def cycles(self, function: Callable[..., Any], *shapes: tuple[tuple[int, ...], Any]) -> int:
        text = self.compile(function, *shapes).as_text()
        return sum(int(found) for found in re.findall(r'"estimated_cycles":"(\d+)"', text))

    def on_chip_bytes(self) -> int:
        """The largest square of weights that a loop leaves in vector memory, memory space 1, for all iterations."""

        def kept(side: int) -> bool:
            loops = [line for line in self._looped(32, side).splitlines() if " while(" in line]
            return any(re.search(rf"bf16\[{side},{side}\]{{[^}}]*S\(1\)}}", line) for line in loops)

        side = next((side for side in range(8192, 0, -256) if kept(side)), 0)  # small ones are fetched ahead each time
        return 2 * side * side

    def matmul_rows(self) -> int:
        """The most rows of an operand that a product with weights in vector memory takes no longer for than for 8."""

        def cycles(rows: int) -> int:
            products = [line for line in self._looped(rows, 1024).splitlines() if "kind=kOutput" in line]
            return min(int(found) for found in re.findall(r'"estimated_cycles":"(\d+)"', "".join(products)))

        floor = cycles(8)
        return max(rows for rows in (8, 16, 32, 64, 128, 256) if cycles(rows) <= 1.05 * floor)

    def _looped(self, rows: int, side: int) -> str:
        """A loop of products with two squares of bf16 weights, compiled."""

        def looped(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
            # arguments of the program would stay where they are
            weights = first.astype(jnp.bfloat16), second.astype(jnp.bfloat16)

            def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
                for w in weights:
                    x = jnp.matmul(x.astype(jnp.bfloat16), w, preferred_element_type=jnp.float32)
                    x = jax.lax.optimization_barrier(x)
                return x, None

            return jax.lax.scan(body, x, None, length=64)[0]

        square = ((side, side), jnp.float32)
        return str(self.compile(looped, ((rows, side), jnp.float32), square, square).as_text())

    def available_hbm_gib(self) -> float:
        """Read off the refusal of a program that needs 96 GiB of temporaries."""
        try:
            self.compile(lambda x: jnp.sin(x).T @ x, ((2**18, 2**17), jnp.bfloat16))
        except jax.errors.JaxRuntimeError as error:
            return float(re.findall(r"available HBM \(([\d.]+)G\)", str(error))[0])
        raise AssertionError("a program of 96 GiB of temporaries was accepted")


def measure(target: Target) -> dict[str, Any]:
    """Fitted figures of one TPU; row by row, its profile's roofline beside the compiler's time."""
    profile = load_profile(target.profile)
    clock_hz = profile.peak_flops_per_s["bf16"] / target.flops_per_cycle
    compiler = Compiler(target)
    rows: list[dict[str, Any]] = []

    def row(what: str, cycles: int, flops: float, size: float, dtype: str, **matmul: Any) -> float:
        seconds = cycles / clock_hz
        predicted_s = float(roofline_seconds(flops, size, dtype, profile, **matmul))
        rows.append(
            {
                "operation": what,
                "cycles": cycles,
                "compiler_us": round(seconds * 1e6, 3),
                "roofline_us": round(predicted_s * 1e6, 3),
                "ratio": round(predicted_s / seconds, 3),
            }
        )
        return seconds

    matmul_shares = []
    for m, k, n in MATMULS + THIN_MATMULS:
        cycles = compiler.cycles(jnp.matmul, ((m, k), jnp.bfloat16), ((k, n), jnp.bfloat16))
        flops, size = 2.0 * m * k * n, 2.0 * (m * k + k * n + m * n)
        row(f"bf16 matmul {m}x{k}x{n}", cycles, flops, size, "bfloat16", matmul=True, dims=(m, n, k))
        if (m, k, n) in MATMULS:
            matmul_shares.append(flops / cycles / target.flops_per_cycle)
    stream_shares = []
    for dtype in (jnp.float32, jnp.bfloat16):
        width, name = jnp.dtype(dtype).itemsize, jnp.dtype(dtype).name
        shape = (8192, 8192)
        count = float(np.prod(shape))
        for what, function, arity, traffic in (
            ("scale", lambda x: x * 2, 1, 2),
            ("add", lambda x, y: x + y, 2, 3),
            ("add three", lambda x, y, z: x + y + z, 3, 4),
            ("gelu", jax.nn.gelu, 1, 2),
        ):
            cycles = compiler.cycles(function, *[(shape, dtype)] * arity)
            size = traffic * width * count
            seconds = row(f"{name} {what} 8192x8192", cycles, arity * count, size, name, matmul=False)
            if dtype is jnp.float32 and what == "scale":
                stream_shares.append(size / seconds / profile.hbm_bytes_per_s)
    tile_rows = [
        {
            "operation": what,
            "dtype": jnp.dtype(dtype).name,
            "shape": list(shape),
            "cycles_a_tile": round(
                compiler.cycles(function, *[(shape, dtype)] * arity) * 128 * shape[1] / float(np.prod(shape)), 1
            ),
        }
        for shape, dtype in ((WHOLE_TILES, jnp.bfloat16), (SINGLE_ROWS, jnp.float32))
        for what, (function, arity) in VECTOR_KERNELS.items()
    ]
    tile_s = statistics.median(entry["cycles_a_tile"] for entry in tile_rows) / clock_hz
    side = 4096
    chain_cycles = compiler.cycles(_chain, ((side, side), jnp.float32))
    chain_flops, chain_bytes = 128.0 * side * side, 8.0 * side * side
    row("f32 chain of 64 multiply-adds", chain_cycles, chain_flops, chain_bytes, "float32", matmul=False)
    floor_s = compiler.cycles(lambda x, y: x + y, *[((8, 128), jnp.float32)] * 2) / clock_hz
    window_rows = list(windows(compiler.sharding, clock_hz))
    window_rate = statistics.median(entry["bytes_per_s"] for entry in window_rows)
    return {
        "device_kind": compiler.device_kind,
        "topology": target.topology,
        "clock_hz": round(clock_hz),
        "matmul_efficiency": round(statistics.median(matmul_shares), 3),
        "hbm_efficiency": round(statistics.median(stream_shares), 3),
        "vector_flops_per_s": float(f"{chain_flops * clock_hz / chain_cycles:.3g}"),
        "op_overhead_s": float(f"{floor_s:.3g}"),
        "tile_s": float(f"{tile_s:.3g}"),
        "on_chip_bytes": compiler.on_chip_bytes(),
        "matmul_rows": compiler.matmul_rows(),
        "window_bytes": statistics.median_low(entry["window_bytes"] for entry in window_rows),
        "window_efficiency": round(window_rate / profile.hbm_bytes_per_s, 3),
        "available_hbm_gib": compiler.available_hbm_gib(),
        "rows": rows,
        "tile_rows": tile_rows,
        "window_rows": window_rows,
    }


def main() -> None:
    results = {
        "jax": jax.__version__,
        "targets": {target.profile: measure(target) for target in TARGETS},
    }
    out = Path(__file__).with_name("results.json")
    out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for name, figures in results["targets"].items():
        print(name, {key: value for key, value in figures.items() if not key.endswith("rows")})
        for entry in (*figures["rows"], *figures["tile_rows"], *figures["window_rows"]):
            print("   ", entry)


if __name__ == "__main__":
    main()
