"""timing.jsonl, walltime.json and tight.jsonl -> tables: is the order of plans kept, how far is each off, what fits."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ordering import errors, kendall

HERE = Path(__file__).parent
Pairs = list[tuple[float, float]]


def timing_rows(path: Path = HERE / "timing.jsonl") -> list[dict[str, Any]]:
    """The last row of each (target, case, plan)."""
    if not path.exists():
        return []
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return list({(row["target"], row["case"], row["plan"]): row for row in rows}.values())


def _both(row: dict[str, Any]) -> tuple[float, float]:
    said, made = row["predicted"], row["compiled"]
    return said["compute_s"] + said["comm_s"], made["compute_s"] + made["comm_s"]


def _off(pairs: Pairs, scale: float) -> float:
    return statistics.median(abs(said * scale / made - 1) for said, made in pairs)


def timing_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Kendall's tau and median errors of each model's plans, one scale a target."""
    yield (
        "| target | model | plans | slowest over fastest | sums: tau | median error | overlapped: tau, simulated "
        "| closed form | error, simulated | closed form |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for target in sorted({row["target"] for row in rows}):
        of = [row for row in rows if row["target"] == target]
        scale = statistics.median(made / said for said, made in map(_both, of))
        for case in dict.fromkeys(row["case"] for row in of):
            plans = [row for row in of if row["case"] == case]
            pairs = [_both(row) for row in plans]
            made = [pair[1] for pair in pairs]
            simulated = [(row["predicted"]["simulated_s"], row["compiled"]["scheduled_s"]) for row in plans]
            closed = [(_both(row)[0], row["compiled"]["scheduled_s"]) for row in plans]
            yield (
                f"| {target} | {case} | {len(plans)} | {max(made) / min(made):.1f} | {kendall(pairs):.2f} "
                f"| {_off(pairs, scale):.1%} | {kendall(simulated):.2f} | {kendall(closed):.2f} "
                f"| {_off(simulated, scale):.1%} | {_off(closed, scale):.1%} |"
            )
        every = errors([said * scale / made for said, made in map(_both, of)])
        yield f"| {target} | all, times one scale of {scale:.2f} | | | | {every} | | | | |"


def wall_table(path: Path = HERE / "walltime.json") -> Iterator[str]:
    """Predicted and measured milliseconds on forced host devices."""
    if not path.exists():
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = found["rows"]
    yield "| model | plan | predicted, ms | of it sent | measured, ms | error |"
    yield "|---|---|---|---|---|---|"
    pairs: Pairs = []
    for row in rows:
        said, made = row["compute_s"] + row["comm_s"], row["busy_s"]
        pairs.append((said, made))
        yield (
            f"| {row['case']} | {row['plan']} | {said * 1e3:.1f} | {row['comm_s'] * 1e3:.1f} | {made * 1e3:.1f} "
            f"| {said / made - 1:+.0%} |"
        )
    taus = [
        kendall([p for p, row in zip(pairs, rows, strict=True) if row["case"] == case])
        for case in dict.fromkeys(row["case"] for row in rows)
    ]
    yield ""
    yield (
        f"{len(pairs)} steps on {found['devices']} devices of {found['cores']} cores: median error "
        f"{_off(pairs, 1.0):.0%}; Kendall's tau of all {kendall(pairs):.2f}, of each model's "
        f"{', '.join(f'{tau:.2f}' for tau in taus)}"
    )


def tight_table(path: Path = HERE / "tight.jsonl") -> Iterator[str]:
    """Plans within 60 % of what data parallelism needs, beside the fastest template that fits."""
    if not path.exists():
        return
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    yield "| case | target | budget, MB | templates that fit | ours, ms | the best of them, ms | ratio |"
    yield "|---|---|---|---|---|---|---|"
    for row in {(row["case"], row["target"], row["mesh"]): row for row in rows}.values():
        fitting = {name: plan["step_s"] * 1e3 for name, plan in row["found"].items() if "step_s" in plan}
        own = fitting.pop("jaxplan", None)
        best = min(fitting.values(), default=None)
        ratio = "" if own is None or best is None else f"{own / best:.3f}"
        yield (
            f"| {row['case']} | {row['target']}, {row['mesh']} | {row['budget_bytes'] / 1e6:.0f} "
            f"| {', '.join(sorted(fitting)) or 'none'} | {'none' if own is None else f'{own:.2f}'} "
            f"| {'' if best is None else f'{best:.2f}'} | {ratio} |"
        )
