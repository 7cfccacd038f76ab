"""When XLA for GPU starts a collective: no sooner than it takes to be needed to hide it, whatever it takes.

What is combined is so before: a start that is put off orders nothing but the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..plans import COMPUTE, PlannedTask

_HIDDEN_BEHIND = 5.0
"""Kernels that XLA for GPU takes a collective to run beside, whatever either takes: from the end of a program to its
beginning it starts one when so many stand before who waits for it (xla/service/gpu/gpu_latency_hiding_scheduler.cc and
latency_hiding_scheduler.h: a latency of 5000 for a collective, a cost of 1000 for a kernel)."""


def started_late(tasks: Sequence[PlannedTask], kernels: Sequence[float]) -> list[PlannedTask]:
    """The tasks with collectives that start no earlier than the compiler starts them, see `_HIDDEN_BEHIND`.

    Args:
      kernels: about how many each task is.
    """
    reader: dict[int, int] = {}
    for task, one in enumerate(tasks):
        for other in one.after:
            reader.setdefault(other, task)
    found, fence = list(tasks), -1
    for task, one in enumerate(tasks):
        fence = task if one.kind == "barrier" else fence
        if one.kind in (COMPUTE, "barrier"):
            continue
        behind = 0.0
        for before in range(reader.get(task, len(tasks)) - 1, fence, -1):
            if behind >= _HIDDEN_BEHIND and before < task:
                if tasks[before].kind == COMPUTE:
                    found[task] = replace(one, after=tuple(sorted({*one.after, before})))
                    break
            elif tasks[before].kind == COMPUTE:
                behind += kernels[before]
    return found
