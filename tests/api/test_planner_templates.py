"""What a plan says of the templates beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxplan.api.planner import _against_templates


def candidate(step_s: float) -> Any:
    return SimpleNamespace(step_s=lambda overlap: step_s, searched_s=lambda seconds, overlap: seconds)


@pytest.mark.parametrize(
    ("promised_s", "taken_s", "checked"), [(0.998, 1.02, True), (0.998, 0.997, True), (0.9999, 0.9, False)]
)
def test_a_template_is_checked_before_it_is_said_to_take_less(promised_s: float, taken_s: float, checked: bool) -> None:
    asked: list[str] = []
    rival = candidate(taken_s)
    pipeline: Any = SimpleNamespace(
        options=SimpleNamespace(overlap=0.0), checked=lambda name, found: asked.append(name) or rival
    )
    found: Any = SimpleNamespace(result=SimpleNamespace(objective_s=promised_s))
    ours = candidate(1.0)
    best, times = _against_templates(pipeline, ours, {"fsdp": found})
    assert asked == ["fsdp"] * checked and times == {"fsdp": taken_s if checked else promised_s}
    assert best is (rival if checked and taken_s < 1.0 else ours)
