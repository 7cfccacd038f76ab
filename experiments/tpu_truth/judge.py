"""Compiles a step for TPU without a TPU, and prices what was compiled, all plans alike."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxplan.cost import CostModel, collective_wire_bytes
from jaxplan.hardware import axis_links, load_profile
from jaxplan.lowering.hlo import compiled_collectives, compiled_memory, estimated_cycles

TOPOLOGY = "v5e:2x4"
PROFILE = "tpu-v5e"
# 2 flops x rows x columns x units of the chip; with the datasheet's peak it gives the clock, as in
# experiments/tpu_calibration.
FLOPS_PER_CYCLE = 2 * 128 * 128 * 4
_REMATERIALISED = re.compile(r"[Ii]nvoluntary full rematerialization")


def mesh_of(shape: tuple[int, ...]) -> Mesh:
    """The topology's devices, in its own order, as a mesh `("data", "model")`, or `("data",)`."""
    topology = topologies.get_topology_desc(topology_name=TOPOLOGY, platform="tpu")
    return Mesh(np.array(topology.devices).reshape(shape), ("data", "model")[: len(shape)])


@contextmanager
def _captured_stderr() -> Iterator[Callable[[], str]]:
    """What this process, its C++ parts too, writes to stderr; passed on afterwards."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)

        def read() -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        try:
            yield read
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            sys.stderr.write(read())


class Judge:
    """Prices compiled steps on one mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.axes = tuple((str(name), int(size)) for name, size in mesh.shape.items())
        profile = load_profile(PROFILE)
        links = axis_links(profile, self.axes)
        self.model = CostModel(
            profile=profile, axes=self.axes, links=tuple(links[name] for name, _ in self.axes)
        )
        self.clock_hz = profile.peak_flops_per_s["bf16"] / FLOPS_PER_CYCLE

    def compile(self, lower: Callable[[], Any]) -> tuple[dict[str, Any], str]:
        """A row of results, and the compiled text, of `lower()`, a `jax.stages.Lowered`."""
        with _captured_stderr() as stderr:
            started = time.perf_counter()
            compiled = lower().compile()
            compile_s = time.perf_counter() - started
            rematerialised = len(_REMATERIALISED.findall(stderr()))
        text = compiled.as_text()
        compute_s = estimated_cycles(text) / self.clock_hz
        collectives = self.collectives(
            (c.kind, c.axes, c.bytes, c.trips, c.op_name) for c in compiled_collectives(text, self.axes)
        )
        comm_s = sum(c["seconds"] for c in collectives)
        memory = compiled_memory(compiled)
        return {
            "compile_s": round(compile_s, 1),
            "compute_ms": round(compute_s * 1e3, 3),
            "comm_ms": round(comm_s * 1e3, 3),
            "step_ms": round((compute_s + comm_s) * 1e3, 3),
            "comm_bytes": round(sum(c["wire_bytes"] for c in collectives)),
            "memory_mb": round(memory.peak_bytes / 1e6, 1),
            "memory_bytes": {
                "argument": memory.argument_bytes,
                "output": memory.output_bytes,
                "temp": memory.temp_bytes,
                "alias": memory.alias_bytes,
            },
            "involuntary_rematerialisations": rematerialised,
            "collectives": collectives,
        }, text

    def collectives(self, found: Any) -> list[dict[str, Any]]:
        """Equal collectives (kind, axes, bytes, operation) as one entry, dearest first.

        Seconds and wire bytes are of all runs in a step; groups that no mesh axes make are priced over all.
        """
        runs: Counter[tuple[Any, ...]] = Counter()
        for kind, axes, size, trips, where in found:
            runs[kind, tuple(axes), int(size), where] += trips
        entries = []
        for (kind, axes, size, where), count in runs.items():
            names = [name for name, _ in self.axes] if axes == ("?",) else axes
            sizes = [self.model.link(name).size for name in names]
            entries.append(
                {
                    "kind": kind,
                    "axes": "+".join(axes),
                    "bytes": size,
                    "runs": count,
                    "wire_bytes": float(collective_wire_bytes(kind, size, sizes)) * count,
                    "seconds": self.model.collective_over(kind, size, names) * count,
                    "where": where,
                }
            )
        return sorted(entries, key=lambda e: -e["seconds"])


def lowered_by_hand(step: Callable[..., Any], shapes: tuple[Any, ...], inside: Any, results: Any) -> Any:
    """`jax.jit` of the plain step with an expert's shardings; the state is donated."""
    jitted = jax.jit(step, in_shardings=inside, out_shardings=results, donate_argnums=0)
    return jitted.lower(*shapes)
