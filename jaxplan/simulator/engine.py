"""List scheduling of tasks on streams: full runs, and what a change of a few tasks makes of one.

At each dispatch, of all tasks whose predecessors are dispatched the one that can start first is taken; of several the
first in program order.  A task starts when its predecessors have ended and all its streams are free.  So the compute
unit works through the program in order, and while what comes next waits for communication it takes later work that is
ready, as XLA's latency hiding scheduler arranges it.  Starts never decrease from one dispatch to the next, because
what is not yet known to be ready can't start before what is being dispatched.

A delta run (`respond`) gives bit for bit what a full run of the changed tasks gives.  It skips two parts of it:

- up to the first dispatch at which a changed task is ready, nothing differs;
- once the same tasks are dispatched as in the base run, and whatever is still running ends at the same times but for
  one common shift, everything up to the next changed task is the base run, shifted.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Streams = tuple[int, ...]

_CHECKPOINT = 32
"""Dispatches between two stored lists of ready tasks."""


@dataclass(frozen=True)
class Load:
    """What a task takes: its ticks, and the numbers of the streams that it holds meanwhile (none for no time)."""

    duration: int
    streams: Streams


class Net:
    """Who waits for whom; fixed, while the loads change."""

    def __init__(self, after: Sequence[Sequence[int]], n_streams: int) -> None:
        self.after = [tuple(dict.fromkeys(waits)) for waits in after]
        self.n_streams = n_streams
        self.before: list[list[int]] = [[] for _ in self.after]
        for task, waits in enumerate(self.after):
            for other in waits:
                self.before[other].append(task)


class Run:
    """A schedule: start and end of every task, and the state after every dispatch.

    Attributes:
      start, end: ticks; order: tasks as dispatched, position: its inverse.
      free: for every number of dispatches, when each stream is free; last: which task holds it until then (-1: none).
      makespan: when all has ended.
    """

    def __init__(self, net: Net, loads: Sequence[Load]) -> None:
        self.net, self.loads = net, loads
        count = len(net.after)
        self.start, self.end = [0] * count, [0] * count
        self.order: list[int] = []
        self.position = [0] * count
        self.free: list[Streams] = [(0,) * net.n_streams]
        self.last: list[Streams] = [(-1,) * net.n_streams]
        self._waiting: list[tuple[int, ...]] = []
        self._simulate()
        self.makespan = max(self.end, default=0)

    def _simulate(self) -> None:
        net, loads, start, end = self.net, self.loads, self.start, self.end
        left = [len(waits) for waits in net.after]
        free, last = [0] * net.n_streams, [-1] * net.n_streams
        ready = _Ready()
        for task, waits in enumerate(left):
            if not waits:
                ready.push(0, task, loads[task].streams)
        while True:
            if len(self.order) % _CHECKPOINT == 0:
                self._waiting.append(tuple(sorted(ready.tasks())))
            popped = ready.pop(free)
            if popped is None:
                return
            task, begin = popped
            load = loads[task]
            finish = begin + load.duration
            start[task], end[task] = begin, finish
            for stream in load.streams:
                free[stream], last[stream] = finish, task
            self.position[task] = len(self.order)
            self.order.append(task)
            self.free.append(tuple(free))
            self.last.append(tuple(last))
            for successor in net.before[task]:
                left[successor] -= 1
                if not left[successor]:
                    at = max(end[other] for other in net.after[successor])
                    ready.push(at, successor, loads[successor].streams)

    def now(self, count: int) -> int:
        """The start of the last of `count` dispatches: nothing later starts before it."""
        return self.start[self.order[count - 1]] if count else 0

    def available(self, task: int) -> int:
        """After how many dispatches `task` is ready."""
        return 1 + max((self.position[other] for other in self.net.after[task]), default=-1)

    def waiting(self, count: int) -> list[int]:
        """The tasks that are ready, and not yet dispatched, after `count` dispatches."""
        checkpoint = min(count // _CHECKPOINT, len(self._waiting) - 1)
        found = set(self._waiting[checkpoint])
        for task in self.order[checkpoint * _CHECKPOINT : count]:
            found.discard(task)
            found.update(s for s in self.net.before[task] if self.available(s) <= count)
        return sorted(task for task in found if self.position[task] >= count)


class _Ready:
    """Tasks whose predecessors are dispatched: by the streams that they hold those that only wait for these, in program
    order, and those that are ready later."""

    def __init__(self) -> None:
        self._by_streams: dict[Streams, tuple[list[int], list[tuple[int, int]]]] = {}

    def push(self, ready: int, task: int, streams: Streams) -> None:
        """A task that can't start before `ready`."""
        heapq.heappush(self._by_streams.setdefault(streams, ([], []))[1], (ready, task))

    def pop(self, free: Sequence[int]) -> tuple[int, int] | None:
        """The task that can start first, of several the first in program order, and its start; None: there is none."""
        first: tuple[int, int] | None = None
        group: tuple[list[int], list[tuple[int, int]]] = [], []
        for streams, (startable, later) in self._by_streams.items():
            freed = -1
            for stream in streams:
                freed = max(freed, free[stream])
            while later and later[0][0] <= freed:
                heapq.heappush(startable, heapq.heappop(later)[1])
            if startable or later:
                found = (freed, startable[0]) if startable else later[0]
                if first is None or found < first:
                    first, group = found, (startable, later)
        if first is None:
            return None
        startable, later = group
        if startable:
            heapq.heappop(startable)
        else:
            heapq.heappop(later)
        begin, task = first
        return task, begin

    def tasks(self) -> list[int]:
        """All of them."""
        return [
            task
            for startable, later in self._by_streams.values()
            for task in (*startable, *(task for _, task in later))
        ]  # fmt: skip


@dataclass(frozen=True)
class Response:
    """What a change of loads makes of a run.

    Attributes:
      makespan: of the changed tasks.
      simulated: dispatches that had to be simulated; all others are the base run's, shifted.
      shifts: (first position, shift): from that position of the base run on, its dispatches are kept, `shift` ticks
        later, until the next entry; None: simulated anew, see `times`.
      times: (start, end) of every task that was simulated anew.
    """

    makespan: int
    simulated: int
    shifts: tuple[tuple[int, int | None], ...]
    times: Mapping[int, tuple[int, int]]


def respond(run: Run, changed: Mapping[int, Load]) -> Response:
    """The run with other loads for the tasks of `changed`, simulated only where it differs."""
    return _Responder(run, changed).respond()


class _Responder:
    def __init__(self, run: Run, changed: Mapping[int, Load]) -> None:
        self.run, self.net = run, run.net
        self.changed = {task: load for task, load in changed.items() if load != run.loads[task]}
        self.pending = sorted((run.available(task), task) for task in self.changed)
        self.times: dict[int, tuple[int, int]] = {}
        self.shifts: list[tuple[int, int | None]] = [(0, 0)]

    def respond(self) -> Response:
        run, shift = self.run, 0
        while self.pending:
            found, makespan = self._window(self.pending[0][0], shift)
            if found is None:
                return self._response(makespan)
            shift = found
        return self._response(run.makespan + shift)

    def _response(self, makespan: int) -> Response:
        return Response(makespan, len(self.times), tuple(self.shifts), self.times)

    def _end(self, task: int) -> int:
        found = self.times.get(task)
        if found is not None:
            return found[1]
        shift = self.shifts[
            bisect_right(self.shifts, self.run.position[task], key=lambda entry: entry[0]) - 1
        ][1]
        assert shift is not None
        return self.run.end[task] + shift

    def _load(self, task: int) -> Load:
        return self.changed.get(task) or self.run.loads[task]

    def _window(self, at: int, shift: int) -> tuple[int | None, int]:
        """Simulate from dispatch `at` of the base run, all of it `shift` ticks later, until the two agree again.

        Returns the shift from there on; or None, and when all has ended, where they never did.
        """
        run, net = self.run, self.net
        now = run.now(at) + shift
        free = [max(time + shift, now) for time in run.free[at]]  # nothing later starts before `now`
        last = list(run.last[at])
        ready, left = _Ready(), dict[int, int]()
        for task in run.waiting(at):
            since = max((self._end(other) for other in net.after[task]), default=0)
            ready.push(since, task, self._load(task).streams)
        self._mark(at, None)
        count, odd = at, set[int]()
        while (popped := ready.pop(free)) is not None:
            task, begin = popped
            load = self._load(task)
            self.times[task] = (begin, begin + load.duration)
            now = begin
            for stream in load.streams:
                free[stream], last[stream] = begin + load.duration, task
            odd ^= {task}
            odd ^= {run.order[count]}
            count += 1
            for successor in net.before[task]:
                if successor not in left:
                    left[successor] = sum(1 for other in net.after[successor] if run.position[other] >= at)
                left[successor] -= 1
                if not left[successor]:
                    since = max(self._end(other) for other in net.after[successor])
                    ready.push(since, successor, self._load(successor).streams)
            if not odd and self._agree(count, now, free, last):
                later = [
                    (ready_at, other) for ready_at, other in self.pending if run.position[other] >= count
                ]
                # one that is ready by now competes with other loads than in the base run
                if all(ready_at >= count for ready_at, _ in later):
                    self.pending = later
                    shift = now - run.now(count)
                    self._mark(count, shift)
                    return shift, 0
        return None, max([now, *free])

    def _mark(self, position: int, shift: int | None) -> None:
        if self.shifts[-1][0] == position:
            self.shifts.pop()
        self.shifts.append((position, shift))

    def _agree(self, count: int, now: int, free: Sequence[int], last: Sequence[int]) -> bool:
        """Whether what still runs after `count` dispatches is the base run's, all of it shifted alike."""
        base_now = self.run.now(count)
        shift = now - base_now
        for stream, (time, base) in enumerate(zip(free, self.run.free[count], strict=True)):
            if time <= now and base <= base_now:
                continue
            if time != base + shift or last[stream] != self.run.last[count][stream]:
                return False
        return True
