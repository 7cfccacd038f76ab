"""`jaxplan.frontier` on a small step, and the Frontier value: wishes granted and refused, its files and its picture."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import jaxplan
from jaxplan.errors import ArgumentError, InfeasibleError
from jaxplan.frontier import Frontier, FrontierPoint
from jaxplan.frontier.svg import Scale
from jaxplan.search import Tradeoff, TradeoffPoint
from jaxplan.units import BYTES, SECONDS


def step(weights: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    def loss(w: dict[str, Any]) -> jax.Array:
        return ((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), value


def shape(*extents: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(extents, jnp.float32)


WEIGHTS = {"up": shape(512, 2048), "down": shape(2048, 512)}
MESH = AbstractMesh((4, 2), ("data", "model"))
SETTINGS: dict[str, Any] = {"donate_argnums": (0,), "hardware": "tpu-v5e"}


@pytest.fixture(scope="module")
def found() -> Frontier:
    return jaxplan.frontier(step, MESH, WEIGHTS, shape(1024, 512), eps=0.02, time_limit_s=10, **SETTINGS)


def test_points_are_strictly_monotone_and_over_their_bounds(found: Frontier) -> None:
    sizes, times = [p.peak_bytes for p in found.points], [p.step_s for p in found.points]
    assert len(found.points) > 1
    assert sizes == sorted(set(sizes))
    assert times == sorted(set(times), reverse=True)
    assert all(p.bound_s <= p.step_s for p in found.points)


def test_its_ends_are_what_planning_finds(found: Frontier) -> None:
    free = jaxplan.plan(step, MESH, WEIGHTS, shape(1024, 512), **SETTINGS)
    assert found.points[-1].step_s == pytest.approx(free.cost.objective_s, rel=1e-3)
    least = found.points[0].peak_bytes
    tight = jaxplan.plan(step, MESH, WEIGHTS, shape(1024, 512), memory_budget=least, **SETTINGS)
    assert tight.cost.peak_bytes <= least
    # the planner may find a faster plan that is as small only within what the frontier leaves open
    assert tight.cost.objective_s >= found.points[0].bound_s * (1 - 1e-6)


def test_a_point_s_plan_has_its_peak_and_runs_through_the_partitioner(found: Frontier) -> None:
    point = found.knee
    assert point.plan is point.plan
    assert point.plan.cost.peak_bytes == point.peak_bytes
    assert point.plan.cost.objective_s == pytest.approx(point.step_s)


def test_wishes(found: Frontier) -> None:
    slow, fast = found.points[0], found.points[-1]
    assert found.at_memory(fast.peak_bytes) is fast
    assert found.at_memory(fast.peak_bytes - 1) is found.points[-2]
    assert found.at_memory("16GiB") is fast
    assert found.at_time(slow.step_s) is slow
    assert found.at_time(fast.step_s) is fast
    with pytest.raises(InfeasibleError, match=r"no plan for `step` .* Smallest peak on the frontier: "):
        found.at_memory(slow.peak_bytes - 1)
    with pytest.raises(InfeasibleError, match=r"no plan for `step` .* Fastest on the frontier: "):
        found.at_time(fast.step_s * 0.9)


def test_a_frontier_is_the_same_from_its_file_without_plans(found: Frontier, tmp_path: Path) -> None:
    found.to_json(tmp_path / "frontier.json")
    read = Frontier.from_json(tmp_path / "frontier.json")
    assert read == found
    assert str(read) == str(found)
    with pytest.raises(ArgumentError, match=r"read from a file has no plans.*memory_budget=\d+"):
        _ = read.knee.plan


def test_the_picture_has_every_point_and_names_its_ends(found: Frontier, tmp_path: Path) -> None:
    found.plot(tmp_path / "frontier.svg")
    root = ElementTree.parse(tmp_path / "frontier.svg").getroot()
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == len(found.points)
    text = "".join(root.itertext())
    assert "Frontier of step on (data=4, model=2)" in text
    replace(found, points=found.points[:1]).plot(tmp_path / "frontier.svg")
    assert "one plan on " in "".join(ElementTree.parse(tmp_path / "frontier.svg").getroot().itertext())
    folded = replace(found, alike=True)
    folded.plot(tmp_path / "frontier.svg")
    lines = list(ElementTree.parse(tmp_path / "frontier.svg").getroot().itertext())
    # nothing runs out of the picture
    assert any(line.startswith("proved: no plan that cuts repeated layers alike") for line in lines)
    assert max(len(line) for line in lines if not line.startswith((".page", "\n"))) <= 130


@pytest.mark.parametrize(
    ("low", "high", "units", "ticks", "words"),
    [
        (160.0 * 2**20, 188.0 * 2**20, BYTES, ["160 MiB", "165 MiB", "170 MiB"], "160.0 MiB"),
        (17.4314 * 2**30, 17.4345 * 2**30, BYTES, ["17.4315 GiB", "17.4320 GiB", "17.4325 GiB"], "17.43140 GiB"),
        (0.0124, 0.0128, SECONDS, ["12.4 ms", "12.5 ms", "12.6 ms"], "12.40 ms"),
        (5.0, 5.0, SECONDS, ["4.90 s", "4.95 s", "5.00 s"], "5.000 s"),
    ],
)
def test_an_axis_has_round_ticks_that_are_told_apart(
    low: float, high: float, units: tuple[tuple[float, str], ...], ticks: list[str], words: str
) -> None:
    scale = Scale.around(low, high, units)
    shown = [scale.words(value) for value in scale.ticks]
    assert shown[: len(ticks)] == ticks
    assert 3 <= len(set(shown)) == len(shown) <= 9
    assert scale.low < low <= high < scale.high
    assert scale.words(low, 1) == words


def test_the_knee_is_the_best_bargain() -> None:
    points = tuple(
        FrontierPoint(step_s=step_s, peak_bytes=size, bound_s=step_s, counted_bytes=size)
        for size, step_s in ((10, 10.0), (11, 4.0), (15, 3.5), (20, 3.0))
    )
    settings: dict[str, Any] = {"name": "step", "mesh": "data=2", "hardware": "tpu-v5e", "memory_bytes": 16}
    found = Frontier(points=points, method="by hand", eps=0.0, **settings)
    assert found.knee is points[1]
    assert "more than a device has" in str(found).splitlines()[-1]
    alone = Frontier(points=points[:1], method="by hand", eps=0.0, **settings)
    assert alone.knee is points[0]
    assert "one plan" in str(alone).splitlines()[0]


def test_the_knee_is_drawn_and_explained_where_there_is_one(tmp_path: Path) -> None:
    points = tuple(
        FrontierPoint(step_s=step_s, peak_bytes=size, bound_s=step_s, counted_bytes=size)
        for size, step_s in ((10, 10.0), (11, 4.0), (15, 3.5))
    )
    settings: dict[str, Any] = {"name": "step", "mesh": "data=2", "hardware": "tpu-v5e", "memory_bytes": 16}
    for count, there in ((3, True), (2, False)):
        found = Frontier(points=points[:count], method="by hand", eps=0.0, **settings)
        found.plot(tmp_path / "frontier.svg")
        drawn = (tmp_path / "frontier.svg").read_text(encoding="utf-8")
        assert ('class="knee"' in drawn) == there
        assert ("orange: the best bargain" in drawn) == there


def test_points_that_differ_are_printed_apart() -> None:
    points = tuple(
        FrontierPoint(step_s=step_s, peak_bytes=size, bound_s=step_s, counted_bytes=size)
        for size, step_s in ((15_107_000_000, 0.18040), (15_107_004_096, 0.17966), (15_107_800_000, 0.179655))
    )
    settings: dict[str, Any] = {"name": "step", "mesh": "data=2", "hardware": "tpu-v5e", "memory_bytes": 2**34}
    found = Frontier(points=points, method="by hand", eps=0.0, **settings)
    rows = [line.split("  <-")[0].split() for line in str(found).splitlines()[-3:]]
    assert [row[2:4] for row in rows] == [["180.400", "ms"], ["179.660", "ms"], ["179.655", "ms"]]
    assert len({tuple(row[:2]) for row in rows}) == 3
    alone = Frontier(points=points[:1], method="by hand", eps=0.0, **settings)
    assert "14.1 GiB        180 ms" in str(alone)


def test_negative_limits_are_refused() -> None:
    with pytest.raises(ArgumentError, match="eps=-1"):
        jaxplan.frontier(step, MESH, WEIGHTS, shape(64, 512), eps=-1, **SETTINGS)


def test_points_that_simulation_drops_make_no_regret(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("jaxplan.frontier.frontier")
    points = tuple(
        TradeoffPoint(objective_s=step_s, peak_bytes=size, assignment=(size,))
        for size, step_s in ((10, 3.0), (20, 2.0), (30, 1.0))
    )
    found = Tradeoff(points=points, floor=((0, 3.0), (15, 2.5), (20, 2.0), (30, 1.0)), rows=1, largest=1)
    assert found.regrets == pytest.approx((0.2, 0.0, 0.0))
    # copies make the second one larger than the third
    simulated = {10: 15, 20: 100, 30: 40}
    monkeypatch.setattr(module, "Found", lambda **parts: SimpleNamespace(**parts))

    def simulated_of(assignment: tuple[int, ...]) -> tuple[Any, Any]:
        return None, SimpleNamespace(peak_bytes=simulated[assignment[0]])

    left = module._points(None, None, found, simulated_of)
    assert [(p.peak_bytes, p.counted_bytes, p.step_s) for p in left] == [(15, 10, 3.0), (40, 30, 1.0)]
    # nothing under the second one's bytes is faster than 2.5 s; what is as large as it was found, and is no gain
    assert [p.regret for p in left] == pytest.approx([0.2, 0.0])


def test_what_there_is_to_trade_is_said_in_text_and_picture(found: Frontier, tmp_path: Path) -> None:
    slow, fast = found.points[0], found.points[-1]
    wide = (replace(slow, peak_bytes=1000, step_s=1.002), replace(fast, peak_bytes=1250, step_s=1.0))
    said = "from end to end: 25 % more memory, and the slowest takes 0.2 % longer than the fastest"
    two = replace(found, points=wide)
    assert said in str(two)
    two.plot(tmp_path / "two.svg")
    assert said in "".join(ElementTree.parse(tmp_path / "two.svg").getroot().itertext())
    assert "from end to end:" not in str(replace(found, points=wide[:1]))


def test_layers_that_repeat_are_decided_once_if_wished() -> None:
    def deep(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return x.sum()

    sizes = [shape(256, 256)] * 16
    settings: dict[str, Any] = {"hardware": "tpu-v5e", "eps": 0.01, "time_limit_s": 10}
    folded = jaxplan.frontier(deep, MESH, sizes, shape(512, 256), options={"fold": True}, **settings)
    assert folded.alike
    assert "layers that repeat cut alike" in str(folded)
    assert "no other plan is by more than" in " ".join(str(folded).split())
    whole = jaxplan.frontier(deep, MESH, sizes, shape(512, 256), **settings)
    assert not whole.alike
    assert whole.apart_regret_bound == whole.regret_bound
    for point in whole.points:
        if point.peak_bytes >= folded.points[0].peak_bytes:
            alike = folded.at_memory(point.peak_bytes)
            assert alike.step_s <= point.step_s * (1 + folded.apart_regret_bound) * (1 + 0.01)


def test_a_proof_says_of_each_point_and_of_all_how_much_faster_a_plan_may_be() -> None:
    points = (
        FrontierPoint(step_s=2.0, peak_bytes=2**20, bound_s=2.0, counted_bytes=2**19, regret=0.02, apart_regret=1.17),
        FrontierPoint(step_s=1.0, peak_bytes=2**21, bound_s=1.0, counted_bytes=2**21),
    )
    settings: dict[str, Any] = {"name": "step", "mesh": "data=2", "hardware": "tpu-v5e", "memory_bytes": 2**30}
    found = Frontier(points=points, method="by hand", eps=0.0, **settings)
    assert found.regret_bound == 0.02
    said = " ".join(str(found).split())
    assert "no plan is faster by more than 2 % in the memory of any of these" in said
    assert "without the copies that resharding makes (0 B to 512 KiB of each peak below)" in said
    assert [line.split("  ")[-1] for line in str(found).splitlines()[-2:]] == ["by 2 % at most", "none"]
    over = replace(found, points=(points[0], replace(points[1], counted_bytes=3 * 2**20)))
    said = " ".join(str(over).split())
    assert "as the search counts it: up to 1.00 MiB over the peaks below, up to 512 KiB under them" in said
    apart = " ".join(str(replace(found, alike=True)).split())
    assert "no plan that cuts repeated layers alike is faster by more than 2 %" in apart
    assert "these; no other plan is by more than 117 %" in apart
    proved = Frontier(points=points[1:], method="by hand", eps=0.0, **settings)
    assert "no plan is faster in the memory of any of these" in str(proved)
