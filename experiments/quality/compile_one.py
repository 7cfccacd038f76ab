"""Compiles one saved plan for one target in a process of its own, and writes down what the compiler made of it.

    python compile_one.py CASE TARGET MESH PLAN.json OUT.json [--text FILE] [--whole] [--by-hand]

Without `--whole` the process ends when the compiler has assigned buffers: memory and collectives are final then, a
TPU program's cycles are not known yet, and nine tenths of its compile time are saved.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from assigned import until_assigned
from cases import CASES
from targets import TARGETS, hardware, is_gpu

import jaxplan
from jaxplan.hardware import compile_for
from jaxplan.lowering import compiled_memory

_REPORT = "*after_optimizations-memory-usage-report.txt"


def lowered(case_name: str, target_name: str, mesh_name: str, plan_path: str, by_hand: bool) -> Any:
    """The saved plan as a `jax.stages.Lowered` for the target's devices.

    `by_hand`: its shardings of arguments and results alone, as written for `jax.jit`; propagation does the rest.
    """
    case = CASES[case_name]
    mesh = jaxplan.target(target_name).mesh(**dict(TARGETS[target_name][mesh_name]))
    plan = jaxplan.load_plan(plan_path, mesh)
    state, batch = case.shapes()
    if by_hand:
        jitted = jax.jit(
            case.step(), in_shardings=plan.in_shardings, out_shardings=plan.out_shardings, donate_argnums=(0,)
        )
        return jitted.lower(state, batch)
    step = jaxplan.auto_shard(
        case.step(), mesh, donate_argnums=(0,), hardware=hardware(target_name), options={"plan": plan}
    )
    return step.lower(state, batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case")
    parser.add_argument("target")
    parser.add_argument("mesh")
    parser.add_argument("plan")
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, help="where to keep the compiled program")
    parser.add_argument("--report", type=Path, help="where to keep XLA's report of what fills the memory")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--by-hand", action="store_true", help="the shardings of arguments and results alone")
    given = parser.parse_args()
    options: dict[str, Any] = dict(jaxplan.target(given.target).compiler_options)
    program = lowered(given.case, given.target, given.mesh, given.plan, given.by_hand)
    folder = Path(tempfile.mkdtemp(prefix="quality-"))
    started = time.perf_counter()

    def finish(memory: dict[str, int], text: str, whole: bool) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        row = {
            "memory": memory,
            "whole": whole,
            "compile_wall_s": round(time.perf_counter() - started, 1),
            "process_cpu_s": round(used.ru_utime + used.ru_stime, 1),
        }
        if given.text:
            given.text.write_text(text)
        for found in folder.glob(_REPORT) if given.report else ():
            given.report.write_text(found.read_text())
        shutil.rmtree(folder, ignore_errors=True)
        given.out.write_text(json.dumps(row))

    if given.whole or is_gpu(given.target):
        if given.report and is_gpu(given.target):
            options |= {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
        target = jaxplan.target(given.target)
        compiled = compile_for(program, target.mesh(data=len(target.devices)), options)
        stats = compiled.memory_analysis()
        finish(
            {
                "argument": stats.argument_size_in_bytes,
                "output": stats.output_size_in_bytes,
                "alias": stats.alias_size_in_bytes,
                "temp": compiled_memory(compiled).temp_bytes,
                "code": stats.generated_code_size_in_bytes,
            },
            compiled.as_text(),
            True,
        )
        return
    finish(*until_assigned(program, options, folder), False)
    sys.stdout.flush()
    os._exit(0)  # the compiler's own threads are in the middle of code generation


if __name__ == "__main__":
    main()
