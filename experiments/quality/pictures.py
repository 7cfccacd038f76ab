"""The pictures of page.html, as SVG: predictions over what was compiled, and our plans beside the templates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

_SIZE, _LEFT, _TOP, _ROW, _NAME = 420, 70, 40, 26, 170
_COLOURS = ("#2f6db5", "#e58b2d", "#3d8f58", "#a0509c", "#616a75")

OFF, _NAMED = 0.1, 10
"""Of the points of a case and group that are off by more the worst is named, and of those so many; the page names a
point that is pointed at."""

STYLE = (
    "svg{font:12px system-ui,sans-serif;display:inline-block;vertical-align:top;margin:8px 24px 8px 0}"
    ".title{font-size:15px;font-weight:650}.soft{fill:#616a75}.tick{stroke:#e3e5e8}.even{stroke:#333}"
    ".band{fill:#2a6fb0;opacity:.09}"
)


class Point(NamedTuple):
    """What was predicted of one plan and what was compiled, in one unit; `group` decides its colour."""

    made: float
    said: float
    name: str
    group: str


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start", fill: str = "") -> str:
    colour = f' fill="{fill}"' if fill else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}"{colour}>{escape(words)}</text>'


def _ticks(low: float, high: float) -> Iterator[float]:
    """1, 2, 5, 10 ... between two values; powers of ten alone where those are many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1,) if len(decades) > 4 else (1, 2, 5)
    yield from (value for power in decades for step in steps if low <= (value := step * 10.0**power) <= high)


def _colours(groups: Sequence[str]) -> dict[str, str]:
    return {group: _COLOURS[at % len(_COLOURS)] for at, group in enumerate(sorted(set(groups)))}


def predicted_over_compiled(title: str, unit: str, points: Sequence[Point]) -> str:
    """Both axes logarithmic; on the line the prediction is right, within the band it is off by 10 % at most."""
    low = min(min(p.made, p.said) for p in points) / 1.4
    high = max(max(p.made, p.said) for p in points) * 1.4
    span = math.log(high / low)
    floor = _TOP + _SIZE

    def x(value: float) -> float:
        return _LEFT + _SIZE * math.log(value / low) / span

    def y(value: float) -> float:
        return floor - _SIZE * math.log(value / low) / span

    up, down = 1 + OFF, 1 - OFF
    corners = [(low, low), (low, low * up), (high / up, high), (high, high), (high, high * down), (low / down, low)]
    band = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in corners)
    parts = [_text(_LEFT, 20, title, "title"), f'<polygon points="{band}" class="band"/>']
    for value in _ticks(low, high):
        parts.append(f'<line x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{_TOP}" y2="{floor}" class="tick"/>')
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + _SIZE}" y1="{y(value):.1f}" y2="{y(value):.1f}" class="tick"/>')
        parts.append(_text(x(value), floor + 16, f"{value:g}", "soft", "middle"))
        parts.append(_text(_LEFT - 6, y(value) + 4, f"{value:g}", "soft", "end"))
    parts.append(f'<line x1="{_LEFT}" y1="{floor}" x2="{_LEFT + _SIZE}" y2="{_TOP}" class="even"/>')
    parts.append(_text(_LEFT + _SIZE / 2, floor + 34, f"compiled, {unit}", "soft", "middle"))
    parts.append(f'<g transform="translate(18 {_TOP + _SIZE / 2}) rotate(-90)">')
    parts.append(_text(0, 0, f"predicted, {unit}", "soft", "middle") + "</g>")
    colours = _colours([p.group for p in points])
    for p in points:
        told = f"{p.name}: compiled {p.made:.4g} {unit}, predicted {p.said:.4g}"
        parts.append(
            f'<circle cx="{x(p.made):.1f}" cy="{y(p.said):.1f}" r="4" fill="{colours[p.group]}" fill-opacity=".65">'
            f"<title>{escape(told)}</title></circle>"
        )
    taken: list[float] = []
    for p in sorted(_worst(points), key=lambda p: -p.said):
        # Under the line to the right of the point; over it to the left, where that has room.
        right = p.said < p.made or x(p.made) < _LEFT + _NAME
        place = y(p.said) + 4
        while any(abs(place - other) < 12 for other in taken):
            place += 12
        taken.append(place)
        words = f"{p.name} {p.said / p.made - 1:+.0%}"
        aside, anchor = (9, "start") if right else (-9, "end")
        parts.append(_text(x(p.made) + aside, place, words, "", anchor, colours[p.group]))
    for at, (group, colour) in enumerate(colours.items()):
        parts.append(_text(_LEFT + 10, _TOP + 18 + 16 * at, group, "", "start", colour))
    return _svg(_LEFT + _SIZE + 190, floor + 46, parts)


def _worst(points: Sequence[Point]) -> list[Point]:
    """The points that are named."""
    of_case: dict[tuple[str, str], Point] = {}
    for p in sorted(points, key=_off):
        of_case[p.name.split()[0], p.group] = p
    return [p for p in sorted(of_case.values(), key=_off)[-_NAMED:] if abs(p.said / p.made - 1) > OFF]


def _off(point: Point) -> float:
    return abs(math.log(point.said / point.made))


def beside_templates(title: str, cases: Sequence[tuple[str, float, dict[str, float]]]) -> str:
    """A line for each (case, our seconds, {template: its seconds}): every template by how much longer it takes."""
    left, width = 230, 620
    most = max([1.25, *(s / own for _, own, others in cases for s in others.values())])
    low, high = math.log(0.9), math.log(min(most, 8.0) * 1.05)
    floor = _TOP + _ROW * len(cases) + 10

    def x(ratio: float) -> float:
        return left + width * (math.log(min(ratio, 8.0)) - low) / (high - low)

    parts = [_text(8, 20, title, "title")]
    for ratio in (0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 8.0):
        if math.log(ratio) <= high:
            kind = "even" if ratio == 1 else "tick"
            parts.append(f'<line x1="{x(ratio):.1f}" x2="{x(ratio):.1f}" y1="{_TOP}" y2="{floor}" class="{kind}"/>')
            parts.append(_text(x(ratio), floor + 16, f"{ratio:g}", "soft", "middle"))
    parts.append(_text(left + width / 2, floor + 34, "times as long as our plan takes, as compiled", "soft", "middle"))
    colours = _colours([name for _, _, others in cases for name in others])
    for at, (case, own, others) in enumerate(cases):
        middle = _TOP + _ROW * (at + 0.5) + 5
        parts.append(_text(left - 14, middle + 4, case, "", "end"))
        for name, seconds in others.items():
            told = escape(f"{name}: {seconds / own:.3f} times {own * 1e3:.2f} ms")
            place = f'cx="{x(seconds / own):.1f}" cy="{middle:.1f}"'
            parts.append(
                f'<circle {place} r="5" fill="{colours[name]}" fill-opacity=".75"><title>{told}</title></circle>'
            )
    for at, (name, colour) in enumerate(colours.items()):
        parts.append(_text(left + 100 * at, _TOP - 6, name, "", "start", colour))
    return _svg(left + width + 30, floor + 46, parts)


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>' + "".join(parts) + "</svg>"
