"""How long a compiled program takes in the order that the compiler has put it in, collectives beside kernels.

The yardstick's own seconds (`yardstick.py`), laid out along the schedule: kernels run one after the other, an
asynchronous collective from its `-start` on while its links are free, and its `-done` waits for it.  One that TPU
spreads over fusions runs from the first of them on, and has ended with the last.  What has neither runs by itself.
"""

from __future__ import annotations

import re

from ..cost import CostModel
from .hlo import compiled_collectives, spread_channel
from .hlo_text import runs
from .yardstick import kernel_seconds

_DONE = re.compile(r"-done$")
_START = re.compile(r"-start$")


def scheduled_seconds(hlo_text: str, model: CostModel, *, while_trips: float = 16.0) -> float:
    """Seconds of one step of `compiled.as_text()`, asynchronous collectives hidden as far as its schedule allows.

    A loop's body is laid out once with all its trips, as `simulator.timeline` does: scheduling is the same whatever all
    durations are multiplied by.

    Args:
      while_trips: of loops whose trip count is unknown.
    """
    every = tuple(name for name, _ in model.axes)
    sent = {c.name: c for c in compiled_collectives(hlo_text, model.axes, while_trips=while_trips)}
    kernels = kernel_seconds(hlo_text, model, while_trips=while_trips)
    clock_s, before_s = 0.0, 0.0
    free_s: dict[str, float] = {}
    done_s: dict[str, float] = {}
    every_run = list(runs(hlo_text, while_trips))
    last = {spread: number for number, run in enumerate(every_run) if (spread := spread_channel(run))}
    for number, run in enumerate(every_run):
        name, opcode = run.instruction.name, run.instruction.opcode
        collective, spread = sent.get(name), spread_channel(run)
        if not run.fusion:
            before_s = clock_s  # when the fusion began that what comes next may stand in
        if collective is not None:
            axes = every if collective.axes == ("?",) else collective.axes
            streams = model.streams_of(axes)
            begun_s = before_s if spread else clock_s
            begin_s = max([begun_s, *(free_s.get(stream, 0.0) for stream in streams)])
            end_s = begin_s + model.collective_over(collective.kind, collective.bytes, axes) * collective.trips
            free_s.update(dict.fromkeys(streams, end_s))
            if spread or _START.search(opcode):
                done_s[spread or name] = end_s
            else:
                clock_s = end_s
        elif _DONE.search(opcode) and run.instruction.operands[0] in done_s:
            clock_s = max(clock_s, done_s.pop(run.instruction.operands[0]))
        elif not run.fusion:
            clock_s += kernels.get(name, 0.0)
        if spread and last[spread] == number:
            clock_s = max(clock_s, done_s.pop(spread, 0.0))
    return max([clock_s, *done_s.values()])
