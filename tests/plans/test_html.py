"""The page is well-formed, stands alone, and shows what the plan says."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from jaxplan.plans import Plan
from jaxplan.plans.drawings import mesh_drawing
from jaxplan.plans.html import plan_page
from jaxplan.sharding import Layout
from tests.plans.factory import AXES, cost, make_plan

_VOID = {"meta"}


class Checked(HTMLParser):
    """Fails on a tag that is closed wrongly, and collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        self.text += data


def read(plan: Plan) -> Checked:
    parser = Checked()
    parser.feed(plan_page(plan))
    parser.close()
    assert parser.open == []
    return parser


def test_it_says_what_the_plan_says() -> None:
    text = read(make_plan()).text
    for words in (
        "train_step", "data=4, model=2 (8 devices)", "1.3 ms", "6.00 MiB", "proved optimal", "all_gather",
        "state/params/layer_*/mlp/up/kernel", "P(None, ('data', 'model'))", "weird_op",
        "fsdp", "+15.4 %", "step.py:7 (loss)",
    ):  # fmt: skip
        assert words in text, words


def test_it_stands_alone() -> None:
    page = plan_page(make_plan())
    assert "script" not in read(make_plan()).tags
    assert not re.search(r"(src|href|url|@import|https?:)\b", page)


def test_names_are_text_and_never_markup() -> None:
    plan = make_plan(name="<b>&", hardware="<i>", warnings=("<script>",), assumptions=("<u>",))
    assert {"b", "i", "script", "u"} & read(plan).tags <= {"b", "i"}  # the page's own
    assert "<b>&" in read(plan).text and "<script>" in read(plan).text


def test_the_same_plan_gives_the_same_page(tmp_path: Path) -> None:
    make_plan().to_html(tmp_path / "a.html")
    make_plan().to_html(tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_a_plan_of_nothing_is_still_a_page() -> None:
    empty = make_plan(
        inputs=(), outputs=(), collectives=(), constraints=(), templates={}, alternatives={}, warnings=(),
        assumptions=(), axes=(),
        cost=cost(step_s=0.0, comm_s=0.0, peak_bytes=0, peak_parts={}, comm_s_by_axis={}),
    )  # fmt: skip
    assert "no device waits" in read(empty).text


@pytest.mark.parametrize(
    ("dims", "rows"),
    [
        (((), ()), ["0000", "0000"]),
        ((("data",), ()), ["0123", "0123"]),
        (((), ("model",)), ["0000", "1111"]),
        ((("data", "model"), ()), ["0246", "1357"]),
        ((("model",), ("data",)), ["0123", "4567"]),
    ],
)
def test_devices_of_one_piece_have_one_shade(dims: tuple[tuple[str, ...], ...], rows: list[str]) -> None:
    drawing = mesh_drawing(Layout(dims=dims), AXES)
    cells = re.findall(r'x="(\d+)" y="(\d+)".*?fill-opacity="([\d.]+)"', drawing)
    shades = sorted({float(shade) for *_, shade in cells})
    drawn = ["", ""]
    for _, y, shade in sorted(cells, key=lambda cell: (int(cell[1]), int(cell[0]))):
        drawn[int(y) > 0] += str(shades.index(float(shade)))
    assert drawn == rows


def test_a_large_mesh_is_drawn_by_its_corner() -> None:
    drawing = mesh_drawing(Layout(dims=(("data",),)), (("data", 256), ("model", 64)))
    assert drawing.count("<rect") == 64
    assert "first corner of the mesh" in drawing
