"""A timeline as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

The format: "Trace Event Format", complete events ("ph": "X") with times in microseconds, counters ("ph": "C") and the
names of threads as metadata ("ph": "M").
"""

from __future__ import annotations

import json
import os
from typing import Any

from .timeline import Timeline


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """The events: one thread a stream, a counter for memory."""
    threads = {stream: number for number, stream in enumerate(timeline.streams)}
    rows: list[dict[str, Any]] = [
        {
            "ph": "M",
            "pid": 0,
            "tid": 0,
            "name": "process_name",
            "args": {"name": f"{timeline.name}: each device"},
        }
    ]
    for stream, number in threads.items():
        rows.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": stream}})
        rows.append(
            {"ph": "M", "pid": 0, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}
        )
    for event in timeline.events:
        for stream in event.task.works_on:
            rows.append(
                {
                    "ph": "X", "pid": 0, "tid": threads[stream], "name": event.task.name, "cat": event.task.kind,
                    "ts": event.start_s * 1e6, "dur": (event.end_s - event.start_s) * 1e6,
                    "args": {"where": event.task.where, "runs": event.task.trips, "critical": event.critical},
                }
            )  # fmt: skip
    for time_s, size in timeline.memory:
        rows.append(
            {
                "ph": "C",
                "pid": 0,
                "tid": 0,
                "name": "memory (GiB)",
                "ts": time_s * 1e6,
                "args": {"alive": size / 2**30},
            }
        )
    return rows


def write_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write the trace as JSON."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": trace_events(timeline), "displayTimeUnit": "ms"}, file)
        file.write("\n")
