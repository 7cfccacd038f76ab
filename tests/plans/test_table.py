"""The printed plan: every byte and second of the plan is in it once, and no line is too long."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxplan.plans import TensorPlan
from jaxplan.plans.columns import aligned, percent, shortened
from jaxplan.plans.folding import fold_collectives, fold_tensors
from jaxplan.sharding import Layout
from tests.plans.factory import arguments, collective, cost, make_plan, shape, tensor

WHOLE = Layout(dims=((),))
CUT = Layout(dims=(("data",),))


def leaves(*paths: str, layout: Layout = WHOLE, kind: str = "parameter") -> list[TensorPlan]:
    return [tensor(path, shape(8), layout=layout, kind=kind) for path in paths]


def test_layers_fold_to_one_row_with_their_sum() -> None:
    (row,) = fold_tensors(leaves(*(f"p/layer_{i}/w" for i in range(12))))
    assert (row.pattern, row.count, row.bytes) == ("p/layer_*/w", 12, 12 * 8 * 4)


def test_layers_that_lie_otherwise_are_told_by_number() -> None:
    rows = fold_tensors(leaves("p/0/w", "p/1/w", "p/2/w", "p/5/w") + leaves("p/3/w", "p/4/w", layout=CUT))
    assert [row.pattern for row in rows] == ["p/{0-2,5}/w", "p/{3-4}/w"]


def test_a_number_that_never_varies_is_kept() -> None:
    (row,) = fold_tensors(leaves("o/0/mu/l1/w", "o/0/mu/l2/w"))
    assert row.pattern == "o/0/mu/l*/w"


def test_a_number_that_another_one_tells_apart_stands_for_all() -> None:
    rows = fold_tensors(leaves("p/0/b1", "p/1/b1") + leaves("p/0/b2", "p/1/b2", layout=CUT))
    assert [row.pattern for row in rows] == ["p/*/b1", "p/*/b2"]


def test_names_that_lie_alike_share_a_row_and_others_do_not() -> None:
    rows = fold_tensors(
        leaves("p/a/bias", "p/a/scale", "p/b/bias", "p/b/scale") + leaves("p/c/bias", layout=CUT)
    )
    assert [(row.pattern, row.count) for row in rows] == [("p/{a,b}/{bias,scale}", 4), ("p/c/bias", 1)]


def test_optimizer_leaves_join_the_parameters_that_they_lie_as() -> None:
    parameters = leaves("state/params/0/w", "state/params/1/w")
    paths = [f"state/opt/0/{moment}/{layer}/w" for moment in ("mu", "nu") for layer in (0, 1)]
    (row,) = fold_tensors(parameters + leaves(*paths, kind="optimizer"))
    assert (row.pattern, row.leaves, row.bytes) == ("state/params/*/w", "2+4", 6 * 32)
    apart = fold_tensors(parameters + leaves(*paths, kind="optimizer", layout=CUT))
    assert [(row.pattern, row.leaves) for row in apart] == [
        ("state/params/*/w", "2"),
        ("state/opt/0/{mu,nu}/*/w", "4"),
    ]


NAMES = st.sampled_from(["a", "b", "l0", "l1", "l2", "7", "w{x}"])
PATHS = st.lists(st.lists(NAMES, min_size=1, max_size=4).map("/".join), unique=True, max_size=20)


@given(PATHS, st.data())
def test_folding_loses_no_leaf_and_mixes_no_layouts(paths: list[str], data: st.DataObject) -> None:
    kinds = [data.draw(st.sampled_from(["parameter", "optimizer"])) for _ in paths]
    layouts = [data.draw(st.sampled_from([WHOLE, CUT])) for _ in paths]
    tensors = [
        tensor(path, shape(8), layout=layout, kind=kind)
        for path, layout, kind in zip(paths, layouts, kinds, strict=True)
    ]
    rows = fold_tensors(tensors)
    for layout in (WHOLE, CUT):
        mine, theirs = [r for r in rows if r.layout == layout], [t for t in tensors if t.layout == layout]
        assert sum(row.count + row.companions for row in mine) == len(theirs)
        assert sum(row.bytes for row in mine) == sum(t.bytes for t in theirs)
        assert sum(row.local_bytes for row in mine) == sum(t.local_bytes for t in theirs)


@given(
    st.lists(
        st.tuples(st.sampled_from(["all_gather", "all_reduce"]), st.sampled_from([1, 2]), st.floats(0, 1))
    )
)
def test_folding_collectives_keeps_runs_bytes_and_seconds(raw: list[tuple[str, int, float]]) -> None:
    ones = [collective(kind, bytes=size, wire_bytes=size, trips=3.0, seconds_s=s) for kind, size, s in raw]
    rows = fold_collectives(ones)
    assert sum(row.runs for row in rows) == 3 * len(ones)
    assert sum(row.wire_bytes for row in rows) == sum(3 * one.wire_bytes for one in ones)
    assert sum(row.seconds_s for row in rows) == pytest.approx(sum(one.seconds_s for one in ones))
    assert [row.seconds_s for row in rows] == sorted((row.seconds_s for row in rows), reverse=True)


@given(st.lists(st.tuples(st.text("ab/", max_size=200), st.text("xy", max_size=9)), min_size=1, max_size=5))
def test_no_line_is_wider_than_asked(rows: list[tuple[str, str]]) -> None:
    assert max(map(len, aligned(rows, right=(1,), width=60))) <= 60


def test_shortened_keeps_both_ends() -> None:
    text = "state/params/layer_11/attention/query/kernel"
    short = shortened(text, 20)
    assert len(short) == 20
    head, tail = short.split("..")
    assert text.startswith(head) and text.endswith(tail)


def test_something_is_never_called_nothing() -> None:
    assert (percent(0.0), percent(1e-9), percent(0.05), percent(1.0)) == ("0 %", "<0.1 %", "5.0 %", "100 %")


def test_the_table_names_what_a_user_asks_for() -> None:
    plan = make_plan()
    text = str(plan)
    for words in (
        "data=4, model=2 (8 devices)", "cpu-host", "1.3 ms", "6.00 MiB of 16.0 MiB", "proved optimal",
        "[parameters] state/params/", "  layer_*/mlp/up/kernel", "f32[64,256]",
        "P(None, ('data', 'model'))", "all_gather", "data+model",
        "step.py:7 (loss)",
        "optimizer state", "fsdp", "`weird_op`", "`while`",
    ):  # fmt: skip
        assert words in text, words
    assert text == str(replace(plan))


def test_optimal_is_said_only_where_it_is_proved() -> None:
    for termination in ("feasible", "time_limit", "interrupted", "template"):
        text = str(make_plan(cost=cost(termination=termination, gap=0.034)))
        assert "optimal" not in text
        assert ("3.4 %" in text) == (termination != "template")


def test_a_large_plan_stays_readable() -> None:
    many = tuple(collective(where=f"step.py:{i} (loss)", seconds_s=1e-6 * i) for i in range(50))
    deep = {f"block_with_a_long_name_{chr(97 + i)}": {"x" * i: shape(3 + i)} for i in range(26)}
    state, batch = arguments(layers=100)
    state["params"] = {**state["params"], **{f"{k}/{n}": v for k, d in deep.items() for n, v in d.items()}}
    plan = make_plan(args=(state, batch), collectives=many, warnings=("long " * 60,))
    lines = str(plan).splitlines()
    assert len(lines) < 120
    assert max(map(len, lines)) <= 120
    assert any("and 30 shorter rows" in line for line in lines)


def test_an_empty_plan_prints() -> None:
    plan = make_plan(
        inputs=(), outputs=(), collectives=(), constraints=(), templates={}, alternatives={}, warnings=(),
        assumptions=(), cost=cost(step_s=0.0, compute_s=0.0, exposed_comm_s=0.0, peak_bytes=0, peak_parts={}),
    )  # fmt: skip
    assert "none: no device waits for another" in str(plan)
