"""Templates that promise more than the checked plan are checked themselves, the most promising first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from jaxplan.api.planner import _against_templates


class Lowering:
    """In the place of a pipeline: what each template takes once it is checked; notes which are."""

    def __init__(self, taken_s: dict[str, float]) -> None:
        self.options, self.taken_s, self.asked = SimpleNamespace(overlap=0.0), taken_s, list[str]()

    def checked(self, name: str, found: Any) -> Any:
        self.asked.append(name)
        return candidate(self.taken_s[name])


def candidate(step_s: float) -> Any:
    return SimpleNamespace(step_s=lambda overlap: step_s, searched_s=lambda seconds, overlap: seconds)


def promising(seconds: float) -> Any:
    return SimpleNamespace(result=SimpleNamespace(objective_s=seconds))


def test_a_template_that_keeps_its_promise_spares_the_others_their_check() -> None:
    promised = {"data": 9.0, "fsdp": 8.0, "megatron": 7.0, "zero1": 11.0}
    lowering = Lowering({"data": 9.0, "fsdp": 8.0, "megatron": 7.5})
    rivals = {name: promising(seconds) for name, seconds in promised.items()}
    best, times = _against_templates(lowering, candidate(10.0), rivals)  # type: ignore[arg-type]
    assert lowering.asked == ["megatron"]
    assert best is not None and best.step_s(0.0) == 7.5
    assert times == {**promised, "megatron": 7.5} and list(times) == list(promised)
