"""The strategy simulator against the engine on every device's tasks, and changes against full runs, bit for bit."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import fields

import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxplan.api import auto_shard, simulated_choices
from jaxplan.errors import ArgumentError
from jaxplan.search import evaluate
from jaxplan.sharding import UNREDUCED
from jaxplan.simulator import Between, Choices, Load, Net, Run, Schedule, StrategySimulator
from models import abstract_arguments, get, get_config

TICKS_PER_S = 10**12
MESHES = [((4, 2), (0, 1)), ((2, 2, 2), (0, 0, 1)), ((8,), (0,))]


def program(seed: int, mesh: tuple[int, ...], links: tuple[int, ...], count: int = 30) -> Choices:
    """Some operations take no time, some pairs move nothing, some results are read by nobody later."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, count)

    def moved(tail: int, head: int) -> Between:
        axes = rng.integers(0, 1 << len(mesh), (sizes[tail], sizes[head]))
        seconds_s = np.where(axes > 0, rng.integers(0, 40, axes.shape), 0) * 1e-6
        still = rng.random(axes.shape) < 0.5 if seed % 4 else None
        return Between(tail=tail, head=head, seconds_s=seconds_s, axes=axes, still=still)

    pairs = [(int(rng.integers(head)), head) for head in range(1, count) for _ in range(rng.integers(1, 4))]
    pairs += [(tail, int(rng.integers(tail))) for tail in range(5, count, 7)]
    return Choices(
        compute_s=tuple(np.where(rng.random(k) < 0.2, 0, rng.integers(1, 50, k)) * 1e-6 for k in sizes),
        between=tuple(moved(*pair) for pair in pairs), mesh=mesh, links=links,
    )  # fmt: skip


def by_the_engine(choices: Choices, chosen: list[int], slow: list[float]) -> tuple[dict, dict]:
    """(start, end) of every (operation, device) and of every (moved, device), each device's tasks written out."""
    devices = list(itertools.product(*map(range, choices.mesh)))
    streams = 1 + max(choices.links) + 1
    after: list[list[int]] = []
    loads: list[Load] = []
    where: dict[tuple[str, int, int], int] = {}

    def add(waits: list[int], seconds_s: float, held: list[int]) -> int:
        ticks = round(seconds_s * TICKS_PER_S)
        after.append(waits)
        loads.append(Load(ticks, tuple(held) if ticks else ()))
        return len(after) - 1

    def add_moved(e: int) -> None:
        b = choices.between[e]
        pair = chosen[b.tail], chosen[b.head]
        seconds_s = float(b.seconds_s[pair])
        axes = [a for a in range(len(choices.mesh)) if int(b.axes[pair]) >> a & 1] if seconds_s else []
        links = sorted({choices.links[a] for a in axes})
        groups: dict[tuple[int, ...], list[int]] = {}
        for d, place in enumerate(devices):
            groups.setdefault(tuple(x for a, x in enumerate(place) if a not in axes), []).append(d)
        for group in groups.values():
            held = [d * streams + 1 + link for d in group for link in links]
            if axes and b.still is not None and b.still[pair]:
                held += [d * streams for d in group]
            task = add([where["op", b.tail, d] for d in group], seconds_s, held)
            where.update({("moved", e, d): task for d in group})

    for n, costs in enumerate(choices.compute_s):
        reads = [e for e, b in enumerate(choices.between) if b.head == n and b.tail < n]
        for e in reads:
            add_moved(e)
        for d in range(len(devices)):
            waits = [where["moved", e, d] for e in reads]
            where["op", n, d] = add(waits, float(costs[chosen[n]]) * slow[d], [d * streams])
        for e, b in enumerate(choices.between):
            if b.tail == n and b.head < n:
                add_moved(e)
    made = Run(Net(after, len(devices) * streams), loads)
    times = {key: (made.start[task], made.end[task]) for key, task in where.items()}
    return (
        {(n, d): t for (kind, n, d), t in times.items() if kind == "op"},
        {(e, d): t for (kind, e, d), t in times.items() if kind == "moved"},
    )


def times_of(schedule: Schedule) -> tuple[dict, dict]:
    def told(start: np.ndarray, end: np.ndarray) -> dict:
        return {at: (int(start[at]), int(end[at])) for at in np.ndindex(*start.shape)}

    return told(schedule.operation_start, schedule.operation_end), told(schedule.between_start, schedule.between_end)


def equal(a: Schedule, b: Schedule) -> bool:
    return all((getattr(a, f.name) == getattr(b, f.name)).all() for f in fields(Schedule))


@pytest.mark.parametrize("slowed", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_every_devices_timeline_is_the_engines(seed: int, slowed: bool) -> None:
    mesh, links = MESHES[seed % 3]
    choices = program(seed, mesh, links)
    slow = [1.5 if slowed and d == 3 else 1.0 for d in range(math.prod(mesh))]
    rng = np.random.default_rng(seed)
    chosen = [int(rng.integers(costs.size)) for costs in choices.compute_s]
    simulator = StrategySimulator(choices, chosen, slowdown=slow)
    expected = by_the_engine(choices, chosen, slow)
    assert times_of(simulator.schedule()) == expected
    assert times_of(simulator.full()) == expected
    assert simulator.step_s == max(end for times in expected for _, end in times.values()) / TICKS_PER_S


@pytest.mark.parametrize("seed", range(12))
def test_a_change_is_a_full_run(seed: int) -> None:
    mesh, links = MESHES[seed % 3]
    choices = program(seed, mesh, links, count=40)
    slow = [1.3 if seed % 2 and d == 3 else 1.0 for d in range(math.prod(mesh))]
    simulator = StrategySimulator(choices, [0] * len(choices.compute_s), slowdown=slow)
    rng = np.random.default_rng(seed)
    for _ in range(40):
        some = rng.choice(len(choices.compute_s), int(rng.integers(1, 4)), replace=False).tolist()
        before = simulator.schedule()
        change = simulator.change({n: int(rng.integers(choices.compute_s[n].size)) for n in some})
        full = simulator.full()
        assert change.step_s == full.step_s
        assert change.more_s == pytest.approx(full.step_s - before.step_s, abs=1e-15)
        if rng.random() < 0.5:
            simulator.commit()
            assert equal(simulator.schedule(), full)
            assert equal(simulator.full(every_device=False), full)
        else:
            simulator.rollback()
            assert equal(simulator.full(), before)


def test_devices_that_are_alike_are_one_class() -> None:
    choices = program(0, (8, 8), (0, 1), count=5)
    chosen = [0] * 5
    assert StrategySimulator(choices, chosen).classes == 1
    one_slow = [2.0] + [1.0] * 63
    assert StrategySimulator(choices, chosen, slowdown=one_slow).classes == 4  # it, its row, its column, the others
    with pytest.raises(ArgumentError, match="64 devices"):
        StrategySimulator(choices, chosen, slowdown=[1.0])


def test_a_step_takes_no_longer_than_its_objective_and_no_less_than_its_computation() -> None:
    mesh = AbstractMesh((4, 2), ("data", "model"))
    step = auto_shard(
        get("gpt").make_train_step(get_config("gpt", "tiny")), mesh, hardware="tpu-v5e", donate_argnums=0
    )
    pipeline, pins = step.pipeline(abstract_arguments("gpt", "tiny"), {})
    space = pipeline.space(pins)
    choices = simulated_choices(space, pipeline.model)
    for assignment in pipeline.given(pins).values():
        simulator = StrategySimulator(choices, assignment)
        objective_s = evaluate(space.problem, assignment).objective_s
        compute_s = sum(float(costs[s]) for costs, s in zip(choices.compute_s, assignment, strict=True))
        assert compute_s * (1 - 1e-6) <= simulator.step_s <= objective_s * (1 + 1e-6)


@pytest.mark.parametrize(("hardware", "mesh"), [("tpu-v5e", (8,)), ("tpu-v5e", (4, 2)), ("h100", (8,))])
def test_on_tpu_nothing_is_computed_beside_sums_as_in_the_timeline_of_a_plan(
    hardware: str, mesh: tuple[int, ...]
) -> None:
    model = get("mlp").make_train_step(get_config("mlp", "tiny"))
    names = ("data", "model")[: len(mesh)]
    step = auto_shard(model, AbstractMesh(mesh, names), hardware=hardware, donate_argnums=0)
    pipeline, pins = step.pipeline(abstract_arguments("mlp", "tiny"), {})
    space = pipeline.space(pins)
    assignment = pipeline.given(pins)["data"]
    choices = simulated_choices(space, pipeline.model)
    if hardware == "h100":
        assert all(between.still is None for between in choices.between)
        return
    sums = {
        e: float(edge.costs_s[assignment[edge.tail], assignment[edge.head]])
        for e, (edge, moved) in enumerate(zip(space.problem.edges, space.passages, strict=True))
        if UNREDUCED in moved.tails[assignment[edge.tail]]
    }
    assert sum(sums.values()) > 0
    schedule = StrategySimulator(choices, assignment).schedule()
    sent = [(schedule.between_start[e, 0], schedule.between_end[e, 0]) for e, seconds_s in sums.items() if seconds_s]
    computed = zip(schedule.operation_start[:, 0], schedule.operation_end[:, 0], strict=True)
    assert all(min(end, stop) <= max(begin, start) for begin, end in computed for start, stop in sent)


GRAPHS = [
    ("mlp", (2, 2), "h100"), ("gpt", (2, 2), "h100"), ("lstm", (4, 4), "h100"), ("moe", (4, 4), "h100"),
    ("nmt", (8, 8), "h100"), ("resnet", (8, 8), "h100"), ("gpt", (4, 4), "tpu-v5e"), ("nmt", (8, 8), "tpu-v5e"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh", "hardware"), GRAPHS)
def test_ten_thousand_changes_of_a_train_step_are_full_runs_and_faster(
    model: str, mesh: tuple[int, int], hardware: str
) -> None:
    step = auto_shard(
        get(model).make_train_step(get_config(model, "tiny")), AbstractMesh(mesh, ("data", "model")),
        hardware=hardware, donate_argnums=0,
    )  # fmt: skip
    pipeline, pins = step.pipeline(abstract_arguments(model, "tiny"), {})
    space = pipeline.space(pins)
    sizes = [node.costs_s.size for node in space.problem.nodes]
    simulator = StrategySimulator(simulated_choices(space, pipeline.model), [0] * len(sizes))
    movable = [n for n, size in enumerate(sizes) if size > 1]
    rng, faster = np.random.default_rng(0), []
    for number in range(10_000):
        node = movable[int(rng.integers(len(movable)))]
        began = time.perf_counter()
        change = simulator.delta(node, int(rng.integers(sizes[node])))
        delta_s = time.perf_counter() - began
        if number % 50 == 0:
            assert change.step_s == simulator.full(every_device=False).step_s
        if number % 500 == 1:
            began = time.perf_counter()
            full = simulator.full()
            faster.append((time.perf_counter() - began) / delta_s)
            assert change.step_s == full.step_s
        if rng.random() < 0.3:
            simulator.commit()
    assert equal(simulator.schedule(), simulator.full())
    least = {4: 1.0, 16: 3.0, 64: 8.0}[math.prod(mesh)]
    assert np.median(faster) >= least
