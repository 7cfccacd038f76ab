"""results.jsonl -> the tables of README.md, between its two marks, and page.html with pictures.

python experiments/quality/page.py
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ordering import errors, kendall
from pictures import STYLE, Point, beside_templates, predicted_over_compiled
from timing_tables import tight_table, timing_rows, timing_table, wall_table

HERE = Path(__file__).parent
BEGIN, END = "<!-- written by page.py -->", "<!-- end -->"
OWN, BY_HAND = "jaxplan", " by hand"
_ORDERED = 4
"""Plans of one case from which on their order says something."""

_WITHOUT_SCRATCH = "2026-11-24"
"""Since when plans have none of sums over devices."""

_RIVALS = 3
"""Templates of one case from which on the best of them is a rival."""
Row = dict[str, Any]


def latest(found: Iterable[Row]) -> list[Row]:
    """The last row of each (case, target, mesh, plan, budget), whole programs before partly compiled ones."""
    rows: dict[tuple[Any, ...], Row] = {}
    for row in found:
        key = tuple(row[name] for name in ("case", "target", "mesh", "plan", "budget"))
        if "predicted" in row and "failed" not in row["compiled"]:
            if key not in rows or row["whole"] >= rows[key]["whole"]:
                rows[key] = row
    return sorted(
        rows.values(),
        key=lambda row: (row["target"], row["mesh"], row["case"], row["plan"] != OWN, row["plan"]),
    )


def by_hand(rows: Iterable[Row], own: Row) -> dict[str, float]:
    """Seconds of the templates of a case whose arguments' shardings alone are given; what compiles, by name."""
    return {
        row["plan"].removesuffix(BY_HAND): row["compiled"]["compute_s"] + row["compiled"]["comm_s"]
        for row in rows
        if row["plan"].endswith(BY_HAND) and _same_case(row, own) and "compute_s" in row.get("compiled", {})
    }


def floor(rows: Iterable[Row], own: Row) -> float:
    """Seconds of the least computation of all plans of a case that were compiled, nothing sent."""
    return min(
        row["compiled"]["compute_s"]
        for row in rows
        if _same_case(row, own) and "compute_s" in row.get("compiled", {})
    )


def _same_case(row: Row, own: Row) -> bool:
    return all(row[name] == own[name] for name in ("case", "target", "mesh", "budget"))


def memory_ratio(row: Row) -> float:
    """Predicted over compiled peak, without the scratch of sums that plans once counted and programs do not have."""
    said = row["predicted"]["peak_bytes"]
    if not row["whole"] and row.get("predicted_on", row["date"]) < _WITHOUT_SCRATCH:
        said -= row["predicted"]["peak_parts"].get("scratch", 0)
    return float(said / row["compiled"]["peak_bytes"])


def sent_ratio(row: Row) -> float:
    """Predicted over compiled bytes that a device sends."""
    said, made = (
        sum(c["wire_bytes"] for c in row[side]["collectives"]) for side in ("predicted", "compiled")
    )
    return float(said / made) if made else 1.0


def seconds(row: Row) -> tuple[float, float] | None:
    """(predicted, yardstick's) seconds of a step, None where compilation stopped before the compiler's cycles."""
    made = row["compiled"]
    said = row["predicted"]
    if "compute_s" not in made or "compute_s" not in said:
        return None
    return said["compute_s"] + said["comm_s"], made["compute_s"] + made["comm_s"]


def _ratios(pairs: Iterable[tuple[float, float]]) -> str:
    ratios = [one / other for one, other in pairs]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    return f"{len(ratios)} cases: geometric mean {mean:.3f}, worst {max(ratios):.3f}"


def summary(rows: Sequence[Row], found: Sequence[Row]) -> Iterator[str]:
    """What the bars are about, a line each, of the `latest` rows of all that were `found`."""
    for target in sorted({row["target"] for row in rows}):
        of = [row for row in rows if row["target"] == target]
        yield f"- {target}, memory: {errors([memory_ratio(row) for row in of])}"
        yield f"- {target}, bytes sent: {errors([sent_ratio(row) for row in of])}"
        timed = [pair for pair in map(seconds, of) if pair]
        if timed:
            scale = statistics.median(made / said for said, made in timed)
            yield (
                f"- {target}, seconds, times one scale of {scale:.2f}: "
                f"{errors([said * scale / made for said, made in timed])}"
            )
    for case, target, mesh in sorted({(row["case"], row["target"], row["mesh"]) for row in rows}):
        plans = [row for row in rows if (row["case"], row["target"], row["mesh"]) == (case, target, mesh)]
        pairs = [pair for pair in map(seconds, plans) if pair]
        if len(pairs) >= _ORDERED:
            yield f"- {case} on {target}, {mesh}: Kendall's tau of {len(pairs)} plans {kendall(pairs):.2f}"
    own = [row for row in rows if row["plan"] == OWN]
    yield f"- our own plans, memory: {errors([memory_ratio(row) for row in own])}"
    yield f"- our own plans, bytes sent: {errors([sent_ratio(row) for row in own])}"
    yield f"- all, memory: {errors([memory_ratio(row) for row in rows])}"
    yield f"- all, bytes sent: {errors([sent_ratio(row) for row in rows])}"
    against = list(rivals(rows))
    if against:
        yield f"- our plan over the best template, as compiled: {_ratios((own, other) for _, own, _, other in against)}"
        floors = [(floor(found, row), other) for row, _, _, other in against]
        yield f"- the floor under any plan (see below) over the best template: {_ratios(floors)}"
        hands = [(own, min(hand.values())) for row, own, _, _ in against if (hand := by_hand(found, row))]
        if hands:
            yield f"- our plan over the best template whose arguments alone are given: {_ratios(hands)}"


def templates(rows: Sequence[Row], row: Row) -> dict[str, float]:
    """The seconds of the templates of a row's case that were priced."""
    return {
        other["plan"]: pair[1]
        for other in rows
        if other["plan"] != OWN and _same_case(other, row)
        if (pair := seconds(other))
    }


def rivals(rows: Sequence[Row]) -> Iterator[tuple[Row, float, str, float]]:
    """(our row, its seconds, the best template's name, its seconds), where enough templates were priced."""
    for row in rows:
        own, others = seconds(row) if row["plan"] == OWN else None, templates(rows, row)
        if own and len(others) >= _RIVALS:
            best = min(others, key=others.__getitem__)
            yield row, own[1], best, others[best]


def tables(rows: Sequence[Row], found: Sequence[Row]) -> Iterator[str]:
    """The README's part."""
    yield from summary(rows, found)
    timed = timing_rows()
    if timed:
        yield from ("", "Order and error of some twenty plans a model (`timing.py`):", "", *timing_table(timed))
    yield from ("", "Forced host devices (`walltime.py`):", "", *wall_table())
    yield from ("", "Budgets of 60 % of what data parallelism needs, as predicted (`tight.py`):", "", *tight_table())
    yield from (
        "",
        "| case | target | ours, ms | best template | its ms | ratio | floor over it | best by hand | its ms | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    )
    for row, own, best, other in rivals(rows):
        hand = by_hand(found, row)
        first = min(hand, key=hand.__getitem__, default=None)
        last = "| | |" if first is None else f"{first} | {hand[first] * 1e3:.2f} | {own / hand[first]:.3f} |"
        yield (
            f"| {row['case']} | {row['target']}, {row['mesh']} | {own * 1e3:.2f} | {best} | {other * 1e3:.2f} "
            f"| {own / other:.3f} | {floor(found, row) / other:.3f} | {last}"
        )
    yield from (
        "",
        "| case | target | plan | step, ms | predicted | sent, MB | predicted | memory, MB | predicted |",
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        pair = seconds(row)
        said, made = (
            sum(c["wire_bytes"] for c in row[s]["collectives"]) / 1e6 for s in ("predicted", "compiled")
        )
        step = f"{pair[1] * 1e3:.2f} | {pair[0] * 1e3:.2f}" if pair else "| "
        peak = row["compiled"]["peak_bytes"] / 1e6
        yield (
            f"| {row['case']} | {row['target']}, {row['mesh']} | {row['plan']} | {step} | {made:.0f} | {said:.0f} "
            f"| {peak:.0f} | {memory_ratio(row) * peak:.0f} |"
        )


def page(rows: Sequence[Row], found: Sequence[Row]) -> str:
    """The pictures, and the summary."""
    name = [f"{row['case']} {row['plan']}" for row in rows]
    memory, sent, timed = [], [], []
    for row, label in zip(rows, name, strict=True):
        peak = row["compiled"]["peak_bytes"] / 1e9
        memory.append(Point(peak, memory_ratio(row) * peak, label, row["target"]))
        made = sum(c["wire_bytes"] for c in row["compiled"]["collectives"]) / 1e6
        if made:
            sent.append(Point(made, sent_ratio(row) * made, label, row["target"]))
        if pair := seconds(row):
            timed.append(Point(pair[1] * 1e3, pair[0] * 1e3, label, row["target"]))
    figures = [predicted_over_compiled("Peak memory of a device", "GB", memory)]
    figures.append(predicted_over_compiled("Sent by a device in a step", "MB", sent))
    if timed:
        figures.append(predicted_over_compiled("Step time, no scale", "ms", timed))
    cases = [
        (f"{row['case']}, {row['target']}, {row['mesh']}", own, times)
        for row in rows
        if (own := seconds(row)) and row["plan"] == OWN and (times := templates(rows, row))
    ]
    if cases:
        figures.append(beside_templates("Templates beside our plan", [(c, own[1], times) for c, own, times in cases]))
    said = "".join(f"<li>{line[2:]}</li>" for line in summary(rows, found))
    return (
        "<!doctype html><meta charset=utf-8><title>Plans as compiled</title>"
        f"<style>body{{font:15px system-ui,sans-serif;margin:2em}}{STYLE}</style><h1>Plans as compiled</h1>"
        f"{''.join(figures)}<ul>{said}</ul>"
    )


def main() -> None:
    found = [json.loads(line) for line in (HERE / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = latest(found)
    readme = HERE / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    text = "\n".join(tables(rows, found))
    readme.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")
    (HERE / "page.html").write_text(page(rows, found), encoding="utf-8")
    print("\n".join(summary(rows, found)))


if __name__ == "__main__":
    main()
