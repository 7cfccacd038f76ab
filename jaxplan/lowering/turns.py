"""What a passage from one layout to another wants of the order in which axes cut a dimension."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np


class Turn(NamedTuple):
    """Pieces of a value that change places on its way, as a dimension's axes stand in another order than that wants.

    Attributes:
      use: where it is taken, ("read", operation, operand) or ("output", position, 0).
      made, taken: rows of place arrays, as bytes: from which layout to which.
      late: whether it is on the piece as it is taken that they do, not as it is made.
      axes: those of the dimension.
    """

    value: int
    use: tuple[str, int, int]
    made: bytes
    taken: bytes
    late: bool
    axes: tuple[int, ...]


def only(order: tuple[int, ...], axes: frozenset[int]) -> tuple[int, ...]:
    return tuple(axis for axis in order if axis in axes)


def to_turn(order: tuple[int, ...], first: frozenset[int]) -> tuple[int, ...]:
    """Of an order those that change places until `first` are the major ones."""
    inside = [axis in first for axis in order]
    return tuple(sorted(order[inside.index(False) : len(order) - inside[::-1].index(True)]))


def cut_by(row: np.ndarray, dim: int) -> tuple[int, ...]:
    """The axes that cut a dimension, in mesh order."""
    return tuple(axis for axis, place in enumerate(row.tolist()) if place == dim)


Majors = list[tuple[int, frozenset[int]]]

Wants = tuple[list[int], Majors, Majors, list[tuple[int, int, frozenset[int]]]]
"""Between two layouts: dimensions cut by the same axes; (dimension, axes that are to be its major ones) of the former
layout and of the latter; (dimension, another one or the same, several axes that keep their order from the former to the
latter)."""


def wants(made: np.ndarray, row: np.ndarray) -> Wants:
    before, after = (sorted({place for place in places.tolist() if place >= 0}) for places in (made, row))
    same = [d for d in before if cut_by(made, d) == cut_by(row, d)]
    return (
        same, _majors(made, row, before), _majors(row, made, after),
        [
            (a, b, moved)
            for a in before for b in after
            # of one dimension those that stay beside others that join or leave
            if (a != b or a not in same) and len(moved := frozenset(cut_by(made, a)) & frozenset(cut_by(row, b))) > 1
        ],
    )  # fmt: skip


def _majors(row: np.ndarray, other: np.ndarray, dims: Sequence[int]) -> Majors:
    """Which axes want to be a dimension's major ones on the way to another layout, or from it.

    Those that stay on it; and those that neither stay nor go to another dimension, before those that do: pieces are
    exchanged while they are smallest, before axes are gathered and after they are scattered, and from the minor end.
    """
    found: Majors = []
    placed = {axis for axis, place in enumerate(other.tolist()) if place >= 0}
    for d in dims:
        cut = frozenset(cut_by(row, d))
        stays = cut & frozenset(cut_by(other, d))
        majors = dict.fromkeys((stays, stays | (cut - placed)))
        found += [(d, axes) for axes in majors if axes and axes != cut]
    return found


def appended(names: Sequence[str], before: Sequence[str], dims: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The axes `names` of a dimension that had those `before`, when all had `dims`: what enters comes last."""
    left = [name for name in before if name in names]
    crossed = [name for dim in dims for name in dim if name in names and name not in left]
    return (*left, *crossed, *(name for name in names if name not in (*left, *crossed)))


def turned(
    dims: Sequence[Sequence[str]], then: Sequence[Sequence[Collection[str]]]
) -> tuple[tuple[str, ...], ...] | None:
    """`dims` in the order in which axes can leave, where some leave next that are not the most minor; else None.

    Args:
      dims: the axes of every dimension, the major one first; then: of every dimension those that are there after the
        next step, after the one after that, and so on.
    """

    def stays(name: str, d: int) -> int:
        return next((number for number, step in enumerate(then) if name not in step[d]), len(then))

    order, needed = [], False
    for d, names in enumerate(dims):
        left = {name: stays(name, d) for name in names}
        leave = [number == 0 for number in left.values()]
        needed |= leave != sorted(leave)
        order.append(tuple(sorted(names, key=left.__getitem__, reverse=True)))
    return tuple(order) if needed else None


Order = tuple[tuple[int, tuple[int, ...]], ...]
"""Of the dimensions that several axes cut, these in their order."""

Lying = tuple[bytes, Order]
"""A row of a place array and its order."""


def lying(row: np.ndarray, orders: Sequence[tuple[int, ...]]) -> Lying:
    """A layout of an operation that cuts its factors in these orders; of several factors at once, in the mesh's."""
    found = []
    for d in sorted({place for place in row.tolist() if place >= 0}):
        cut = cut_by(row, d)
        if len(cut) > 1:
            said = (only(order, frozenset(cut)) for order in orders)
            found.append((d, next((order for order in said if len(order) == len(cut)), cut)))
    return row.tobytes(), tuple(found)


def turning(made: Lying, taken: Lying) -> list[tuple[bool, tuple[int, ...]]]:
    """(whether late, over which axes): what turns between two layouts in these orders, see `lowering.Turn`."""
    before, after = dict(made[1]), dict(taken[1])
    same, first, last, along = wants(np.frombuffer(made[0], np.int8), np.frombuffer(taken[0], np.int8))
    early = {axis for d in same if d in before and before[d] != after[d] for axis in before[d]}
    late: set[int] = set()
    for orders, majors, turned in ((before, first, early), (after, last, late)):
        for d, axes in majors:
            if d in orders and set(orders[d][: len(axes)]) != axes:
                turned.update(to_turn(orders[d], axes))
    for left, entered, moved in along:
        if left in before and entered in after and only(before[left], moved) != only(after[entered], moved):
            early.update(before[left])
    return [(at_end, tuple(sorted(turned))) for at_end, turned in ((False, early), (True, late)) if turned]
