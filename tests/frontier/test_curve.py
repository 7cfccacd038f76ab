"""`jaxplan.curve` and `jaxplan.min_devices` against plans made one by one, and the Curve value's forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest

import jaxplan
from jaxplan.api import MeshSearch
from jaxplan.errors import ArgumentError, InfeasibleError
from jaxplan.frontier import Curve, DevicesPoint


def step(weights: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    def loss(w: dict[str, Any]) -> jax.Array:
        return ((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), value


def shape(*extents: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(extents, jnp.float32)


SHAPES = ({"up": shape(512, 2048), "down": shape(2048, 512)}, shape(1024, 512))
SETTINGS: dict[str, Any] = {"donate_argnums": (0,), "hardware": "v100"}
COUNTS = (1, 2, 8, 16)
MEMORY = 25 * 2**20
"""Too little for one device."""


@pytest.fixture(scope="module")
def found() -> Curve:
    return jaxplan.curve(step, *SHAPES, devices=COUNTS, memory=MEMORY, **SETTINGS)


def test_points_are_what_planning_finds(found: Curve) -> None:
    assert [few.devices for few in found.too_few] == [1]
    assert [point.devices for point in found.points] == [2, 8, 16]
    for point in found.points:
        plan = jaxplan.plan(step, "auto", *SHAPES, devices=point.devices, memory_budget=MEMORY, **SETTINGS)
        assert point.step_s == pytest.approx(plan.cost.objective_s, rel=0.01)
        assert point.bound_s <= plan.cost.objective_s * (1 + 1e-9)
        assert point.peak_bytes <= MEMORY
    with pytest.raises(InfeasibleError, match="Smallest reachable peak"):
        jaxplan.plan(step, "auto", *SHAPES, devices=1, memory_budget=MEMORY, **SETTINGS)


def test_a_point_s_plan_is_made_once(found: Curve) -> None:
    point = found.points[0]
    assert point.plan is point.plan
    assert point.plan.axes == point.axes
    assert point.plan.cost.peak_bytes <= MEMORY


def test_more_devices_allowed_are_never_slower(found: Curve) -> None:
    times = [found.at_most(devices).step_s for devices in range(2, 20)]
    assert times == sorted(times, reverse=True)
    assert found.at_most(7) is found.points[0]
    with pytest.raises(InfeasibleError, match=r"on 1 devices\. The fewest that do: 2"):
        found.at_most(1)


def test_the_fewest_devices_are_those_that_planning_needs() -> None:
    budgets = (4 * 2**20, 12 * 2**20, 80 * 2**20)
    points = [jaxplan.min_devices(step, *SHAPES, memory=memory, **SETTINGS) for memory in budgets]
    fewest = [point.devices for point in points]
    assert fewest == sorted(fewest, reverse=True)
    assert fewest[-1] == 1 < fewest[1]
    assert all(point.peak_bytes <= memory for point, memory in zip(points, budgets, strict=True))
    with pytest.raises(InfeasibleError):
        jaxplan.plan(step, "auto", *SHAPES, devices=fewest[1] // 2, memory_budget=budgets[1], **SETTINGS)
    assert jaxplan.min_devices(step, *SHAPES, devices=(3, 5), **SETTINGS).devices == 3


def test_too_little_memory_and_unknown_devices_are_refused() -> None:
    with pytest.raises(
        InfeasibleError, match=r"fits 1\.00 KiB a device on up to 4 devices, which need at least"
    ):
        jaxplan.min_devices(step, *SHAPES, memory="1KiB", devices=(2, 4), **SETTINGS)
    with pytest.raises(InfeasibleError, match="on up to 4 devices"):
        jaxplan.curve(step, *SHAPES, memory="1KiB", devices=(4,), **SETTINGS)
    with pytest.raises(ArgumentError, match="say nothing of their kind"):
        jaxplan.curve(step, *SHAPES)
    for counts in ((), (4, 2), (2, 2)):
        with pytest.raises(ArgumentError, match="ascending"):
            jaxplan.curve(step, *SHAPES, devices=counts, **SETTINGS)


def test_numbers_that_fewer_devices_rule_out_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget far below what any number reaches was searched for on every mesh of eleven numbers of devices."""
    asked: list[int] = []
    first = MeshSearch.first

    def spied(self: MeshSearch, targets: Any) -> Any:
        asked.append(targets[0].abstract.size)
        return first(self, targets)

    monkeypatch.setattr(MeshSearch, "first", spied)
    weights = {"up": shape(101, 32), "down": shape(32, 101)}  # and a batch, of primes, that can't be cut
    with pytest.raises(InfeasibleError, match=r"on up to 64 devices, which need at least 8\d\d KiB"):
        jaxplan.min_devices(step, weights, shape(1021, 101), memory="40KiB", devices=(1, 2, 8, 64), hardware="v100")
    assert asked == [1, 64]


def test_a_curve_is_the_same_from_its_file_without_plans(found: Curve, tmp_path: Path) -> None:
    found.to_json(tmp_path / "curve.json")
    read = Curve.from_json(tmp_path / "curve.json")
    assert read == found
    assert str(read) == str(found)
    with pytest.raises(ArgumentError, match=r"read from a file has no plans.*devices=2"):
        _ = read.points[0].plan


def test_the_picture_has_every_point_and_what_did_not_fit(found: Curve, tmp_path: Path) -> None:
    found.plot(tmp_path / "curve.svg")
    root = ElementTree.parse(tmp_path / "curve.svg").getroot()
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == len(found.points)
    text = "".join(root.itertext())
    assert "step: best step time on v100" in text
    assert text.count("too few") == 1


def test_a_curve_that_rises_is_not_drawn_through_its_words(tmp_path: Path) -> None:
    times = {8: 0.0124, 16: 0.00973, 32: 0.0134}
    points = tuple(
        DevicesPoint(devices=count, axes=(("data", count),), step_s=step_s, bound_s=step_s, peak_bytes=1)
        for count, step_s in times.items()
    )
    Curve(name="step", hardware="v100", memory_bytes=2**34, points=points).plot(tmp_path / "curve.svg")
    root = ElementTree.parse(tmp_path / "curve.svg").getroot()
    words = {one.text: float(one.get("y", "")) for one in root.iter("{http://www.w3.org/2000/svg}text")}
    dots = [float(one.get("cy", "")) for one in root.iter("{http://www.w3.org/2000/svg}circle")]
    # the line leads down from the first and up from the second: words are on the other side of the dot
    assert words["mesh 8"] < dots[0]
    assert words["9.73 ms"] > dots[1]
    assert {"5 ms", "10 ms"} <= words.keys()
