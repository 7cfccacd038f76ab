"""results.json -> the tables of README.md, between its two marks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- written by run.py -->", "<!-- end -->"


def write_readme(path: Path, results: Mapping[str, Any], cases: Mapping[str, str]) -> None:
    """Replace what stands between the marks of the file at `path`; `cases`: name -> description, in order."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    tables = "\n".join(_tables(results, cases))
    path.write_text(f"{before}{BEGIN}\n\n{tables}\n{END}{after}", encoding="utf-8")


def _tables(results: Mapping[str, Any], cases: Mapping[str, str]) -> Iterator[str]:
    for mesh, by_case in results["rows"].items():
        yield from (f"## Mesh {mesh}", "", *_summary(by_case, cases), "")
        for name, what in cases.items():
            if name in by_case:
                yield from (f"### {name} on {mesh}", "", what + ".", "", *_plans(by_case[name]), "")


def _summary(by_case: Mapping[str, Any], cases: Mapping[str, str]) -> Iterator[str]:
    yield (
        "| case | best by hand | step, ms | jaxplan, ms | against it | predicted step, ms | memory, MB "
        "| predicted |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for name in cases:
        rows = by_case.get(name, {})
        by_hand = {plan: row["step_ms"] for plan, row in rows.items() if not plan.startswith("jaxplan")}
        if not by_hand or "jaxplan" not in rows:
            continue
        best = min(by_hand, key=by_hand.__getitem__)
        own = rows["jaxplan"]
        promised = own["predicted"]
        yield (
            f"| {name} | {best} | {by_hand[best]:.2f} | {own['step_ms']:.2f} "
            f"| {own['step_ms'] / by_hand[best] - 1:+.1%} | {promised['step_ms']:.2f} "
            f"| {own['memory_mb']:.0f} | {promised['memory_mb']:.0f} |"
        )


def _plans(rows: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "| plan | compile, s | compute, ms | communication, ms | step, ms | sent, MB | memory, MB "
        "| involuntary remat |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for plan, row in rows.items():
        yield (
            f"| {plan} | {row['compile_s']:.0f} | {row['compute_ms']:.2f} | {row['comm_ms']:.2f} "
            f"| {row['step_ms']:.2f} | {row['comm_bytes'] / 1e6:.0f} | {row['memory_mb']:.0f} "
            f"| {row['involuntary_rematerialisations']} |"
        )
        if "predicted" in row:
            promised = row["predicted"]
            yield (
                f"| {plan}, predicted ({promised['search']}, {promised['termination']}) | "
                f"| {promised['compute_ms']:.2f} | {promised['comm_ms']:.2f} | {promised['step_ms']:.2f} "
                f"| {promised['comm_bytes'] / 1e6:.0f} | {promised['memory_mb']:.0f} | |"
            )
