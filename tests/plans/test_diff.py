"""A diff says what changed, both ways, and says nothing where nothing did."""

from __future__ import annotations

from dataclasses import replace

from jaxplan.plans.serialize import plan_of_text, plan_text
from jaxplan.sharding import Layout
from tests.plans.factory import AXES, arguments, collective, cost, layout_of, make_plan


def test_equal_plans_do_not_differ() -> None:
    plan = make_plan()
    assert plan.diff(make_plan(cost=cost(search_s=77.0))) == "no difference"
    assert plan.diff(plan_of_text(plan_text(plan), "p")) == "no difference"


def replicated_kernels(path: str, extents: tuple[int, ...]) -> Layout:
    return Layout(dims=((),) * len(extents)) if path.endswith("kernel") else layout_of(path, extents)


def test_changed_specs_are_folded_with_both_sides() -> None:
    text = make_plan().diff(make_plan(layout=replicated_kernels))
    assert "Arguments: 12 of 42 leaves differ" in text
    (line,) = [line for line in text.splitlines() if "state/params/" in line]
    assert line.split()[:2] == ["state/params/layer_*/mlp/up/kernel", "4"]
    assert line.index("P(None, ('data', 'model'))") < line.index("P()")
    assert "8.00 KiB -> 64.0 KiB" in line
    assert "embedding" not in text


def test_new_and_gone_leaves_are_named() -> None:
    text = make_plan(args=arguments(layers=1)).diff(make_plan(args=arguments(layers=2)))
    lines = [line for line in text.splitlines() if "layer_1/norm/scale" in line]
    assert lines and all(line.split()[2] == "none" for line in lines)
    back = make_plan(args=arguments(layers=2)).diff(make_plan(args=arguments(layers=1)))
    assert all(line.split()[3] == "none" for line in back.splitlines() if "layer_1/norm/scale" in line)


def test_costs_stand_side_by_side_with_their_change() -> None:
    text = make_plan().diff(make_plan(cost=cost(step_s=2.6e-3, comm_bytes_by_axis={"data": 2**21})))
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith("  ")}
    assert rows["step"] == ["step", "1.3", "ms", "2.6", "ms", "+100.0", "%"]
    assert "over model" in text and "-100.0 %" in text
    assert "compute" not in text


def test_collectives_are_compared_by_kind_and_axis() -> None:
    before = make_plan(collectives=(collective(), collective(), collective("all_gather")))
    after = make_plan(collectives=(collective(axes=("model",)), collective("all_gather")))
    rows = [line.split() for line in before.diff(after).splitlines() if line.startswith("  all_")]
    assert [row[:4] for row in rows] == [["all_reduce", "data", "2", "0"], ["all_reduce", "model", "0", "1"]]


def test_setting_constraints_templates_and_notes() -> None:
    before = make_plan()
    after = make_plan(
        axes=(("data", 2), ("model", 2)),
        hardware="h100",
        constraints=(),
        templates={"fsdp": 1e-3},
        warnings=("new one",),
    )
    text = before.diff(after)
    for words in (
        "data=4, model=2 (8 devices)", "data=2, model=2 (4 devices)", "h100",
        "Constraints inside the step: 1 gone, 0 new",
        "- step.py:7 (loss) dot_general 32x256: P('data') (reshard)", "does not fit", "  + new one",
    ):  # fmt: skip
        assert words in text, words


def test_a_diff_is_as_wide_as_a_terminal() -> None:
    other = replace(
        make_plan(args=arguments(layers=50), layout=replicated_kernels), axes=AXES, warnings=("w " * 200,)
    )
    assert max(map(len, make_plan().diff(other).splitlines())) <= 120
