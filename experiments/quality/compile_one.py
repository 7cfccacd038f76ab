"""Compiles one saved plan for one target in a process of its own, and writes down what the compiler made of it.

    python compile_one.py CASE TARGET MESH PLAN.json OUT.json [--text FILE] [--whole] [--by-hand]

Without `--whole` the process ends when the compiler has assigned buffers: memory and collectives are final then, a
TPU program's cycles are not known yet, and nine tenths of its compile time are saved.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import resource
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
from cases import CASES
from targets import TARGETS, hardware, is_gpu

import jaxplan

_REPORT = "*after_optimizations-memory-usage-report.txt"
_AFTER = "*after_optimizations_after_buffer_assignment.txt"


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


def assigned_memory(text: str) -> dict[str, int]:
    """Bytes of one device's main memory by the kind of allocation, from XLA's dump of its buffer assignment."""
    sizes = {"argument": 0, "output": 0, "alias": 0, "temp": 0}
    for line in text.splitlines():
        found = re.match(r"allocation \d+: size (\d+)(.*)", line)
        if not found or "color" in found[2] or "thread-local" in found[2] or "constant" in found[2]:
            continue
        size = int(found[1])
        if "parameter" in found[2]:
            sizes["argument"] += size
            if "maybe-live-out" in found[2]:
                sizes["alias"] += size
                sizes["output"] += size
        elif "maybe-live-out" in found[2] or "output shape" in found[2]:
            sizes["output"] += size
        elif "temp" in found[2]:
            sizes["temp"] += size
    return sizes


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
        if given.report:
            options |= {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
        compiled = program.compile(compiler_options=options)
        stats = compiled.memory_analysis()
        finish(
            {
                "argument": stats.argument_size_in_bytes,
                "output": stats.output_size_in_bytes,
                "alias": stats.alias_size_in_bytes,
                "temp": stats.temp_size_in_bytes,
                "code": stats.generated_code_size_in_bytes,
            },
            compiled.as_text(),
            True,
        )
        return
    failed: list[BaseException] = []

    def compile_it() -> None:
        try:
            program.compile(
                compiler_options={**options, "xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
            )
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=compile_it, daemon=True)
    thread.start()
    while thread.is_alive() and not glob.glob(str(folder / _AFTER)):
        time.sleep(0.1)
    if failed:
        raise failed[0]
    size = -1
    path = glob.glob(str(folder / _AFTER))[0]
    while os.path.getsize(path) != size or size == 0:
        size = os.path.getsize(path)
        time.sleep(0.2)
    assignment = glob.glob(str(folder / "*after_optimizations-buffer-assignment.txt"))[0]
    finish(assigned_memory(Path(assignment).read_text()), Path(path).read_text(), False)
    sys.stdout.flush()
    os._exit(0)  # the compiler's own threads are in the middle of code generation


if __name__ == "__main__":
    main()
