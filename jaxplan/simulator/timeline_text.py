"""A timeline in the terminal: where the step's time goes, and which communication nothing hides."""

from __future__ import annotations

from ..plans import COMPUTE
from ..units import format_bytes, format_seconds
from .timeline import Event, Timeline

_ROWS = 12
"""Collectives that are listed before the rest is summed."""

_WIDTH = 72
"""Characters of a stream's row."""


def timeline_text(timeline: Timeline) -> str:
    """The streams as rows of characters, then the collectives that keep the compute unit waiting longest."""
    whole = max(timeline.step_s, 1e-30)
    exposed = timeline.exposed_comm_s / whole
    lines = [
        f"{timeline.name} on ({timeline.mesh}): {format_seconds(timeline.step_s)} a step, simulated",
        f"  compute {format_seconds(timeline.busy_s[COMPUTE])}; communication {format_seconds(timeline.comm_s)}, of "
        f"which {format_seconds(timeline.exposed_comm_s)} ({_share(exposed)} of the step) is not hidden; "
        f"peak memory {format_bytes(timeline.peak_bytes)}",
        "",
    ]
    label = max(len(name) for name in timeline.streams)
    for stream in timeline.streams:
        lines.append(
            f"  {stream:<{label}} |{_row(timeline, stream)}| {timeline.busy_s[stream] / whole:4.0%} busy"
        )
    lines += ["", *_waits(timeline)]
    return "\n".join(lines)


def _share(part: float) -> str:
    """In percent, of small ones a digit more: what is there is not called 0."""
    return f"{part:.0%}" if part == 0 or part >= 0.0995 else f"{part:.1%}"


def _row(timeline: Timeline, stream: str) -> str:
    """One character a `_WIDTH`-th of the step: how much of it the stream works."""
    filled = [0.0] * _WIDTH
    scale = _WIDTH / max(timeline.step_s, 1e-30)
    for event in timeline.events:
        if stream in event.task.works_on and event.end_s > event.start_s:
            first, last = event.start_s * scale, event.end_s * scale
            for cell in range(int(first), min(int(last), _WIDTH - 1) + 1):
                filled[cell] += max(min(last, cell + 1) - max(first, cell), 0.0)
    return "".join(" .:-=+*#"[min(int(share * 7.999), 7)] for share in filled)


def _waits(timeline: Timeline) -> list[str]:
    """The collectives by how long each is not hidden, equal ones together."""
    groups: dict[tuple[str, str], list[Event]] = {}
    for event in timeline.events:
        if event.task.streams and event.task.kind != COMPUTE:
            groups.setdefault((event.task.name, event.task.where), []).append(event)
    rows = [
        (
            sum(e.exposed_s for e in events),
            sum(e.end_s - e.start_s for e in events),
            sum(e.task.trips for e in events),
            name,
            where,
        )
        for (name, where), events in groups.items()
    ]
    if not rows:
        return ["  nothing is communicated"]
    rows.sort(key=lambda row: (-row[0], -row[1], row[3], row[4]))
    lines = [f"  {'not hidden':>10} {'in all':>10} {'runs':>7}  collective, at"]
    for bare_s, all_s, runs, name, where in rows[:_ROWS]:
        lines.append(
            f"  {format_seconds(bare_s):>10} {format_seconds(all_s):>10} {runs:>7g}  {name}, {where}"
        )
    if len(rows) > _ROWS:
        rest = rows[_ROWS:]
        lines.append(
            f"  {format_seconds(sum(r[0] for r in rest)):>10} {format_seconds(sum(r[1] for r in rest)):>10} "
            f"{sum(r[2] for r in rest):>7g}  {len(rest)} more"
        )
    return lines
