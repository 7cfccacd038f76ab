"""FlexFlow's experiment still runs on what the planner hands it; its figures are not looked at."""

from __future__ import annotations

import math

import pytest

from experiments.flexflow_search import run


def test_what_an_assignment_sends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, share = run.NETS["RNNTC"]
    monkeypatch.setitem(run.NETS, "RNNTC", (model, "tiny", share))
    pipeline, _, space, _ = run.built("RNNTC", "16 P100", 1)
    sent = [
        run.sent_bytes(space, pipeline.model, [choice % len(node.costs_s) for node in space.problem.nodes])
        for choice in range(3)
    ]
    assert all(math.isfinite(size) and size >= 0 for size in sent)
    assert max(sent) > 0
