"""Compiled collectives are recognised as the planned ones in whatever form compilers bring them, and only then."""

from __future__ import annotations

from typing import Any

import pytest

from jaxplan.inspection.matching import compiled_parts, match, planned_parts
from jaxplan.lowering import CompiledCollective
from jaxplan.plans import PlannedCollective

AXES = (("data", 4), ("model", 2), ("one", 1))
LINE = "model.py:12 (forward)"


def plan_of(kind: str, size: int, trips: float = 1.0, axes: tuple[str, ...] = ("data",), line: str = LINE) -> Any:
    return PlannedCollective(
        kind=kind, axes=axes, bytes=size, wire_bytes=0, trips=trips, seconds_s=0.0, where=line, primitive="dot_general"
    )  # fmt: skip


def made_of(
    kind: str, *parts: int, trips: float = 1.0, axes: tuple[str, ...] = ("data",), line: str = LINE
) -> Any:
    return CompiledCollective(
        kind=kind, axes=axes, bytes=sum(parts), parts=parts, trips=trips, name="collective", op_name="", sources=(line,)
    )


def left(planned: list[Any], compiled: list[Any]) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """What of each side is not on the other: (kind, bytes)."""
    sides = planned_parts(planned, AXES), compiled_parts(compiled)
    match(*sides, AXES)
    planned_left, compiled_left = ([(p.kind, p.bytes) for p in side if p.left > 0] for side in sides)
    return planned_left, compiled_left


SAME = {
    "as it is": ([plan_of("all_gather", 1000)], [made_of("all_gather", 1000)]),
    "padded": ([plan_of("all_gather", 1000)], [made_of("all_gather", 1016)]),
    "over an axis of one device": (
        [plan_of("all_gather", 1000, axes=("data", "one"))], [made_of("all_gather", 1000)]
    ),
    "combined": (
        [plan_of("all_reduce", 1000), plan_of("all_reduce", 300, line="model.py:20 (loss)")],
        [made_of("all_reduce", 300, 1000, line="other.py:1 (f)")],
    ),
    "moved out of its loop": ([plan_of("all_gather", 1000, trips=8)], [made_of("all_gather", 1000)]),
    "unrolled by two": (
        [plan_of("all_gather", 1000, trips=8)], [made_of("all_gather", 1000, 1000, trips=4)]
    ),
    "an all_reduce in two halves": (
        [plan_of("all_reduce", 1000)], [made_of("reduce_scatter", 1000), made_of("all_gather", 1000)]
    ),
    "a reduce_scatter as an all_reduce and a slice": (
        [plan_of("reduce_scatter", 1000)], [made_of("all_reduce", 1000)]
    ),
    "in half the width": ([plan_of("all_gather", 1000)], [made_of("all_gather", 500)]),
    "around a ring": (
        [plan_of("all_gather", 1000, trips=6)], [made_of("collective_permute", 250, trips=18)]
    ),
    "around a ring both ways": (
        [plan_of("reduce_scatter", 1000)],
        [made_of("collective_permute", 125, trips=3), made_of("collective_permute", 125, trips=3)],
    ),
    "two of a size around rings on one line": (
        [plan_of("reduce_scatter", 1000), plan_of("reduce_scatter", 1000), plan_of("all_gather", 200)],
        [made_of("collective_permute", 250, trips=4), made_of("collective_permute", 250, trips=4),
         made_of("collective_permute", 50, trips=3)],
    ),
    "two tensors gathered as one": (
        [plan_of("all_gather", 600), plan_of("all_gather", 400)], [made_of("all_gather", 1000)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", SAME)
def test_a_planned_collective_is_known_in_every_form(form: str) -> None:
    assert left(*SAME[form])[1] == []


OTHER = {
    "another kind": ([plan_of("all_gather", 1000)], [made_of("all_to_all", 1000)]),
    "another axis": ([plan_of("all_gather", 1000)], [made_of("all_gather", 1000, axes=("model",))]),
    "more bytes elsewhere": (
        [plan_of("all_gather", 1000)], [made_of("all_gather", 1500, line="model.py:99 (other)")]
    ),
    "twice as often": ([plan_of("all_gather", 1000, trips=4)], [made_of("all_gather", 1000, trips=8)]),
    "a second time": ([plan_of("all_gather", 1000)], [made_of("all_gather", 1000), made_of("all_gather", 1000)]),
    "far more permutes than a ring": (
        [plan_of("all_gather", 1000)], [made_of("collective_permute", 1000, trips=4)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", OTHER)
def test_what_was_not_planned_is_left_over(form: str) -> None:
    assert len(left(*OTHER[form])[1]) == 1


def test_what_was_planned_and_is_not_there_is_left_on_the_other_side() -> None:
    assert left([plan_of("all_gather", 1000), plan_of("all_reduce", 8)], [made_of("all_reduce", 8)]) == (
        [("all_gather", 1000)],
        [],
    )


def test_rings_on_one_line_are_told_apart_by_their_pieces() -> None:
    planned = [plan_of("reduce_scatter", 1000, trips=2), plan_of("reduce_scatter", 400), plan_of("all_gather", 600)]
    rings = [made_of("collective_permute", 250, trips=6), made_of("collective_permute", 100, trips=3)]
    assert left(planned, rings) == ([("all_gather", 600)], [])


def test_what_sends_more_than_was_planned_in_its_place_is_known_to() -> None:
    def instead(planned: list[Any], compiled: list[Any]) -> list[tuple[str, float, float]]:
        sides = planned_parts(planned, AXES), compiled_parts(compiled)
        match(*sides, AXES)
        return [one for part in sides[1] for one in part.instead]

    whole = [plan_of("reduce_scatter", 1000, trips=2)], [made_of("all_reduce", 1000, trips=2)]
    assert instead(*whole) == [("reduce_scatter", 1.0, 2.0)]
    joined = [plan_of("reduce_scatter", 400), plan_of("all_reduce", 600)], [made_of("all_reduce", 1000)]
    assert instead(*joined) == [("reduce_scatter", 1.0, 0.4)]
    wide = [plan_of("all_gather", 500)], [made_of("all_gather", 1000)]
    assert instead(*wide) == [("all_gather", 0.5, 1.0)]
    for planned, compiled in SAME.values():
        if planned[0].kind != "reduce_scatter" or compiled[0].kind != "all_reduce":
            assert instead(planned, compiled) == []
