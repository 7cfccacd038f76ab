"""What the compiled scheduler reads and writes: a program as items on classes of devices, and the log of a run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

CHECKPOINT = 64
"""Dispatches between two stored states."""


class Items(NamedTuple):
    """Who waits for whom, and which classes communicate; fixed while strategies change.

    Attributes:
      tail, head: of what moves, the items that make and read it; -1 for operations; head -1: nobody waits for it.
      waits: how many items each operation waits for; out_start, out: what moves out of each operation.
      group: `int64[axis sets, classes]`, the first class of the group of each; members of it:
        `member[member_start[s, c] : member_start[s, c] + member_count[s, c]]`.
      link_count, link: of each set of axes, the streams of a device that it holds, the compute unit (0) first: sets
        come without it and then, with it, again.
      streams: of one class: its compute unit and its links.
    """

    tail: Ints
    head: Ints
    waits: Ints
    out_start: Ints
    out: Ints
    group: Ints
    member_start: Ints
    member_count: Ints
    member: Ints
    link_count: Ints
    link: Ints
    streams: int


class Log(NamedTuple):
    """A run, and enough of its states to go on from any of them.

    Attributes:
      order, position: tasks as dispatched, and the inverse; ready: after how many dispatches each was ready.
      start, end: ticks; free, last: after every number of dispatches, when each stream is free and who holds it.
      left, ready_at: at every checkpoint, how many predecessors each task waits for, and when the others ended.
    """

    order: Ints
    position: Ints
    ready: Ints
    start: Ints
    end: Ints
    free: Ints
    last: Ints
    left: Ints
    ready_at: Ints
