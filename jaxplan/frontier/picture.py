"""A frontier as an SVG: memory to the right, time upwards, the device's memory as a line."""

from __future__ import annotations

from textwrap import wrap

from ..units import BYTES, SECONDS, format_bytes
from .frontier_text import proof, stakes
from .points import Frontier, FrontierPoint
from .svg import Scale, line, page, text

_LEFT, _TOP, _WIDTH, _HEIGHT = 96, 122, 760, 360

#: Letters of a line over the picture.
_LETTERS = 130

#: What a point's words take.
_NAME, _LINE = 190, 16


def frontier_picture(frontier: Frontier) -> str:
    """The picture's text; the same frontier gives the same picture."""
    points = frontier.points
    shown = [point.peak_bytes for point in points]
    # the device's memory is drawn where it is near what is drawn anyway: elsewhere it would press that together
    near = min(shown) <= frontier.memory_bytes <= 2 * max(shown) - min(shown)
    limit = frontier.memory_bytes if near else None
    across = Scale.around(min(shown), max([*shown, limit or 0]), BYTES)
    upwards = Scale.around(points[-1].step_s, points[0].step_s, SECONDS)
    low, high, fast, slow = across.low, across.high, upwards.low, upwards.high

    def x(size: float) -> float:
        return _LEFT + _WIDTH * (size - low) / (high - low)

    def y(step_s: float) -> float:
        return _TOP + _HEIGHT * (slow - step_s) / (slow - fast)

    floor = _TOP + _HEIGHT
    # of two ends neither is between them
    knee = frontier.knee if len(points) > 2 else None
    bargain = "; orange: the best bargain, farthest below the line from end to end" if knee else ""
    plans, each = (f"{len(points)} plans", "each ") if len(points) > 1 else ("one plan", "")
    said = f"{plans} on {frontier.hardware}, {each}the fastest found in its memory{bargain}"
    lines = [row for words in (said, stakes(frontier), f"proved: {proof(frontier)}") for row in wrap(words, _LETTERS)]
    parts = [
        text(16, 28, f"Frontier of {frontier.name} on ({frontier.mesh})", "title"),
        *(text(16, 48 + 16 * row, words) for row, words in enumerate(lines)),
        text(
            _LEFT + _WIDTH / 2, floor + 40,
            f"peak memory of one device, which has {format_bytes(frontier.memory_bytes)}", anchor="middle",
        ),
    ]  # fmt: skip
    for size in across.ticks:
        parts.append(line(x(size), _TOP, x(size), floor, "tick"))
        parts.append(text(x(size), floor + 18, across.words(size), anchor="middle"))
    for step_s in upwards.ticks:
        parts.append(line(_LEFT, y(step_s), _LEFT + _WIDTH, y(step_s), "tick"))
        parts.append(text(_LEFT - 8, y(step_s) + 4, upwards.words(step_s), anchor="end"))
    steps = _steps(points)
    corners = " ".join(
        f"{x(size):.1f},{y(step_s):.1f}" for size, step_s in [*steps, (high, points[-1].step_s)]
    )
    parts.append(
        f'<polygon points="{corners} {x(high):.1f},{floor} {x(steps[0][0]):.1f},{floor}" class="area"/>'
    )
    parts.append(f'<polyline points="{corners}" class="line"/>')
    if limit is not None:
        parts.append(line(x(limit), _TOP, x(limit), floor, "limit"))
        parts.append(text(x(limit) - 6, _TOP + 14, "a device", anchor="end"))
    for point in points:
        title = f"{across.words(point.peak_bytes, 1)}, {upwards.words(point.step_s, 1)}"
        radius, kind = (5, "knee") if point is knee else (3, "dot")
        at = f'cx="{x(point.peak_bytes):.1f}" cy="{y(point.step_s):.1f}"'
        parts.append(f'<circle {at} r="{radius}" class="{kind}"><title>{title}</title></circle>')
    named: list[tuple[float, float]] = []
    for point in dict.fromkeys((points[0], points[-1], *([knee] if knee else []))):
        last = point is points[-1] and len(points) > 1
        before = last and x(point.peak_bytes) - _NAME > _LEFT
        left = x(point.peak_bytes) + (-8 if before else 8)
        top = y(point.step_s) + (18 if last and y(point.step_s) + 18 < floor else -9)
        if point is knee and any(abs(left - one) < _NAME and abs(top - other) < _LINE for one, other in named):
            # the knee is beside an end, whose words would be under its own
            continue
        named.append((left, top))
        words = f"{upwards.words(point.step_s, 1)} in {across.words(point.peak_bytes, 1)}"
        parts.append(text(left, top, words, "name", "end" if before else "start"))
    width, height = _LEFT + _WIDTH + 60, _TOP + _HEIGHT + 56
    return page(width, height, parts)


def _steps(points: tuple[FrontierPoint, ...]) -> list[tuple[float, float]]:
    """The corners of the staircase: a point is the best until the next one fits."""
    corners: list[tuple[float, float]] = []
    for point in points:
        if corners:
            corners.append((point.peak_bytes, corners[-1][1]))
        corners.append((point.peak_bytes, point.step_s))
    return corners
