"""measured.json beside what jaxplan says of the same steps: the tables of README.md, and kernels.svg.

    PYTHONPATH=. python experiments/gpu_truth/table.py

A minute; no GPU.  Plans every case for one device of the profile h100.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from html import escape
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import jax
from cases import CASES

import jaxplan
from jaxplan.cost import Channels
from jaxplan.hardware import Profile, load_profile
from jaxplan.lowering import Kernel

HERE = Path(__file__).parent
MARK = "<!-- tables of table.py -->"
GIB = 2**30
COLOURS = {"memory": "#4c78a8", "products": "#d9605f", "convolutions": "#5aa157", "added to memory": "#b0793b"}
LEFT, TOP, SIZE, LEAST_S, MOST_S, LEAST, MOST = 64, 56, 560, 1e-6, 1e-2, 0.1, 10.0
STYLE = (
    ".page{fill:#fff}text{font-family:system-ui,sans-serif}.title{font-size:17px;font-weight:650;fill:#1d2126}.sub{font-size:13px;"
    "fill:#616a75}.tick{font-size:11px;fill:#616a75}.grid{stroke:#e3e6ea}.even{stroke:#1d2126}"
)


def kernel_of(row: dict[str, Any]) -> Kernel:
    """A row of measured.json as the yardstick has it."""
    channels = None if row["channels"] is None else Channels(*row["channels"])
    fields = {key: row[key] for key in ("flops", "vector_flops", "bytes", "dtype", "added", "odd")}
    return Kernel(name=row["kind"], op_name="", trips=row["runs"], channels=channels, **fields)


def kind_of(kernel: Kernel, profile: Profile) -> str:
    """Which of `COLOURS` a kernel is drawn in: what it does, or what bounds it."""
    if kernel.channels is not None:
        return "convolutions"
    if kernel.added:
        return "added to memory"
    arithmetic_s = kernel.flops / profile.peak_for(kernel.dtype) / profile.matmul_efficiency
    return "products" if arithmetic_s > kernel.bytes / profile.hbm_bytes_per_s else "memory"


def picture(cases: list[dict[str, Any]], profile: Profile) -> str:
    """Every kernel: how long it ran over how long the yardstick says; circles as large as their share of the step."""

    def x(seconds: float) -> float:
        return LEFT + SIZE * math.log(seconds / LEAST_S) / math.log(MOST_S / LEAST_S)

    def y(ratio: float) -> float:
        return TOP + SIZE / 2 * (1 - math.log(min(max(ratio, LEAST), MOST)) / math.log(MOST))

    def text(left: float, top: float, words: str, kind: str, anchor: str = "start", fill: str = "") -> str:
        where = f'x="{left:.0f}" y="{top:.0f}"' + (f' style="fill:{fill}"' if fill else "")
        return f'<text {where} class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'

    parts = [text(LEFT, 24, f"{len(cases)} train steps on one H100, kernel by kernel", "title")]
    parts.append(text(LEFT, 43, "measured over the yardstick's seconds; area: share of the step", "sub"))
    for power in range(-6, -1):
        at = x(10.0**power)
        parts.append(f'<line x1="{at:.0f}" x2="{at:.0f}" y1="{TOP}" y2="{TOP + SIZE}" class="grid"/>')
        parts.append(text(at, TOP + SIZE + 16, {-6: "1 us", -5: "10 us", -4: "100 us", -3: "1 ms", -2: "10 ms"}[power],
                          "tick", "middle"))  # fmt: skip
    for ratio in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0):
        kind = "even" if ratio == 1 else "grid"
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + SIZE}" y1="{y(ratio):.0f}" y2="{y(ratio):.0f}" class="{kind}"/>')
        parts.append(text(LEFT - 8, y(ratio) + 4, f"{ratio:g} x", "tick", "end"))
    parts.append(text(LEFT + SIZE / 2, TOP + SIZE + 36, "one run by the yardstick", "sub", "middle"))
    for case in cases:
        for row in case["kernels"]:
            kernel = kernel_of(row)
            said_s, made_s = kernel.seconds(profile), row["seconds"] / row["runs"]
            radius = 1.5 + 26 * math.sqrt(row["seconds"] / case["kernels_s"])
            told = f"{case['case']}: {row['runs']:g} x {row['kind']}, {made_s * 1e6:.1f} us for {said_s * 1e6:.1f}"
            parts.append(
                f'<circle cx="{x(max(said_s, LEAST_S)):.1f}" cy="{y(made_s / said_s):.1f}" r="{radius:.1f}" '
                f'fill="{COLOURS[kind_of(kernel, profile)]}" fill-opacity=".4"><title>{escape(told)}</title></circle>'
            )
    for at, (kind, colour) in enumerate(COLOURS.items()):
        parts.append(text(LEFT + SIZE - 10, TOP + 20 + 17 * at, kind, "sub", "end", colour))
    width, height = LEFT + SIZE + 24, TOP + SIZE + 52
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"><style>{STYLE}</style>'
        f'<rect class="page" width="{width}" height="{height}"/>{"".join(parts)}</svg>\n'
    )


def step_lines(cases: list[dict[str, Any]], profile: Profile) -> list[str]:
    """One line of Markdown for each case, and a summary."""
    one = jax.sharding.AbstractMesh((1,), ("data",))
    lines = [
        "| step | measured, ms | planned | yardstick | allocated, GiB | compiled there | planned |",
        "|---|---|---|---|---|---|---|",
    ]
    errors, yard_errors, memory = [], [], []
    for row in cases:
        case = CASES[row["case"]]
        plan = jaxplan.plan(case.step(), one, *case.shapes(), donate_argnums=0, hardware=profile)
        yard_s = sum(kernel_of(kernel).seconds(profile) * kernel["runs"] for kernel in row["kernels"])
        errors.append(plan.cost.compute_s / row["seconds"] - 1)
        yard_errors.append(yard_s / row["kernels_s"] - 1)
        memory.append(plan.cost.peak_bytes / row["allocated_bytes"] - 1)
        lines.append(
            f"| {case.what} | {row['seconds'] * 1e3:.1f} | {plan.cost.compute_s * 1e3:.1f} ({errors[-1]:+.0%}) "
            f"| {yard_s * 1e3:.1f} ({yard_errors[-1]:+.0%}) | {row['allocated_bytes'] / GIB:.2f} "
            f"| {row['peak_bytes'] / GIB:.2f} | {plan.cost.peak_bytes / GIB:.2f} ({memory[-1]:+.0%}) |"
        )
        print(lines[-1], flush=True)
    for what, found in (("planned seconds", errors), ("the yardstick's", yard_errors), ("planned memory", memory)):
        sizes = [abs(error) for error in found]
        lines.append(
            f"\n{what[0].upper() + what[1:]}: median error {median(sizes):.1%}, 90th percentile "
            f"{quantiles(sizes, n=10, method='inclusive')[-1]:.1%}, from {min(found):+.0%} to {max(found):+.0%}."
        )
    return lines


def kind_lines(cases: list[dict[str, Any]], profile: Profile) -> list[str]:
    """The yardstick's seconds over the measured ones, of all kernels of a kind and of the middle half of them."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for case in cases:
        for row in case["kernels"]:
            kernel = kernel_of(row)
            said = kernel.seconds(profile) * row["runs"]
            found[kind_of(kernel, profile)].append((said / row["seconds"], row["seconds"] / case["kernels_s"]))
    lines = ["| kernels | share of the steps | yardstick / measured, median | middle half |", "|---|---|---|---|"]
    for kind in COLOURS:
        ratios = sorted(found[kind])
        share = sum(part for _, part in ratios) / len(cases)
        quarter, middle, three = (_weighted(ratios, at) for at in (0.25, 0.5, 0.75))
        lines.append(f"| {kind} | {share:.0%} | {middle:.2f} | {quarter:.2f} to {three:.2f} |")
    return lines


def _weighted(ratios: list[tuple[float, float]], at: float) -> float:
    """The quantile of sorted (value, weight)."""
    left = at * sum(weight for _, weight in ratios)
    for value, weight in ratios:
        left -= weight
        if left <= 0:
            return value
    return ratios[-1][0]


def main() -> None:
    profile = load_profile("h100")
    cases = json.loads((HERE / "measured.json").read_text(encoding="utf-8"))
    (HERE / "kernels.svg").write_text(picture(cases, profile), encoding="utf-8")
    tables = "\n".join([*step_lines(cases, profile), "", *kind_lines(cases, profile)])
    before, _, rest = (HERE / "README.md").read_text(encoding="utf-8").partition(MARK)
    after = rest.partition(MARK)[2]
    (HERE / "README.md").write_text(f"{before}{MARK}\n\n{tables}\n\n{MARK}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
