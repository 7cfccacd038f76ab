"""Tasks in XLA's order: what lasts as long as a collective runs beside it, and nothing that was said is forgotten."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from jaxplan.api.in_schedule import in_schedule
from jaxplan.plans import COMPUTE, PlannedTask


def task(name: str, *after: int, kind: str = COMPUTE, seconds_s: float = 1.0) -> PlannedTask:
    streams = {COMPUTE: (COMPUTE,), "barrier": ()}.get(kind, ("data",))
    return PlannedTask(
        name=name, kind=kind, streams=streams, seconds_s=seconds_s, trips=1.0, after=tuple(after), where=name, bytes=1
    )


def seconds_between(made: list[PlannedTask], kind: str = "all_gather") -> float:
    """Of computation between the start of the one collective and who waits for its end."""
    (sent,) = (i for i, one in enumerate(made) if one.kind == kind)
    reader = next(i for i, one in enumerate(made) if sent in one.after)
    return math.fsum(one.seconds_s for one in made[sent + 1 : reader])


def test_a_collective_starts_as_long_before_its_reader_as_xla_takes_it_to_last() -> None:
    """Where another one waits for it to start; else it starts as soon as it can."""
    chain = [task(f"c{i}", *([i - 1] if i else [])) for i in range(8)]
    tasks = [
        *chain, task("other", kind="all_reduce"), task("c8", 7, 8), task("gather", kind="all_gather", seconds_s=7.0),
        task("c9", 9, 10),
    ]  # fmt: skip
    for latency_s, beside in ((3.0, 3.0), (3.5, 4.0), (0.5, 1.0), (100.0, 9.0)):
        made = in_schedule(tasks, [1.0] * 10 + [latency_s, 1.0], [()] * 12)
        assert seconds_between(made) == beside
    alone = [*chain, task("gather", kind="all_gather"), task("c8", 7, 8)]
    assert seconds_between(in_schedule(alone, [1.0] * 10, [()] * 10)) == 8.0


def test_what_only_the_end_wants_runs_beside_what_the_others_wait_for() -> None:
    # two products of a backward pass, of which the first one's operand is exchanged, and the gradients of the weights
    tasks = [
        task("dx2"), task("dw2"), task("exchange", 0, kind="all_to_all", seconds_s=2.0), task("dx1", 2), task("dw1", 2),
    ]  # fmt: skip
    made = in_schedule(tasks, [1.0, 1.0, 1.0, 1.0, 1.0], [()] * 5)
    (sent,) = (i for i, one in enumerate(made) if one.kind == "all_to_all")
    beside = made[sent + 1]
    assert (beside.name, beside.after) == ("dw2", (sent - 1,))
    assert sent in made[sent + 2].after


def test_what_is_read_through_a_reshape_is_there_a_microsecond_later() -> None:
    """So that another kernel runs in between, however little led to it."""
    tasks = [
        task("gather", kind="all_gather"), task("first", 0), task("second", 1), task("third", 2),
        task("other"),
    ]  # fmt: skip
    at_once = in_schedule(tasks, [1e-5] * 5, [(), (), (), (), ()])
    through = in_schedule(tasks, [1e-5] * 5, [(), (), (), (2,), ()])
    # the other one beside the gather, behind which the three are one task; or between the last two of them
    assert sum(one.kind == COMPUTE for one in at_once) == 2
    assert sum(one.kind == COMPUTE for one in through) == 1


def test_tasks_of_a_loop_stay_in_it() -> None:
    tasks = [
        task("before"), task("scan", 0, kind="barrier", seconds_s=0.0), task("gather", 1, kind="all_gather"),
        task("inside", 1, 2), task("end", 1, 2, 3, kind="barrier", seconds_s=0.0), task("behind", 4),
    ]  # fmt: skip
    made = in_schedule(tasks, [1.0] * 6, [()] * 6)
    assert [one.name for one in made] == ["before", "scan", "gather", "inside", "end", "behind"]
    assert [one.after for one in made] == [(), (0,), (1,), (1, 2), (1, 2, 3), (4,)]


@st.composite
def programs(draw: st.DrawFn) -> list[PlannedTask]:
    kinds = draw(st.lists(st.sampled_from([COMPUTE, COMPUTE, COMPUTE, "all_gather", "barrier"]), max_size=24))
    made: list[PlannedTask] = []
    fence = -1
    for i, kind in enumerate(kinds):
        if kind == "barrier":
            made.append(task(f"t{i}", *range(max(fence, 0), i), kind=kind, seconds_s=0.0))
            fence = i
            continue
        after = draw(st.sets(st.integers(max(fence, 0), i - 1), max_size=3)) if i > max(fence, 0) else set()
        made.append(task(f"t{i}", *sorted(after | ({fence} if fence >= 0 else set())), kind=kind))
    return made


@given(programs(), st.lists(st.sampled_from([1e-7, 1e-6, 1e-5, 1e-4]), min_size=24, max_size=24))
def test_every_order_that_was_said_is_kept_and_so_are_all_seconds(tasks: list[PlannedTask], xla_s: list[float]) -> None:
    through = [one.after[:1] for one in tasks]
    made = in_schedule(tasks, xla_s[: len(tasks)], through)
    assert all(other < i for i, one in enumerate(made) for other in one.after)
    assert math.isclose(math.fsum(t.seconds_s for t in made), math.fsum(t.seconds_s for t in tasks))
    assert [t.name for t in made if t.kind == "barrier"] == [t.name for t in tasks if t.kind == "barrier"]
    behind: list[set[int]] = []
    for one in made:
        behind.append({*one.after}.union(*(behind[other] for other in one.after)))
    # what is computed is one chain, and each collective ends before who waits for it
    computed = [i for i, one in enumerate(made) if one.kind == COMPUTE]
    assert all(one in behind[other] for one, other in itertools.pairwise(computed))
    place = {one.where: i for i, one in enumerate(made) if one.kind not in (COMPUTE, "barrier")}
    for one in tasks:
        for other in one.after:
            if {one.where, tasks[other].where} <= place.keys():
                assert place[tasks[other].where] in behind[place[one.where]]
