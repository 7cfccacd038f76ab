"""Room in vector memory, and time for copies to it, that buffers have taken."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Places:
    """Pieces of addresses that buffers have taken, each for a time."""

    def __init__(self, room: int, count: int) -> None:
        self._room, self._count = room, 0
        self._taken = np.zeros((4, max(2 * count, 64)), np.int64)  # from when, until when, first byte, last byte + 1

    def take(self, start: int, stop: int, size: int) -> bool:
        """Takes the smallest free piece that is large enough; whether there is one."""
        since, until, begins, ends = self._taken[:, : self._count]
        (beside,) = ((since < stop) & (until > start)).nonzero()
        begins = begins[beside]
        order = begins.argsort(kind="stable")
        free = np.full(len(beside) + 1, self._room)  # before each of them, and after the last one
        free[:-1] = begins[order]
        after = np.zeros_like(free)
        np.maximum.accumulate(ends[beside[order]], out=after[1:])
        free -= after
        (fitting,) = (free >= size).nonzero()
        if not len(fitting):
            return False
        first = int(after[fitting[free[fitting].argmin()]])
        if self._count == self._taken.shape[1]:
            self._taken = np.concatenate((self._taken, np.zeros_like(self._taken)), axis=1)
        self._taken[:, self._count] = start, stop, first, first + size
        self._count += 1
        return True


class Copied(NamedTuple):
    """A copy that ends before the moment `until`, and of the moment `since` in which it begins leaves `left_s`."""

    since: int
    until: int
    left_s: float


class SpareTime:
    """What kernels leave for copies, by moment: a copy takes all that is left of the last ones before what reads it."""

    def __init__(self, seconds: np.ndarray) -> None:
        self._left_s = [0.0, *seconds.tolist()]  # of the moment before each place
        self._last = list[int]()  # the last place up to here of whose moment anything is left, or the first one
        for place, left_s in enumerate(self._left_s):
            self._last.append(place if left_s > 0 or not place else self._last[-1])

    def before(self, until: int, seconds: float, first: int) -> Copied | None:
        """A copy of so many seconds, in moments from `first` on; None where they are too few."""
        place, left_s = until + 1, seconds
        while left_s > 0:
            place = self._until(place - 1)
            if place <= first:
                return None
            left_s -= self._left_s[place]
        return Copied(place - 1, until, -left_s)

    def take(self, copied: Copied) -> None:
        """The time of a copy that `before` has found."""
        begin = copied.since + 1
        while (place := self._until(copied.until)) > begin:
            self._left_s[place], self._last[place] = 0.0, place - 1
        self._left_s[begin] = copied.left_s
        if not copied.left_s:
            self._last[begin] = begin - 1

    def _until(self, place: int) -> int:
        """The last place until this one of whose moment anything is left."""
        end = place
        while self._last[end] != end:
            end = self._last[end]
        while self._last[place] != end:  # so that it is found at once the next time
            self._last[place], place = end, self._last[place]
        return end
