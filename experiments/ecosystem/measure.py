"""One case: traced, planned and compiled by XLA's own TPU compiler; what each took, and what had no rule."""

from __future__ import annotations

import importlib
import math
import os
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-16")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
# Host callbacks need a running backend, which a compile-only target has not: Equinox then checks by NaN.
os.environ.setdefault("EQX_ON_ERROR", "nan")

import jax
import numpy as np
from jax.experimental import topologies

import jaxplan
from jaxplan.lowering import compiled_memory

TOPOLOGY = "v5e:2x4"
MESH = {"data": 4, "model": 2}


def measure(module: str, case: str, *, compile_too: bool = True) -> dict[str, Any]:
    """The row of `steps/<module>.py`'s case: seconds, sizes, warnings.  Any error is the case's and comes through.

    Times are processor seconds of this process, so that other programs on the machine don't count.
    """
    package = importlib.import_module(f"steps.{module}")
    step, shapes = package.CASES[case]()
    devices = topologies.get_topology_desc(topology_name=TOPOLOGY, platform="tpu").devices
    mesh = jax.sharding.Mesh(np.array(devices).reshape(tuple(MESH.values())), tuple(MESH))
    started = time.process_time()
    traced = jax.jit(step).trace(*shapes)
    traced_s = time.process_time() - started
    planned = jaxplan.auto_shard(step, mesh, options={"compare_templates": False})
    started = time.process_time()
    plan = planned.plan(*shapes)
    planned_s = time.process_time() - started
    row: dict[str, Any] = {
        "equations": equations(traced.jaxpr.jaxpr),
        "parameters": sum(
            math.prod(t.shape) for t in plan.inputs if t.kind == "parameter" and t.dtype.startswith(("f", "bf"))
        ),
        "trace_s": round(traced_s, 2),
        "plan_s": round(planned_s, 2),
        "step_ms": round(plan.cost.step_s * 1e3, 3),
        "peak_gib": round(plan.cost.peak_bytes / 2**30, 2),
        "termination": plan.cost.termination,
        "gap": plan.cost.gap,
        "unruled_share": {name: s / plan.cost.step_s for name, s in plan.unruled_s.items()},
        "warnings": list(plan.warnings),
    }
    if compile_too:
        started = time.process_time()
        compiled = planned.lower(*shapes).compile()
        row["compile_s"] = round(time.process_time() - started, 1)
        row["compiled_gib"] = round(compiled_memory(compiled).peak_bytes / 2**30, 2)
    return row


def equations(jaxpr: Any) -> int:
    """Equations of a jaxpr and of all those inside it, a loop's body once."""
    return sum(1 + sum(map(equations, jax.core.jaxprs_in_params(eqn.params))) for eqn in jaxpr.eqns)
