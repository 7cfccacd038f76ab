"""A program whose operations may choose, on every device of a mesh: what a change of strategy does to a step.

Each device has a compute unit and the links of its mesh axes.  An operation runs on every device; what moves over mesh
axes runs at once on all devices of a group along them, when what all of them send is there and their links are free.
Where a compiler lets nothing be computed meanwhile (`Between.still`) it holds the compute units too.  A loop's work is
shown with all its runs at once.

`full` simulates every device by itself.  `delta` gives bit for bit the same times, and simulates less: devices that are
alike at every step (equally fast, in groups of alike devices: colour refinement) are one class and run once; what was
dispatched before anything changed stands; and where the same tasks run again as before the change, all of them equally
later, the rest is known.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError
from .items import CHECKPOINT, Ints, Items, Log
from .timeline import TICKS_PER_S

_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Between:
    """What two operations move: `seconds_s[i, j]` for strategy i of `tail` and j of `head`, over the mesh axes whose
    bits are set in `axes[i, j]`; a head that is not after its tail is not waited for.  Where `still[i, j]`, the compute
    units of all that take part stand still meanwhile; None: nowhere."""

    tail: int
    head: int
    seconds_s: NDArray[np.float64]
    axes: Ints
    still: NDArray[np.bool_] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Choices:
    """What may be chosen, and what it takes.

    Attributes:
      compute_s: of every operation, in program order, the seconds of each of its strategies.
      between: what moves between them; mesh: sizes of the mesh axes, devices numbered with the last axis fastest.
      links: of every axis the number of the link that it holds on a device; equal numbers queue for one.
    """

    compute_s: tuple[NDArray[np.float64], ...]
    between: tuple[Between, ...]
    mesh: tuple[int, ...]
    links: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a change would make of the step: its seconds, how many more than before, and the dispatches that were
    simulated for it."""

    step_s: float
    more_s: float
    simulated: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """`start` and `end` in ticks of 1e-12 s, `int64[operations, devices]` and `int64[between, devices]`.

    What two operations move takes its time on all devices of a group, and none where nothing has to move.
    """

    operation_start: Ints
    operation_end: Ints
    between_start: Ints
    between_end: Ints

    @property
    def step_s(self) -> float:
        """When all has ended."""
        return max(int(self.operation_end.max(initial=0)), int(self.between_end.max(initial=0))) / TICKS_PER_S


class StrategySimulator:
    """The step under one assignment, which `delta` and `commit` change."""

    def __init__(
        self, choices: Choices, assignment: Sequence[int], *, slowdown: Sequence[float] | None = None
    ) -> None:
        """Simulate an assignment.

        Args:
          assignment: a strategy of every operation.
          slowdown: of every device, how many times longer it computes; all 1 by default.
        """
        n_devices = math.prod(choices.mesh)
        slow = [1.0] * n_devices if slowdown is None else [float(factor) for factor in slowdown]
        if len(slow) != n_devices or min(slow) <= 0:
            raise ArgumentError(f"slowdown={slow} must be a positive number for each of the {n_devices} devices")
        self._choices = choices
        self._place()
        self._class = _classes(choices.mesh, slow)
        first = [self._class.index(c) for c in range(max(self._class) + 1)]
        self._class_slow = np.array([slow[device] for device in first])
        self._items = self._net(self._class, first)
        self._chosen = [int(strategy) for strategy in assignment]
        self._duration, self._axes = self._loads(self._chosen, self._class_slow)
        self._log = _empty_log(self._duration.size, self._class_slow.size * self._items.streams)
        self._ticks, _ = self._dispatch(-1, _NONE, logged=True)
        self._pending: tuple[dict[int, int], int, Ints, int] | None = None

    @property
    def step_s(self) -> float:
        """Seconds of the committed assignment's step."""
        return self._ticks / TICKS_PER_S

    @property
    def assignment(self) -> tuple[int, ...]:
        """What is committed."""
        return tuple(self._chosen)

    @property
    def classes(self) -> int:
        """How many kinds of devices there are to simulate."""
        return int(self._class_slow.size)

    def delta(self, operation: int, strategy: int) -> Change:
        """What another strategy of one operation would make of the step."""
        return self.change({operation: strategy})

    def change(self, strategies: Mapping[int, int]) -> Change:
        """What other strategies of some operations would make of the step; `commit` makes it so."""
        self.rollback()
        before = {n: self._chosen[n] for n in strategies}
        touched = dict.fromkeys(self._own[n] for n, s in strategies.items() if s != before[n])
        for n in strategies:
            touched.update(dict.fromkeys(self._beside[n]))
        for n, s in strategies.items():
            self._chosen[n] = int(s)
        changed = np.array([k for k in touched if self._reload(k)], dtype=np.int64)
        since, count = self._since(changed), self._log.order.size
        if not changed.size:
            ticks, simulated = self._ticks, 0
        else:
            ticks, simulated = self._dispatch(since, changed)
        self._pending = before, ticks, changed, min(since, count)
        return Change(
            step_s=ticks / TICKS_PER_S, more_s=(ticks - self._ticks) / TICKS_PER_S, simulated=simulated
        )

    def commit(self) -> None:
        """Keep the last change."""
        if self._pending is not None:
            _, self._ticks, changed, since = self._pending
            self._pending = None
            if changed.size:
                self._dispatch(since, changed, logged=True)

    def rollback(self) -> None:
        """Forget the last change, unless it was kept."""
        if self._pending is not None:
            before, _, changed, _ = self._pending
            self._pending = None
            for n, strategy in before.items():
                self._chosen[n] = strategy
            for k in changed:
                self._reload(int(k))

    def schedule(self) -> Schedule:
        """The committed step on every device, as the classes' runs tell it."""
        self.rollback()
        return self._of_classes(self._log.start, self._log.end)

    def _of_classes(self, start: Ints, end: Ints) -> Schedule:
        group = self._items.group
        where = np.arange(self.classes)
        own = np.where((self._items.tail < 0)[:, None], where, group[self._axes])
        index = np.arange(own.shape[0])[:, None] * self.classes + own
        columns = np.array(self._class)
        return self._as_schedule(start[index][:, columns], end[index][:, columns])

    def full(self, *, every_device: bool = True) -> Schedule:
        """The step of the present assignment, a pending change included, from its first task to its last: with every
        device simulated by itself, or one of each class."""
        if not every_device:
            start, end = self._scratch()
            _run(self._items, self._duration, self._axes, _NO_LOG, False, -1, _NONE, start, end)
            return self._of_classes(start, end)
        items, devices = self._every, len(self._class)
        duration = np.ascontiguousarray(self._duration[:, self._class])
        start, end = np.zeros(duration.size, np.int64), np.zeros(duration.size, np.int64)
        _run(items, duration, self._axes, _NO_LOG, False, -1, _NONE, start, end)
        own = np.where((items.tail < 0)[:, None], np.arange(devices), items.group[self._axes])
        index = np.arange(own.shape[0])[:, None] * devices + own
        return self._as_schedule(start[index], end[index])

    @cached_property
    def _every(self) -> Items:
        """The program with every device a class of its own."""
        devices = range(len(self._class))
        return self._net(devices, devices)

    # -- the program as items -----------------------------------------------------------------------------

    def _place(self) -> None:
        """Number operations and what moves in one program order: what an operation reads right before it."""
        choices = self._choices
        into: list[list[int]] = [[] for _ in choices.compute_s]
        onward: list[list[int]] = [[] for _ in choices.compute_s]
        for e, moved in enumerate(choices.between):
            (into[moved.head] if moved.tail < moved.head else onward[moved.tail]).append(e)
        self._own, self._moving = [0] * len(choices.compute_s), [0] * len(choices.between)
        self._what: list[tuple[bool, int]] = []
        for n, (reads, sends) in enumerate(zip(into, onward, strict=True)):
            for moves, e in [*((True, e) for e in reads), (False, n), *((True, e) for e in sends)]:
                (self._moving if moves else self._own)[e] = len(self._what)
                self._what.append((moves, e))
        self._beside: list[list[int]] = [[] for _ in choices.compute_s]
        for e, moved in enumerate(choices.between):
            self._beside[moved.tail].append(self._moving[e])
            self._beside[moved.head].append(self._moving[e])

    def _net(self, classes: Sequence[int], first: Sequence[int]) -> Items:
        """Who waits for whom where devices are of `classes`, `first` the first device of each."""
        choices, count = self._choices, len(self._what)
        tail, head = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
        waits, out = np.zeros(count, np.int64), [list[int]() for _ in range(count)]
        for e, moved in enumerate(choices.between):
            k, before, after = self._moving[e], self._own[moved.tail], self._own[moved.head]
            tail[k] = before
            out[before].append(k)
            if before < after:
                head[k] = after
                waits[after] += 1
        # each set of axes twice: the second time, beside a compute unit that stands still
        sets = 2 << len(choices.mesh)
        shape = sets, len(first)
        group, start, size = (np.zeros(shape, np.int64) for _ in range(3))
        member: list[int] = []
        for axes in range(sets):
            for c, device in enumerate(first):
                inside = sorted({classes[other] for other in _group(choices.mesh, axes, device)})
                group[axes, c] = inside[0]
                if inside[0] == c:
                    start[axes, c], size[axes, c] = len(member), len(inside)
                    member += inside
        held = [
            sorted({1 + choices.links[a] for a in range(len(choices.mesh)) if axes >> a & 1})
            for axes in range(sets // 2)
        ]
        held += [[0, *streams] for streams in held]
        link = np.full((sets, max(map(len, held))), -1, np.int64)
        for axes, streams in enumerate(held):
            link[axes, : len(streams)] = streams
        return Items(
            tail=tail, head=head, waits=waits, out_start=np.cumsum([0, *map(len, out)]).astype(np.int64),
            out=np.array(list(itertools.chain(*out)), np.int64), group=group, member_start=start,
            member_count=size, member=np.array(member, np.int64),
            link_count=np.array([len(streams) for streams in held], np.int64), link=link,
            streams=2 + max(choices.links, default=-1),
        )  # fmt: skip

    def _load(self, k: int, chosen: Sequence[int]) -> tuple[float, int]:
        """Seconds and axes of an item."""
        moves, number = self._what[k]
        if not moves:
            return float(self._choices.compute_s[number][chosen[number]]), 0
        moved = self._choices.between[number]
        pair = chosen[moved.tail], chosen[moved.head]
        seconds_s = float(moved.seconds_s[pair])
        # what takes no time joins no group
        axes = int(moved.axes[pair]) if seconds_s > 0 else 0
        still = axes > 0 and moved.still is not None and bool(moved.still[pair])
        return seconds_s, axes | still << len(self._choices.mesh)

    def _ticked(self, k: int, seconds_s: float, slow: NDArray[np.float64]) -> Ints:
        if self._what[k][0]:
            return np.full(slow.size, round(seconds_s * TICKS_PER_S), np.int64)
        return np.rint(seconds_s * TICKS_PER_S * slow).astype(np.int64)

    def _loads(self, chosen: Sequence[int], slow: NDArray[np.float64]) -> tuple[Ints, Ints]:
        duration = np.zeros((len(self._what), slow.size), np.int64)
        axes = np.zeros(len(self._what), np.int64)
        for k in range(len(self._what)):
            seconds_s, axes[k] = self._load(k, chosen)
            duration[k] = self._ticked(k, seconds_s, slow)
        return duration, axes

    def _reload(self, k: int) -> bool:
        """Give an item the load of the present choice; whether it is another."""
        seconds_s, axes = self._load(k, self._chosen)
        ticks = self._ticked(k, seconds_s, self._class_slow)
        if axes == self._axes[k] and (ticks == self._duration[k]).all():
            return False
        self._duration[k], self._axes[k] = ticks, axes
        return True

    def _since(self, changed: Ints) -> int:
        """After how many dispatches the first changed item can make a difference."""
        found = [self._log.order.size]
        for k in changed:
            moves, e = self._what[int(k)]
            first = (self._own[self._choices.between[e].tail] if moves else int(k)) * self.classes
            at = self._log.position if moves else self._log.ready
            found.append(int(at[first : first + self.classes].min()))
        return min(found)

    def _dispatch(self, since: int, changed: Ints, *, logged: bool = False) -> tuple[int, int]:
        """When all has ended, and how many dispatches were simulated."""
        start, end = (_NONE, _NONE) if logged else self._scratch()
        return _run(self._items, self._duration, self._axes, self._log, logged, since, changed, start, end)[:2]

    def _scratch(self) -> tuple[Ints, Ints]:
        size = self._duration.size
        return np.empty(size, np.int64), np.empty(size, np.int64)

    def _as_schedule(self, start: Ints, end: Ints) -> Schedule:
        return Schedule(
            operation_start=start[self._own], operation_end=end[self._own], between_start=start[self._moving],
            between_end=end[self._moving],
        )  # fmt: skip


def _group(mesh: Sequence[int], axes: int, device: int) -> list[int]:
    """The devices that differ from `device` along some of the `axes` only; bits beyond the mesh say nothing."""
    place = np.unravel_index(device, mesh)
    ranges = [range(size) if axes >> a & 1 else (int(place[a]),) for a, size in enumerate(mesh)]
    return [int(np.ravel_multi_index(other, mesh)) for other in itertools.product(*ranges)]


def _classes(mesh: Sequence[int], slow: Sequence[float]) -> list[int]:
    """A class for every device, numbered by their first devices: equal ones are alike at every step."""
    devices = range(math.prod(mesh))
    groups = [[_group(mesh, axes, d) for d in devices] for axes in range(1, 1 << len(mesh))]
    keys: list[object] = list(slow)
    count = 0
    while True:
        number: dict[object, int] = {}
        colour = [number.setdefault(key, len(number)) for key in keys]
        if len(number) == count:
            return colour
        count = len(number)
        keys = [
            (colour[d], tuple(tuple(sorted(colour[other] for other in along[d])) for along in groups)) for d in devices
        ]


def _empty_log(tasks: int, streams: int) -> Log:
    def column() -> Ints:
        return np.zeros(tasks, np.int64)

    states = tasks // CHECKPOINT + 1
    return Log(
        order=column(), position=column(), ready=column(), start=column(), end=column(),
        free=np.zeros((tasks + 1, streams), np.int64), last=np.full((tasks + 1, streams), -1, np.int64),
        left=np.zeros((states, tasks), np.int64), ready_at=np.zeros((states, tasks), np.int64),
    )  # fmt: skip


def _run(*arguments: Any) -> tuple[int, int, int, int]:
    """`schedule.run`: compiled code, and what compiles it, are loaded by those who need them."""
    from .schedule import run

    found: tuple[int, int, int, int] = run(*arguments)
    return found


_NO_LOG = _empty_log(0, 0)
