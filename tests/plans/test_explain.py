"""What `explain` says follows from the prices of the alternatives, and a wrong path is helped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxplan.errors import ArgumentError
from jaxplan.plans import Alternative, Plan
from jaxplan.sharding import Layout
from tests.plans.factory import collective, cost, make_plan

KERNEL = "state/params/layer_0/mlp/up/kernel"
WHOLE = Layout(dims=((), ()))
ROWS = Layout(dims=(("model",), ()))


def priced(*alternatives: tuple[Layout, float, bool]) -> Plan:
    listed = tuple(Alternative(layout=a, objective_s=s, fits=fits) for a, s, fits in alternatives)
    return make_plan(alternatives={KERNEL: listed})  # the plan's own objective is 1.4 ms


def said(plan: Plan) -> str:
    """The explanation on one line: where it is wrapped is no matter."""
    return " ".join(plan.explain(KERNEL).split())


def test_the_next_best_layout_that_fits_is_the_reason() -> None:
    text = said(priced((WHOLE, 2.6e-3, True), (ROWS, 1.5e-3, True)))
    assert (
        "Cut over data and model: the next best, P('model') (cut over model), would cost 100 us more" in text
    )
    assert "+7.1 %" in text


def test_a_layout_that_does_not_fit_is_no_competitor_but_is_named() -> None:
    text = said(priced((WHOLE, 1.3e-3, False), (ROWS, 1.5e-3, True)))
    assert "the next best, P('model')" in text
    assert "P() would save 100 us a step, but does not fit the memory budget." in text


def test_no_layout_fits_but_the_chosen_one() -> None:
    text = said(priced((WHOLE, 2.6e-3, False)))
    assert "no other layout fits the budget of 16.0 MiB a device" in text


def test_a_tie_is_called_a_tie() -> None:
    assert "would cost the same" in said(priced((WHOLE, 1.4e-3 * (1 + 1e-9), True)))


def test_a_cheaper_layout_that_was_not_taken_is_admitted() -> None:
    plan = priced((WHOLE, 1.0e-3, True))
    assert "is priced 400 us lower: the memory budget forbids it." in said(plan)
    stopped = replace(plan, cost=cost(termination="time_limit"))
    assert 'is priced 400 us lower: the search ended as "time_limit"' in said(stopped)


def test_every_alternative_stands_in_the_table_with_its_price() -> None:
    lines = priced((WHOLE, 2.6e-3, False), (ROWS, 1.5e-3, True)).explain(KERNEL).splitlines()
    start = next(i for i, line in enumerate(lines) if "Layouts of this tensor" in line) + 2
    chosen, rows, whole = (lines[start + i].split() for i in range(3))
    assert chosen[-1] == "chosen" and "P(None," in chosen[0]
    assert rows[-4:] == ["+100", "us", "+7.1", "%"]
    assert " ".join(whole).endswith("+1.2 ms +85.7 % does not fit the memory budget")


def test_a_result_that_is_state_is_explained_by_its_argument() -> None:
    plan = priced((WHOLE, 2.6e-3, True))
    text = plan.explain("result/0/params/layer_0/mlp/up/kernel")
    assert f"the same layout as {KERNEL}" in text
    assert "would cost 1.2 ms more" in text


@pytest.mark.parametrize(
    ("path", "first"),
    [
        ("layer_0/mlp/up/kernel", KERNEL),
        ("*/mlp/up/kernel", "state/opt_state/0/mu/layer_0/mlp/up/kernel"),
        ("state/params/*/mlp/up/kernel", KERNEL),
        ("inputs", "batch/inputs"),
    ],
)
def test_the_end_of_a_path_and_a_glob_find_tensors(path: str, first: str) -> None:
    assert make_plan().explain(path).splitlines()[0].split(" ")[0] == first


def test_leaves_that_lie_alike_are_explained_once() -> None:
    text = make_plan().explain("state/params/layer_*/mlp/up/kernel")
    assert text.count("  spec ") == 1
    assert "3 more, such as state/params/layer_1/mlp/up/kernel" in text


def test_collectives_of_the_tensors_size_are_listed() -> None:
    size = 64 * 256 * 4
    plan = make_plan(
        collectives=(collective("reduce_scatter", bytes=size), collective("all_to_all", bytes=size + 1))
    )
    text = plan.explain(KERNEL)
    assert "reduce_scatter" in text and "all_to_all" not in text
    assert "reduce_scatter" not in plan.explain("batch/inputs")


@pytest.mark.parametrize(
    ("path", "near"), [("state/params/layer_0/mlp/up/kernle", KERNEL), ("input", "batch/inputs")]
)
def test_an_unknown_path_is_helped(path: str, near: str) -> None:
    with pytest.raises(ArgumentError, match="`train_step` has the path") as caught:
        make_plan().explain(path)
    assert near in str(caught.value)


def test_the_path_of_a_tree_explains_its_leaves() -> None:
    """With its parameters alone, where there are: optimizer state has the same paths."""
    assert "state/params/layer_0/mlp/up/kernel (parameter)" in make_plan().explain("layer_0/mlp/up")
    assert "batch/inputs (batch)" in make_plan().explain("batch/")
