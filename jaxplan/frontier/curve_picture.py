"""A curve as an SVG: devices to the right, step time upwards, both by equal factors; what perfect scaling would be."""

from __future__ import annotations

import math

from ..units import format_bytes, format_seconds
from .counts import Curve
from .svg import line, page, text

_LEFT, _TOP, _WIDTH, _HEIGHT = 96, 74, 760, 360


def curve_picture(curve: Curve) -> str:
    """The picture's text; the same curve gives the same picture."""
    points, first = curve.points, curve.points[0]
    counts = [*(few.devices for few in curve.too_few), *(point.devices for point in points)]
    perfect = [first.step_s * first.devices / point.devices for point in points]
    times = [*(point.step_s for point in points), *perfect]
    # a whole factor of two at least, or there is nothing to scale by
    low, high = math.log2(min(times)) - 0.3, max(math.log2(max(times)) + 0.3, math.log2(min(times)) + 0.7)
    few, many = math.log2(min(counts)) - 0.3, math.log2(max(counts)) + 0.6

    def x(devices: float) -> float:
        return _LEFT + _WIDTH * (math.log2(devices) - few) / (many - few)

    def y(step_s: float) -> float:
        return _TOP + _HEIGHT * (high - math.log2(step_s)) / (high - low)

    floor = _TOP + _HEIGHT
    parts = [
        text(16, 28, f"{curve.name}: best step time on {curve.hardware}", "title"),
        text(
            16, 48,
            f"at most {format_bytes(curve.memory_bytes)} a device, each number of devices on its best mesh; dashed: "
            f"perfect scaling from {first.devices}",
        ),
        text(_LEFT + _WIDTH / 2, floor + 40, "devices", anchor="middle"),
    ]  # fmt: skip
    for devices in sorted(set(counts)):
        parts.append(line(x(devices), _TOP, x(devices), floor, "tick"))
        parts.append(text(x(devices), floor + 18, str(devices), anchor="middle"))
    for step_s in _ticks(2.0**low, 2.0**high):
        parts.append(line(_LEFT, y(step_s), _LEFT + _WIDTH, y(step_s), "tick"))
        parts.append(text(_LEFT - 8, y(step_s) + 4, format_seconds(step_s), anchor="end"))
    ideal = " ".join(f"{x(p.devices):.1f},{y(s):.1f}" for p, s in zip(points, perfect, strict=True))
    parts.append(f'<polyline points="{ideal}" class="ideal"/>')
    parts.append(
        f'<polyline points="{" ".join(f"{x(p.devices):.1f},{y(p.step_s):.1f}" for p in points)}" class="line"/>'
    )
    for point, after in zip(points, [*points[1:], None], strict=True):
        # beside the line that leads on: over it where it falls, under it where it rises
        top = y(point.step_s) + (18 if after and after.step_s > point.step_s else -16)
        parts.append(f'<circle cx="{x(point.devices):.1f}" cy="{y(point.step_s):.1f}" r="4" class="dot"/>')
        mesh = "mesh " + " x ".join(str(size) for _, size in point.axes)
        parts.append(text(x(point.devices) + 7, top, format_seconds(point.step_s), "name"))
        parts.append(text(x(point.devices) + 7, top + 13, mesh))
    for one in curve.too_few:
        parts.append(text(x(one.devices), floor - 10, "too few", "warn", "middle"))
    return page(_LEFT + _WIDTH + 60, floor + 56, parts)


def _ticks(low_s: float, high_s: float) -> list[float]:
    """Round times within, by factors of about two."""
    powers = range(math.floor(math.log10(low_s)), math.ceil(math.log10(high_s)) + 1)
    rounded = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    return [step_s for step_s in rounded if low_s <= step_s <= high_s]
