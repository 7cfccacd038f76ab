"""Compiles for TPU as far as buffers are assigned: nine tenths of a compile's time are spent after that.

Memory and collectives are final then, but for the program itself.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxplan.hardware import heap_bytes

_AFTER, _ASSIGNMENT = "*after_optimizations_after_buffer_assignment.txt", "*after_optimizations-buffer-assignment.txt"


def until_assigned(lowered: Any, options: Mapping[str, Any], folder: Path) -> tuple[dict[str, int], str]:
    """The memory and the program of a `jax.stages.Lowered` at that point, dumped into a folder that is empty.

    The compiler goes on behind it: end the process with `os._exit`.
    """
    failed: list[BaseException] = []

    def compile_it() -> None:
        try:
            lowered.compile(
                compiler_options={**options, "xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
            )
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=compile_it, daemon=True)
    thread.start()
    while thread.is_alive() and not list(folder.glob(_AFTER)):
        time.sleep(0.1)
    if failed:
        raise failed[0]
    size = -1
    path = next(folder.glob(_AFTER))
    while path.stat().st_size != size or size == 0:
        size = path.stat().st_size
        time.sleep(0.2)
    return assigned_memory(next(folder.glob(_ASSIGNMENT)).read_text()), path.read_text()


def assigned_memory(text: str) -> dict[str, int]:
    """Bytes of one device's main memory by the kind of allocation, from XLA's dump of its buffer assignment."""
    sizes = {"argument": 0, "output": 0, "alias": 0, "temp": heap_bytes(text)}
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
    return sizes


def peak_bytes(memory: Mapping[str, int]) -> int:
    """What one device needs."""
    return memory["argument"] + memory["output"] + memory["temp"] - memory["alias"]
