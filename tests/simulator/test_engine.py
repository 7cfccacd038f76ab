"""The engine against a naive scheduler, and delta runs against full ones, bit for bit."""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_right

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxplan.simulator import Load, Net, Response, Run, respond

STREAMS = 4


@st.composite
def loads(draw: st.DrawFn) -> Load:
    duration = draw(st.integers(0, 30))
    streams = draw(st.sets(st.integers(0, STREAMS - 1), min_size=1, max_size=2)) if duration else set()
    return Load(duration, tuple(sorted(streams)))


@st.composite
def task_graphs(draw: st.DrawFn, most: int = 40) -> tuple[list[list[int]], list[Load]]:
    count = draw(st.integers(1, most))
    after = [sorted(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else [] for i in range(count)]
    return after, [draw(loads()) for _ in range(count)]


def naive_schedule(after: list[list[int]], work: list[Load]) -> list[tuple[int, int]]:
    """Of all tasks that could be next, the one with the least (start, index): every candidate looked at each time."""
    times: dict[int, tuple[int, int]] = {}
    free = [0] * STREAMS
    while len(times) < len(work):
        candidates = []
        for task, waits in enumerate(after):
            if task not in times and all(other in times for other in waits):
                begin = max(
                    [0, *(times[other][1] for other in waits), *(free[s] for s in work[task].streams)]
                )
                candidates.append((begin, task))
        begin, task = min(candidates)
        times[task] = (begin, begin + work[task].duration)
        for stream in work[task].streams:
            free[stream] = times[task][1]
    return [times[task] for task in range(len(work))]


def placed(run: Run, response: Response) -> list[tuple[int, int]]:
    """Start and end of every task as a response tells them."""
    times = []
    for task, position in enumerate(run.position):
        if task in response.times:
            times.append(response.times[task])
            continue
        shift = response.shifts[bisect_right(response.shifts, position, key=lambda entry: entry[0]) - 1][1]
        assert shift is not None
        times.append((run.start[task] + shift, run.end[task] + shift))
    return times


@settings(max_examples=150, deadline=None)
@given(task_graphs())
def test_a_run_is_the_naive_schedule(graph: tuple[list[list[int]], list[Load]]) -> None:
    after, work = graph
    run = Run(Net(after, STREAMS), work)
    assert list(zip(run.start, run.end, strict=True)) == naive_schedule(after, work)
    assert run.makespan == max(run.end)
    for stream in range(STREAMS):
        held = sorted((run.start[t], run.end[t]) for t, load in enumerate(work) if stream in load.streams)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(held))


@settings(max_examples=300, deadline=None)
@given(task_graphs(), st.data())
def test_a_delta_run_is_the_full_run(graph: tuple[list[list[int]], list[Load]], data: st.DataObject) -> None:
    after, work = graph
    net = Net(after, STREAMS)
    run = Run(net, work)
    changed = data.draw(st.dictionaries(st.integers(0, len(work) - 1), loads(), max_size=4))
    response = respond(run, changed)
    full = Run(net, [changed.get(task, load) for task, load in enumerate(work)])
    assert response.makespan == full.makespan
    assert placed(run, response) == list(zip(full.start, full.end, strict=True))


def layers(rng: np.random.Generator, count: int) -> tuple[list[list[int]], list[Load]]:
    """A training step: a chain of layers forward and back, sums on their way, gradients summed beside it."""
    after: list[list[int]] = []
    work: list[Load] = []

    def add(waits: list[int], duration: int, stream: int) -> int:
        after.append(waits)
        work.append(Load(duration, (stream,) if duration else ()))
        return len(after) - 1

    last, outputs, gradients = add([], 1, 0), [], []
    for _ in range(count):
        fetched = add([], int(rng.choice([0, 20])), 2)
        last = add([last, fetched], int(rng.integers(40, 60)), 0)
        last = add([last], int(rng.choice([0, 30])), 1)
        outputs.append(last)
    for output in reversed(outputs):
        weight = add([last, output], int(rng.integers(40, 60)), 0)
        gradients.append(add([weight], int(rng.choice([0, 25])), 2))
        last = add([last], int(rng.integers(40, 60)), 0)
        last = add([last], int(rng.choice([0, 30])), 1)
    for gradient in gradients:
        add([gradient], 5, 0)
    return after, work


@pytest.mark.parametrize("count", [40, 160])
def test_most_changes_of_a_training_step_are_simulated_in_a_small_part(count: int) -> None:
    rng = np.random.default_rng(count)
    after, work = layers(rng, count)
    net = Net(after, STREAMS)
    run = Run(net, work)
    shares = []
    for _ in range(100):
        task = int(rng.integers(len(work)))
        response = respond(run, {task: Load(int(rng.integers(1, 60)), work[task].streams or (1,))})
        shares.append(response.simulated / len(work))
    assert statistics.median(shares) < 1 / 8


def test_nothing_changed_simulates_nothing() -> None:
    after, work = layers(np.random.default_rng(0), 5)
    run = Run(Net(after, STREAMS), work)
    response = respond(run, {3: work[3]})
    assert (response.makespan, response.simulated) == (run.makespan, 0)


def test_no_tasks_take_no_time() -> None:
    assert Run(Net([], STREAMS), []).makespan == 0
