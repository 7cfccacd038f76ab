"""Collectives that a compiler makes one of: those of a kind that nothing orders, up to so many bytes.

XLA's combiners (xla/service/collective_combiner_utils.h) go through the collectives that are alike in the order in
which the results lead to them (see `ir.post_order`) and put into one what fits, until the next would be too large; what
waits for one of them can't join it.  Who reads one then waits for all, and one starts when the last of them can:
gradients that are combined are sent when the last is there.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..plans import PlannedTask


@dataclass(frozen=True)
class Alike:
    """What a task is combined by: with those of an equal `key`, while their results are `most_bytes` at most in all.

    Attributes:
      place: which of those that are alike comes first.
      bytes: of its result; sent_bytes: of its larger local buffer, by which it is priced.
    """

    key: Hashable
    place: float
    bytes: int
    sent_bytes: int
    most_bytes: int


def combined(
    tasks: Sequence[PlannedTask], alike: Sequence[Alike | None], price: Callable[[int, int], float]
) -> tuple[list[PlannedTask], list[int]]:
    """The tasks with those that are combined as one, in an order in which each comes after what it waits for, and the
    (last) task that each was.

    Args:
      alike: for every task, None: it is not combined with others.
      price: (task, sent bytes in all) -> seconds of all runs of what is combined with that task.
    """
    groups = _groups(tasks, alike)
    into = {task: group[-1] for group in groups for task in group}
    order = _order(tasks, into)
    members = {group[-1]: group for group in groups}
    position = {task: i for i, task in enumerate(order)}
    made = []
    for task in order:
        group = members.get(task, (task,))
        parts, sent = [tasks[one] for one in group], [one.sent_bytes for one in map(alike.__getitem__, group) if one]
        after = {position[into.get(other, other)] for part in parts for other in part.after}
        made.append(
            replace(
                tasks[task], where=parts[0].where, seconds_s=price(task, sum(sent)) if sent else tasks[task].seconds_s,
                after=tuple(sorted(after)),
            )
        )  # fmt: skip
    return made, order


def _groups(tasks: Sequence[PlannedTask], alike: Sequence[Alike | None]) -> list[tuple[int, ...]]:
    """The tasks that are combined, each group as its tasks stand."""
    by_key: dict[Hashable, list[tuple[float, int]]] = defaultdict(list)
    number: dict[int, int] = {}
    for task, one in enumerate(alike):
        if one is not None:
            number[task] = len(number)
            by_key[one.key].append((one.place, task))
    behind: list[int] = []  # of every task, as bits, which of these it waits for
    for each in tasks:
        found = 0
        for other in each.after:
            found |= behind[other] | (1 << number[other] if other in number else 0)
        behind.append(found)
    waits = [behind[task] for task in number]
    groups = []
    for members in by_key.values():
        left = [task for _, task in sorted(members)]
        while len(left) > 1:
            taken, left = _first(left, alike, number, waits)
            if len(taken) > 1:
                groups.append(tuple(sorted(taken)))
                _join([number[task] for task in taken], waits)
    return groups


def _first(
    left: Sequence[int], alike: Sequence[Alike | None], number: dict[int, int], waits: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The first that are combined of some that are alike, and those that are left then."""
    taken, rest, bits, behind, size = list[int](), list[int](), 0, 0, 0
    for at, task in enumerate(left):
        one = alike[task]
        assert one is not None
        if taken and size + one.bytes > one.most_bytes:
            return taken, [*rest, *left[at:]]
        own = 1 << number[task]
        if waits[number[task]] & bits or behind & own:
            rest.append(task)
            continue
        taken.append(task)
        bits, behind, size = bits | own, behind | waits[number[task]], size + one.bytes
    return taken, rest


def _join(members: Sequence[int], waits: list[int]) -> None:
    """Who waits for one of the members waits for all of them, and for all that they wait for."""
    bits = sum(1 << one for one in members)
    together = bits
    for one in members:
        together |= waits[one]
    for one, behind in enumerate(waits):
        if behind & bits:
            waits[one] |= together
    for one in members:
        waits[one] = together & ~bits


def _order(tasks: Sequence[PlannedTask], into: Mapping[int, int]) -> list[int]:
    """The tasks in program order, each after what it waits for; what goes `into` another stands there as that one."""
    readers: dict[int, list[int]] = defaultdict(list)
    waits: dict[int, set[int]] = defaultdict(set)
    for task, one in enumerate(tasks):
        waits[into.get(task, task)] |= {into.get(other, other) for other in one.after}
    left = {task: len(others) for task, others in waits.items()}
    for task, others in waits.items():
        for other in others:
            readers[other].append(task)
    ready = [task for task, count in left.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        order.append(heapq.heappop(ready))
        for reader in readers[order[-1]]:
            left[reader] -= 1
            if not left[reader]:
                heapq.heappush(ready, reader)
    return order
