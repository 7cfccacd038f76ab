"""Calibration: planted machines are found again, files read back as they were written, an interrupted run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

import jaxplan
from jaxplan.calibration import Measurements, calibrate, fit, measurements, timing
from jaxplan.calibration import steps as calibration_steps
from jaxplan.calibration.calibrate import measured_profile
from jaxplan.calibration.timing import seconds_a_call, seconds_an_iteration
from jaxplan.cost import collective_seconds
from jaxplan.hardware import AxisLink, Link, available_profiles, dump_profile, load_profile

PLANTED = Link(name="l", kind="switch", bytes_per_s=1, efficiency=1, latency_s=1, launch_s=1)


@settings(max_examples=15)
@given(
    launch_s=st.floats(1e-6, 1e-4),
    latency_s=st.floats(1e-6, 1e-4),
    bytes_per_s=st.floats(1e8, 1e11),
    noise=st.integers(0, 2**32 - 1),
)
def test_a_planted_link_is_found_again(
    launch_s: float, latency_s: float, bytes_per_s: float, noise: int
) -> None:
    spread = np.random.default_rng(noise)
    rows = []
    for n in (2, 4, 8):
        for kind in measurements.KINDS:
            for size in measurements.BYTES:
                axis = AxisLink(
                    link="l", kind="switch", size=n, bytes_per_s=bytes_per_s, direct_bytes_per_s=bytes_per_s,
                    latency_s=latency_s, steps=n - 1, launch_s=launch_s, wraparound=False,
                )  # fmt: skip
                seconds = float(collective_seconds(kind, size, [axis])) * spread.lognormal(0, 0.02)
                rows.append(
                    {"what": "collective", "kind": kind, "devices": n, "bytes": size, "seconds": seconds}
                )
    found = fit.fitted_link(rows, PLANTED)
    assert found is not None
    link, error = found
    assert error < 0.03
    assert link.bytes_per_s == pytest.approx(bytes_per_s, rel=0.15)
    for kind, n, size in (("all_reduce", 8, 2**26), ("all_gather", 4, 2**10)):
        axes = [
            AxisLink(
                link="l", kind="switch", size=n, bytes_per_s=rate, direct_bytes_per_s=rate, latency_s=latency,
                steps=n - 1, launch_s=launch, wraparound=False,
            )
            for rate, latency, launch in (
                (bytes_per_s, latency_s, launch_s), (link.bytes_per_s, link.latency_s, link.launch_s)
            )
        ]  # fmt: skip
        planted, fitted = (float(collective_seconds(kind, size, [axis])) for axis in axes)
        assert fitted == pytest.approx(planted, rel=0.1)


@pytest.mark.parametrize("name", available_profiles())
def test_a_profile_is_read_back_as_it_was_written(name: str, tmp_path: Path) -> None:
    profile = load_profile(name)
    path = tmp_path / "copy.toml"
    path.write_text(dump_profile(profile), encoding="utf-8")
    assert load_profile(path) == profile


class _Machine:
    """Stands in for the measuring: gives planned seconds, and is interrupted after so many."""

    def __init__(self, interrupted_after: int) -> None:
        self.left, self.asked = interrupted_after, 0

    def __call__(self, body: Callable[..., Any], per_device: Any, mesh: Any, clock: Any = None) -> float:
        if self.asked == self.left:
            raise KeyboardInterrupt
        self.asked += 1
        return 1e-3


def test_an_interrupted_calibration_keeps_what_it_has_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "mine.toml"
    stopped = _Machine(3)
    monkeypatch.setattr(measurements, "seconds_an_iteration", stopped)
    with pytest.raises(KeyboardInterrupt):
        calibrate(out, devices=jax.devices()[:2])
    rows = json.loads(out.with_suffix(".measured.json").read_text())["rows"]
    assert len(rows) == 3
    early = load_profile(out)
    assert early.name == "mine" and early.links == load_profile("cpu-host").links

    going_on = _Machine(10**6)
    monkeypatch.setattr(measurements, "seconds_an_iteration", going_on)
    monkeypatch.setattr(measurements, "seconds_a_call", going_on)
    profile = calibrate(out, devices=jax.devices()[:2])
    rows = json.loads(out.with_suffix(".measured.json").read_text())["rows"]
    assert len({row["name"] for row in rows}) == len(rows) == 3 + going_on.asked
    assert load_profile(out) == profile
    assert "measured by jaxplan calibrate" in profile.sources["links.host-memory.bytes_per_s"]
    assert profile.sources["hbm_bytes"] == load_profile("cpu-host").sources["hbm_bytes"]
    assert jaxplan.plan(
        lambda x: x * 2, jax.sharding.AbstractMesh((2,), ("d",)), np.ones(4), hardware=str(out)
    )


def test_what_was_hidden_is_said_with_the_option_that_plans_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only accelerators measure it: rows as they leave them."""
    taken = {"product": 4e-3, "collective": 2e-3, "both": 5e-3}

    def take(self: Measurements, say: Any) -> None:
        self.rows[:] = [{"name": how, "what": "overlap", "how": how, "seconds": s} for how, s in taken.items()]

    monkeypatch.setattr(Measurements, "take", take)
    said: list[str] = []
    calibrate(tmp_path / "mine.toml", devices=jax.devices()[:2], say=said.append)
    assert said[0].startswith("50% of") and "options.overlap=0.50 " in said[0]


def test_steps_take_on_the_calibrated_profile_what_they_were_measured_to_take() -> None:
    found = Measurements(jax.devices()[:1], None)
    rates = [
        {"what": "product", "dims": (512, 512, 512), "dtype": "float32", "seconds": 5e-3},
        {"what": "stream", "bytes": 2**27, "seconds": 1e-2},
        {"what": "arithmetic", "flops": 2**21, "seconds": 1e-4},
    ]
    taken = {"transformer": 0.21, "perceptron": 0.05}
    found.rows = [*rates, *({"what": "step", "step": name, "seconds": s} for name, s in taken.items())]
    profile = measured_profile(load_profile("cpu-host"), found, "planted")
    assert profile.matmul_efficiency == profile.hbm_efficiency < 1
    one = jax.make_mesh((1,), ("device",), devices=found.devices)
    steps = calibration_steps.steps(host=True)
    ratios = [
        jaxplan.plan(steps[name].run, one, steps[name].state, steps[name].batch, donate_argnums=0, hardware=profile)
        .cost.compute_s / seconds for name, seconds in taken.items()
    ]  # fmt: skip
    # what no rate is in, the least time of a kernel, is not scaled
    assert np.exp(np.log(ratios).mean()) == pytest.approx(1, rel=0.02)


def test_a_loop_that_noise_made_shorter_takes_time_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """One iteration was once seen to take longer than two: memory that streams in no time at all."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    monkeypatch.setattr(timing, "_fastest", lambda run, x, trips, repeats, clock: 0.3 if trips == 1 else 0.27)
    taken_s = seconds_an_iteration(lambda x: x + 1.0, np.ones(8, np.float32), mesh)
    assert taken_s == pytest.approx(0.27 / timing._LEAST_TRIPS)


def test_a_call_runs_the_step_on_what_the_last_one_returned() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    step = calibration_steps.steps(host=True)["perceptron"]
    seen: list[float] = []

    def run(state: Any) -> Any:
        state = step.run(state, step.batch)
        jax.debug.callback(lambda w: seen.append(float(np.abs(w).sum())), state["mean"]["layer_0"])
        return state

    assert 0 < seconds_a_call(run, step.state, mesh) < 10
    jax.effects_barrier()
    assert len(set(seen)) > 2


def test_measurements_of_another_machine_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text('{"device_kind": "TPU v9", "devices": 4, "rows": []}')
    with pytest.raises(
        jaxplan.ArgumentError, match=r"holds measurements of 4 x 'TPU v9', here are 2 x 'cpu'"
    ):
        Measurements(jax.devices()[:2], path)


def test_one_device_measures_no_links() -> None:
    planned = [facts["what"] for _, facts, _ in Measurements(jax.devices()[:1], None)._plan()]
    assert "product" in planned and "collective" not in planned


@pytest.mark.parametrize("kind", measurements.KINDS)
def test_every_collective_that_is_timed_is_in_the_program(kind: str) -> None:
    body, mesh = measurements._body(kind, 4), Mesh(np.array(jax.devices()[:4]), ("d",))
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"), check_vma=False))
    text = run.lower(np.ones(4096, np.float32)).compile().as_text()
    assert text is not None and kind.replace("_", "-") in text


@pytest.mark.parametrize("told", [False, True])
def test_an_iteration_of_twice_the_work_takes_longer(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the loop's length is an argument or, as for accelerators, in the program."""
    monkeypatch.setattr(timing, "_told_in_program", lambda mesh: told)
    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    x = np.full((256, 256), 1e-3, np.float32)
    once = seconds_an_iteration(lambda x: x @ x, x, mesh)
    often = seconds_an_iteration(lambda x: x @ x @ x @ x @ x @ x @ x @ x @ x, x, mesh)
    assert often > 2 * once > 0
