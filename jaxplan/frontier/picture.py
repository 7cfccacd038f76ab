"""A frontier as an SVG: memory to the right, time upwards, the device's memory as a line."""

from __future__ import annotations

from ..units import format_bytes, format_seconds
from .points import Frontier, FrontierPoint
from .svg import line, page, text

_LEFT, _TOP, _WIDTH, _HEIGHT = 96, 74, 760, 360


def frontier_picture(frontier: Frontier) -> str:
    """The picture's text; the same frontier gives the same picture."""
    points = frontier.points
    shown = [point.peak_bytes for point in points]
    # the device's memory is drawn where it is near what is drawn anyway
    limit = frontier.memory_bytes if frontier.memory_bytes <= 2 * max(shown) else None
    low, high = _room(min(shown), max([*shown, limit or 0]))
    fast, slow = _room(points[-1].step_s, points[0].step_s)

    def x(size: float) -> float:
        return _LEFT + _WIDTH * (size - low) / (high - low)

    def y(step_s: float) -> float:
        return _TOP + _HEIGHT * (slow - step_s) / (slow - fast)

    floor = _TOP + _HEIGHT
    parts = [
        text(16, 28, f"Frontier of {frontier.name} on ({frontier.mesh})", "title"),
        text(
            16,
            48,
            f"{len(points)} plans on {frontier.hardware}, {frontier.method}: each the fastest in its memory",
        ),
        text(_LEFT + _WIDTH / 2, floor + 40, "peak memory of one device", anchor="middle"),
    ]
    for part in range(6):
        size, step_s = low + (high - low) * part / 5, fast + (slow - fast) * part / 5
        parts.append(line(x(size), _TOP, x(size), floor, "tick"))
        parts.append(text(x(size), floor + 18, format_bytes(size), anchor="middle"))
        parts.append(line(_LEFT, y(step_s), _LEFT + _WIDTH, y(step_s), "tick"))
        parts.append(text(_LEFT - 8, y(step_s) + 4, format_seconds(step_s), anchor="end"))
    steps = _steps(points)
    corners = " ".join(
        f"{x(size):.1f},{y(step_s):.1f}" for size, step_s in [*steps, (high, points[-1].step_s)]
    )
    floor = _TOP + _HEIGHT
    parts.append(
        f'<polygon points="{corners} {x(high):.1f},{floor} {x(steps[0][0]):.1f},{floor}" class="area"/>'
    )
    parts.append(f'<polyline points="{corners}" class="line"/>')
    if limit is not None:
        parts.append(line(x(limit), _TOP, x(limit), floor, "limit"))
        parts.append(text(x(limit) - 6, _TOP + 14, "a device", anchor="end"))
    knee = frontier.knee
    for point in points:
        title = f"{format_bytes(point.peak_bytes)}, {format_seconds(point.step_s)}"
        radius, kind = (5, "knee") if point is knee else (3, "dot")
        at = f'cx="{x(point.peak_bytes):.1f}" cy="{y(point.step_s):.1f}"'
        parts.append(f'<circle {at} r="{radius}" class="{kind}"><title>{title}</title></circle>')
    for point in dict.fromkeys((points[0], knee, points[-1])):
        words = f"{format_seconds(point.step_s)} in {format_bytes(point.peak_bytes)}"
        last = point is points[-1] and len(points) > 1
        left = x(point.peak_bytes) + (-8 if last else 8)
        parts.append(text(left, y(point.step_s) - 9, words, "name", "end" if last else "start"))
    width, height = _LEFT + _WIDTH + 60, _TOP + _HEIGHT + 56
    return page(width, height, parts)


def _room(low: float, high: float) -> tuple[float, float]:
    """A range a little wider than what is drawn in it."""
    margin = max((high - low) * 0.08, high * 0.02)
    return max(low - margin, 0.0), high + margin


def _steps(points: tuple[FrontierPoint, ...]) -> list[tuple[float, float]]:
    """The corners of the staircase: a point is the best until the next one fits."""
    corners: list[tuple[float, float]] = []
    for point in points:
        if corners:
            corners.append((point.peak_bytes, corners[-1][1]))
        corners.append((point.peak_bytes, point.step_s))
    return corners
