"""A plan's timeline: what runs when, what waits for what, and what is alive meanwhile.

One device stands for all: an SPMD program does the same on each, and the devices of a mesh are alike.  Its streams
are the compute unit and the links of the mesh axes.  Communication is asynchronous: it starts when what it sends is
there and its links are free, and only what reads its result waits for it; where a compiler makes it synchronous (sums
and exchanges on TPU) the compute unit stands still meanwhile.  Nothing overlaps across the edge of a
loop.  A loop's work is shown with all its runs at once: scheduling is the same whatever all durations are multiplied
by, so one pass tells what every iteration takes.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import ArgumentError
from ..plans import COMPUTE, Plan, PlannedTask
from .engine import Load, Net, Run

TICKS_PER_S = 10**12
"""Times are whole picoseconds while simulating: their sums are exact, so equal schedules are equal bit for bit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One task on its streams, from `start_s` to `end_s` after the step begins.

    Attributes:
      critical: on the chain of tasks that makes the step as long as it is.
      exposed_s: of a collective, how much of it passes while the compute unit stands still.
    """

    task: PlannedTask
    start_s: float
    end_s: float
    critical: bool
    exposed_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What one device does during a step.

    Attributes:
      name: of the step; mesh: in words.
      events: in the plan's order; the streams of each are its task's.
      step_s: when all has ended.
      busy_s: by stream, how long it works; compute_s is `busy_s["compute"]`.
      comm_s: of all collectives; exposed_comm_s: of them, what passes while the compute unit stands still.
      memory: (time_s, bytes) steps: what is alive from then on; peak_bytes: the most of them.  Bytes are of the plan's
        order: work that runs ahead of its turn frees nothing that what is before it in that order still waits for.
    """

    name: str
    mesh: str
    events: tuple[Event, ...]
    step_s: float
    busy_s: Mapping[str, float]
    comm_s: float
    exposed_comm_s: float
    memory: tuple[tuple[float, int], ...]
    peak_bytes: int

    @property
    def streams(self) -> tuple[str, ...]:
        """ "compute", then the links by name."""
        return (COMPUTE, *sorted(set(self.busy_s) - {COMPUTE}))

    @property
    def critical_path(self) -> tuple[Event, ...]:
        """The events that the step's length comes from, first to last: each starts when the one before ends."""
        return tuple(event for event in self.events if event.critical)

    def __str__(self) -> str:
        from .timeline_text import timeline_text

        return timeline_text(self)

    def to_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline in the Chrome trace format, for ui.perfetto.dev or chrome://tracing."""
        from .trace import write_trace

        write_trace(self, path)

    def to_svg(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline as a picture."""
        from .picture import timeline_picture

        with open(path, "w", encoding="utf-8") as file:
            file.write(timeline_picture(self))


def simulate(plan: Plan) -> Timeline:
    """The timeline of one step of a plan; it needs neither the step nor a device.

    Raises:
      ArgumentError: the plan has no tasks: it was made by hand, or read from a file that has none.
    """
    if not plan.tasks:
        raise ArgumentError(
            f"the plan of `{plan.name}` has no tasks to simulate: plan the step again with this version and save it"
        )
    streams = {
        name: i
        for i, name in enumerate(dict.fromkeys([COMPUTE, *(s for t in plan.tasks for s in t.streams)]))
    }
    net = Net([task.after for task in plan.tasks], len(streams))
    loads = [
        Load(round(task.seconds_s * TICKS_PER_S), tuple(streams[name] for name in task.streams))
        for task in plan.tasks
    ]
    return _timeline(plan, Run(net, loads))


def _timeline(plan: Plan, run: Run) -> Timeline:
    working = sorted(
        (run.start[i], run.end[i]) for i, task in enumerate(plan.tasks) if task.kind == COMPUTE
    )
    critical = _critical(run)
    events, busy = [], {COMPUTE: 0}
    for index, task in enumerate(plan.tasks):
        start, end = run.start[index], run.end[index]
        for stream in task.works_on:
            busy[stream] = busy.get(stream, 0) + end - start
        exposed = 0 if task.kind == COMPUTE else end - start - _overlap(working, start, end)
        events.append(
            Event(
                task=task, start_s=start / TICKS_PER_S, end_s=end / TICKS_PER_S, critical=index in critical,
                exposed_s=exposed / TICKS_PER_S,
            )
        )  # fmt: skip
    sending = sum(
        run.end[i] - run.start[i] for i, task in enumerate(plan.tasks) if task.kind != COMPUTE
    )
    return Timeline(
        name=plan.name,
        mesh=", ".join(f"{name}={size}" for name, size in plan.axes),
        events=tuple(events),
        step_s=run.makespan / TICKS_PER_S,
        busy_s={stream: ticks / TICKS_PER_S for stream, ticks in busy.items()},
        comm_s=sending / TICKS_PER_S,
        exposed_comm_s=(run.makespan - busy[COMPUTE]) / TICKS_PER_S,
        memory=_memory(events),
        peak_bytes=max((event.task.bytes for event in events), default=0),
    )


def _memory(events: Sequence[Event]) -> tuple[tuple[float, int], ...]:
    """What is alive at each task of the compute unit, from when all before it in the plan's order have begun too."""
    steps, reached_s = list[tuple[float, int]](), 0.0
    for event in events:
        if event.task.kind == COMPUTE:
            reached_s = max(reached_s, event.start_s)
            steps.append((reached_s, event.task.bytes))
    return tuple(steps)


def _critical(run: Run) -> set[int]:
    """A chain of tasks, each starting when the one before it ends, from the start of the step to its end."""
    chain: set[int] = set()
    task = max(range(len(run.end)), key=lambda i: (run.end[i], run.end[i] - run.start[i]), default=-1)
    ended: dict[int, list[int]] = {}
    for other, load in enumerate(run.loads):
        if load.duration:
            ended.setdefault(run.end[other], []).append(other)
    while task >= 0:
        chain.add(task)
        begin = run.start[task]
        waited = [other for other in run.net.after[task] if run.end[other] == begin and other not in chain]
        streams = set(run.loads[task].streams)
        freed = [other for other in ended.get(begin, ()) if streams & set(run.loads[other].streams)]
        task = max((other for other in (*waited, *freed) if other not in chain), default=-1)
    return chain


def _overlap(working: list[tuple[int, int]], start: int, end: int) -> int:
    """How much of [start, end) lies in the sorted, disjoint intervals `working`."""
    total = 0
    for begin, finish in working[max(bisect_right(working, (start, 0)) - 1, 0) :]:
        if begin >= end:
            break
        total += max(min(finish, end) - max(begin, start), 0)
    return total
