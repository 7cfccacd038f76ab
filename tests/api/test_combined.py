"""Collectives that are compiled as one: what fits, what nothing orders, and an order that holds."""

from __future__ import annotations

import random

import pytest

from jaxplan.api.combined import Alike, combined
from jaxplan.plans import COMPUTE, PlannedTask

MOST = 100


def computed(*after: int) -> PlannedTask:
    return PlannedTask(
        name="dot_general", kind=COMPUTE, streams=(COMPUTE,), seconds_s=1.0, trips=1.0, after=after, where="", bytes=0
    )  # fmt: skip


def sent(*after: int) -> PlannedTask:
    return PlannedTask(
        name="all_reduce data", kind="all_reduce", streams=("link",), seconds_s=1.0, trips=1.0, after=after, where="",
        bytes=0,
    )  # fmt: skip


def alike(size: int, key: str = "one", place: float = 0.0) -> Alike:
    return Alike(key, place, size, size, MOST)


def price(_: int, sent_bytes: int) -> float:
    return 10.0 + sent_bytes


def test_two_gradients_are_sent_when_the_last_is_there_and_started_once() -> None:
    tasks = [computed(), sent(0), computed(0), sent(2), computed(1), computed(3)]
    made, _ = combined(tasks, [None, alike(40), None, alike(50), None, None], price)
    assert [task.kind for task in made] == [COMPUTE, COMPUTE, "all_reduce", COMPUTE, COMPUTE]
    assert [task.after for task in made] == [(), (0,), (0, 1), (2,), (2,)]
    assert made[2].seconds_s == 10.0 + 40 + 50


def test_what_is_too_large_in_all_or_waits_for_another_or_is_not_alike_stays_apart() -> None:
    tasks = [computed(), sent(0), sent(0)]
    assert len(combined(tasks, [None, alike(60), alike(50)], price)[0]) == 3
    assert len(combined(tasks, [None, alike(50, "a"), alike(50, "b")], price)[0]) == 3
    in_a_row = [computed(), sent(0), computed(1), sent(2)]
    assert len(combined(in_a_row, [None, alike(1), None, alike(1)], price)[0]) == 4


def test_what_comes_first_is_combined_first() -> None:
    """In the order in which results lead to them, see `ir.post_order`: the first and the last of these fit in one."""
    tasks = [computed(), sent(0), sent(0), sent(0)]
    sizes = [None, alike(40, place=0.0), alike(70, place=2.0), alike(50, place=1.0)]
    made, order = combined(tasks, sizes, price)
    assert [task.seconds_s for task in made if task.kind != COMPUTE] == [10.0 + 70, 10.0 + 40 + 50]
    assert order == [0, 2, 3]


def test_groups_that_would_wait_for_each_other_are_not_both_made() -> None:
    # a waits for c and d for b: after a and b are one, c and d can't be
    tasks = [sent(), sent(), sent(1), sent(0)]
    kinds = [alike(1, "a"), alike(1, "c"), alike(1, "a"), alike(1, "c")]
    made, _ = combined(tasks, kinds, price)
    assert len(made) == 3
    assert all(other < position for position, task in enumerate(made) for other in task.after)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_combined_every_task_comes_after_what_it_waits_for(seed: int) -> None:
    rng = random.Random(seed)
    tasks: list[PlannedTask] = []
    kinds: list[Alike | None] = []
    for position in range(60):
        after = tuple(sorted({rng.randrange(position) for _ in range(rng.randrange(3))})) if position else ()
        communicates = rng.random() < 0.5
        tasks.append(sent(*after) if communicates else computed(*after))
        kinds.append(alike(rng.randrange(1, 60), rng.choice("ab")) if communicates else None)
    made, _ = combined(tasks, kinds, price)
    assert all(other < position for position, task in enumerate(made) for other in task.after)
    assert sum(task.kind == COMPUTE for task in made) == sum(task.kind == COMPUTE for task in tasks)
    paid = sum(task.seconds_s - 10 for task in made if task.kind != COMPUTE)
    assert paid == pytest.approx(sum(one.bytes for one in kinds if one))
    assert len(made) < len(tasks)
