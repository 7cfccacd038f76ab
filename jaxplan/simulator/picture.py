"""A timeline as an SVG: a row a stream, the memory below, the critical path outlined."""

from __future__ import annotations

from html import escape

from ..plans import COMPUTE
from ..units import SECONDS, format_bytes, format_seconds, round_step
from .timeline import Event, Timeline

_LEFT, _WIDTH, _ROW, _GAP, _TOP = 120, 1080, 34, 12, 92
_MEMORY = 110
_COLOURS = {
    COMPUTE: "#4c78a8", "all_gather": "#e58b2d", "all_reduce": "#d9605f", "reduce_scatter": "#b07aa1",
    "all_to_all": "#5aa157", "collective_permute": "#6fb3ae",
}  # fmt: skip
_TICKS = 8
_THINNEST = 0.15
"""Pixels: what is narrower is drawn as wide as this, so that nothing which is there looks absent."""


def timeline_picture(timeline: Timeline) -> str:
    """The picture's text; the same timeline gives the same picture."""
    rows = {stream: _TOP + i * (_ROW + _GAP) for i, stream in enumerate(timeline.streams)}
    bottom = _TOP + len(rows) * (_ROW + _GAP)
    height = bottom + _MEMORY + 46
    scale = _WIDTH / max(timeline.step_s, 1e-30)
    parts = [*_head(timeline), *_axis(timeline, scale, bottom + _MEMORY + 16)]
    for stream, y in rows.items():
        share = timeline.busy_s[stream] / max(timeline.step_s, 1e-30)
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 15}" class="label">{escape(stream)}</text>')
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 29}" class="soft label">{share:.0%} busy</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_ROW}" class="track"/>')
    for event in timeline.events:
        parts += [_bar(event, rows[stream], scale) for stream in event.task.works_on]
    parts += _loops(timeline, scale, bottom)
    parts += _memory(timeline, scale, bottom + 12)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 30} {height}" '
        f'font-family="system-ui, sans-serif">\n<style>{_STYLE}</style>\n'
        f'<rect width="100%" height="100%" class="page"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


_STYLE = (
    ".page{fill:#fff}.track{fill:#f0f1f3}.label{font-size:13px;text-anchor:end;fill:#1d2126}"
    ".soft{font-size:11px;fill:#616a75}.title{font-size:18px;font-weight:650;fill:#1d2126}"
    ".sub{font-size:13px;fill:#616a75}.tick{stroke:#d8dbe0}.critical{stroke:#1d2126;stroke-width:3}.path{fill:#1d2126}"
    ".memory{fill:#9db8d6}.loop{fill:none;stroke:#616a75;stroke-dasharray:4 3}"
)


def _head(timeline: Timeline) -> list[str]:
    hidden = timeline.comm_s - min(timeline.exposed_comm_s, timeline.comm_s)
    text = (
        f"{format_seconds(timeline.step_s)} a step, simulated: compute {format_seconds(timeline.busy_s[COMPUTE])}, "
        f"communication {format_seconds(timeline.comm_s)} ({format_seconds(hidden)} of it behind computation)"
    )
    used = list(dict.fromkeys(event.task.kind for event in timeline.events if event.task.streams))
    parts = [
        f'<text x="16" y="26" class="title">{escape(timeline.name)} on each device of ({escape(timeline.mesh)})</text>',
        f'<text x="16" y="46" class="sub">{escape(text)}</text>',
    ]
    x = 16
    for kind in used:
        parts.append(f'<rect x="{x}" y="57" width="11" height="11" fill="{_COLOURS.get(kind, "#9c755f")}"/>')
        parts.append(f'<text x="{x + 16}" y="67" class="soft">{escape(kind)}</text>')
        x += 40 + 7 * len(kind)
    parts.append(f'<line x1="{x}" x2="{x + 14}" y1="63" y2="63" class="critical"/>')
    parts.append(f'<text x="{x + 19}" y="67" class="soft">critical path</text>')
    return parts


def _bar(event: Event, y: int, scale: float) -> str:
    width = max((event.end_s - event.start_s) * scale, _THINNEST)
    task = event.task
    runs = f", {task.trips:g} runs" if task.trips != 1 else ""
    hidden = "" if task.kind == COMPUTE else f", {format_seconds(event.exposed_s)} not hidden"
    title = f"{task.name} at {task.where}: {format_seconds(event.end_s - event.start_s)}{runs}{hidden}"
    x = _LEFT + event.start_s * scale
    bar = (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}" fill="{_COLOURS.get(task.kind, "#9c755f")}">'
        f"<title>{escape(title)}</title></rect>"
    )
    if not event.critical:
        return bar
    return f'{bar}<rect x="{x:.2f}" y="{y + _ROW + 1}" width="{width:.2f}" height="3" class="path"/>'


def _loops(timeline: Timeline, scale: float, bottom: int) -> list[str]:
    """A frame around every loop that takes at least a fiftieth of the step, with its number of runs."""
    parts, began = [], list[Event]()
    for event in timeline.events:
        if event.task.kind != "barrier":
            continue
        if not event.task.name.startswith("end of "):
            began.append(event)
            continue
        first = began.pop()
        x, width = _LEFT + first.start_s * scale, (event.start_s - first.start_s) * scale
        if width >= _WIDTH / 50:
            parts.append(
                f'<rect x="{x:.1f}" y="{_TOP - 5}" width="{width:.1f}" height="{bottom - _TOP}" class="loop"/>'
                f'<text x="{x + 4:.1f}" y="{_TOP - 8}" class="soft">'
                f"{escape(first.task.name)}, {first.task.trips:g} runs</text>"
            )
    return parts


def _memory(timeline: Timeline, scale: float, top: int) -> list[str]:
    """What is alive, as an area under a line that starts at zero."""
    peak = max(timeline.peak_bytes, 1)
    points, height = [f"{_LEFT},{top + _MEMORY}"], 0.0
    for time_s, size in timeline.memory:
        x = _LEFT + time_s * scale
        points += [f"{x:.2f},{top + _MEMORY - height:.1f}"]
        height = (_MEMORY - 14) * size / peak
        points += [f"{x:.2f},{top + _MEMORY - height:.1f}"]
    points += [f"{_LEFT + _WIDTH},{top + _MEMORY - height:.1f}", f"{_LEFT + _WIDTH},{top + _MEMORY}"]
    return [
        f'<polygon points="{" ".join(points)}" class="memory"/>',
        f'<text x="{_LEFT - 10}" y="{top + 24}" class="label">memory</text>',
        f'<text x="{_LEFT - 10}" y="{top + 38}" class="soft label">{format_bytes(timeline.peak_bytes)} peak</text>',
    ]


def _axis(timeline: Timeline, scale: float, y: int) -> list[str]:
    unit, name = next((one for one in SECONDS if timeline.step_s >= one[0]), SECONDS[-1])
    step = round_step(max(timeline.step_s, 1e-30) / unit / _TICKS)
    parts = []
    for number in range(int(timeline.step_s / unit / step + 1e-9) + 1):
        x = _LEFT + number * step * unit * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 5}" y2="{y}" class="tick"/>')
        label = f"{number * step:g} {name}"
        parts.append(f'<text x="{x:.1f}" y="{y + 16}" class="soft" text-anchor="middle">{label}</text>')
    return parts
