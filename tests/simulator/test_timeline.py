"""Timelines of plans: what is hidden, what is not, and that every form of them says the same."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import jaxplan
from jaxplan.errors import ArgumentError
from jaxplan.plans import COMPUTE, Plan, PlannedTask, load_plan
from jaxplan.simulator import simulate
from tests.plans.factory import make_plan


def task(seconds_s: float, *after: int, streams: tuple[str, ...] = (COMPUTE,), **fields: Any) -> PlannedTask:
    kind = "compute" if streams == (COMPUTE,) else "all_reduce" if streams else "barrier"
    settings: dict[str, Any] = {"name": kind, "kind": kind, "trips": 1.0, "where": "step.py:1", "bytes": 0}
    return PlannedTask(streams=streams, seconds_s=seconds_s, after=after, **(settings | fields))


def timeline_of(*tasks: PlannedTask) -> jaxplan.Timeline:
    return simulate(make_plan(tasks=tasks))


ICI = ("ici data",)


def test_communication_hides_behind_what_does_not_wait_for_it() -> None:
    # 3 ms, of which the sum of the first is on its way during the second; the third needs it
    line = timeline_of(task(1e-3), task(1.5e-3, 0, streams=ICI), task(1e-3, 0), task(1e-3, 1, 2))
    assert line.step_s == pytest.approx(3.5e-3)
    assert line.exposed_comm_s == pytest.approx(0.5e-3)
    assert line.events[1].exposed_s == pytest.approx(0.5e-3)
    assert [e.task.after for e in line.critical_path] == [(), (0,), (1, 2)]


def test_later_work_that_is_ready_fills_a_wait() -> None:
    line = timeline_of(task(1e-3), task(1e-3, 0, streams=ICI), task(1e-3, 1), task(1e-3, 0))
    assert line.step_s == pytest.approx(3e-3)
    assert line.exposed_comm_s == 0
    assert line.events[3].start_s < line.events[2].start_s


def test_collectives_queue_for_a_shared_link_and_not_for_others() -> None:
    shared = timeline_of(task(1e-3, streams=("nvlink",)), task(2e-3, streams=("nvlink",)))
    apart = timeline_of(task(1e-3, streams=("ici a",)), task(2e-3, streams=("ici b",)))
    both = timeline_of(task(1e-3, streams=("ici a", "ici b")), task(2e-3, streams=("ici b",)))
    assert [x.step_s for x in (shared, apart, both)] == [pytest.approx(s) for s in (3e-3, 2e-3, 3e-3)]


def test_nothing_crosses_a_barrier() -> None:
    line = timeline_of(
        task(2e-3, streams=ICI),
        task(0.0, 0, streams=()),
        task(1e-3, 1),
        task(0.0, 2, streams=()),
        task(1e-3, 3),
    )
    assert line.step_s == pytest.approx(4e-3)


def test_memory_follows_the_computation() -> None:
    line = timeline_of(task(1e-3, bytes=5), task(1e-3, 0, bytes=9), task(1e-3, 1, bytes=2))
    assert line.memory == ((0.0, 5), (pytest.approx(1e-3), 9), (pytest.approx(2e-3), 2))
    assert line.peak_bytes == 9


def test_what_runs_ahead_of_its_turn_frees_nothing_before() -> None:
    line = timeline_of(
        task(1e-3, bytes=9),
        task(4e-3, 0, streams=("ici",), kind="collective"),
        task(1e-3, 1, bytes=7),
        task(1e-3, 0, bytes=2),
    )
    # the last one runs while something is sent that the one before it waits for
    assert line.events[3].end_s == pytest.approx(2e-3)
    assert line.memory == ((0.0, 9), (pytest.approx(5e-3), 7), (pytest.approx(5e-3), 2))
    assert line.peak_bytes == 9


def test_a_plan_without_tasks_says_what_to_do() -> None:
    with pytest.raises(ArgumentError, match="`train_step` has no tasks to simulate: plan the step again"):
        simulate(make_plan())


def scanned_step(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    def loss(weights: dict[str, Any]) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ w), None

        x, _ = jax.lax.scan(layer, batch @ weights["first"], weights["stack"])
        return (x**2).mean()

    value, gradient = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradient), value


@pytest.fixture(scope="module")
def plan() -> Plan:
    def shape(*extents: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(extents, jnp.float32)

    state = {"first": shape(256, 512), "stack": shape(6, 512, 512)}
    return jaxplan.plan(
        scanned_step, AbstractMesh((4, 2), ("data", "model")), state, shape(4096, 256), donate_argnums=(0,),
        hardware="tpu-v5e", options=jaxplan.Options(search="fsdp"),
    )  # fmt: skip


def test_tasks_are_the_plan_s_cost(plan: Plan) -> None:
    line = simulate(plan)
    assert line.busy_s[COMPUTE] == pytest.approx(plan.cost.compute_s, rel=1e-6)
    assert line.comm_s == pytest.approx(plan.cost.comm_s, rel=1e-6)
    assert line.peak_bytes == plan.cost.peak_bytes
    assert {e.task.kind for e in line.events} >= {"compute", "all_gather", "barrier"}


def test_a_step_is_between_its_longest_stream_and_everything_in_a_row(plan: Plan) -> None:
    line = simulate(plan)
    assert max(line.busy_s.values()) <= line.step_s <= line.busy_s[COMPUTE] + line.comm_s + 1e-12
    assert line.step_s == pytest.approx(line.busy_s[COMPUTE] + line.exposed_comm_s)
    chain = line.critical_path
    assert chain[0].start_s == 0
    assert chain[-1].end_s == line.step_s
    assert math.fsum(e.end_s - e.start_s for e in chain) == pytest.approx(line.step_s)


def test_loops_fence_their_communication(plan: Plan) -> None:
    line = simulate(plan)
    fences = [e for e in line.events if e.task.kind == "barrier"]
    assert [e.task.name for e in fences] == ["scan", "end of scan"] * 2
    for fence in fences:
        assert not [e for e in line.events if e.start_s < fence.start_s < e.end_s]
    assert {e.task.trips for e in fences} == {6.0}


def test_a_saved_plan_has_the_same_timeline(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert simulate(load_plan(tmp_path / "plan.json")) == simulate(plan)


def test_the_trace_has_every_event_on_each_of_its_streams(plan: Plan, tmp_path: Path) -> None:
    line = simulate(plan)
    line.to_trace(tmp_path / "trace.json")
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    drawn = [row for row in rows if row["ph"] == "X"]
    assert len(drawn) == sum(len(e.task.works_on) for e in line.events)
    assert max(row["ts"] + row["dur"] for row in drawn) == pytest.approx(line.step_s * 1e6)
    names = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert sorted(names.values()) == sorted(line.streams)


def test_the_picture_draws_every_event(plan: Plan, tmp_path: Path) -> None:
    line = simulate(plan)
    line.to_svg(tmp_path / "line.svg")
    root = ElementTree.parse(tmp_path / "line.svg").getroot()
    bars = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if len(e)]
    assert len(bars) == sum(len(e.task.works_on) for e in line.events)
    text = "".join(root.itertext())
    assert "scan, 6 runs" in text


def test_the_picture_s_ticks_are_round_and_of_one_unit(tmp_path: Path) -> None:
    timeline_of(task(3.0755e-3)).to_svg(tmp_path / "line.svg")
    text = list(ElementTree.parse(tmp_path / "line.svg").getroot().itertext())
    ticks = [words for words in text if words.endswith(" ms") and words[0].isdigit() and "step" not in words]
    assert ticks[-7:] == ["0 ms", "0.5 ms", "1 ms", "1.5 ms", "2 ms", "2.5 ms", "3 ms"]


@pytest.mark.parametrize(("sent_s", "share"), [(0.0, "0%"), (30e-6, "0.3%"), (5e-3, "33%")])
def test_a_small_share_is_not_called_none(sent_s: float, share: str) -> None:
    line = timeline_of(task(10e-3), task(sent_s, 0, streams=ICI), task(0.0, 1))
    assert f"({share} of the step)" in str(line)


def test_the_text_names_what_is_not_hidden(plan: Plan) -> None:
    text = str(simulate(plan))
    assert "train" not in text.splitlines()[0]
    assert text.startswith("scanned_step on (data=4, model=2)")
    assert "all_gather data" in text
