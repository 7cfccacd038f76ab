"""results.json -> search.svg, and the tables of README.md between its two marks."""

from __future__ import annotations

import json
import math
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
MARK = "<!-- tables of page.py -->"
COLOURS = {"ilp": "#1d2126", "ft": "#4c78a8", "optcnn": "#5aa157", "mcmc": "#d9605f"}
PANEL_WIDTH, PANEL_HEIGHT, LEFT, TOP, GAP_X, GAP_Y, COLUMNS = 300, 150, 64, 96, 66, 74, 3
FIRST_S, LEAST_GAP, MOST_GAP = 0.03, 1e-5, 1.0
"""The axes' ends: nothing is found sooner; a gap below the least is drawn on it."""

STYLE = (
    ".page{fill:#fff}.title{font-size:18px;font-weight:650;fill:#1d2126}.sub{font-size:13px;fill:#616a75}"
    ".name{font-size:13px;font-weight:600;fill:#1d2126}.tick{font-size:11px;fill:#616a75}.grid{stroke:#e3e6ea}"
    ".line{fill:none;stroke-width:2}.given{stroke:#b0793b;stroke-width:1.5;stroke-dasharray:5 4}"
)


def text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def place_x(seconds: float, last_s: float) -> float:
    share = math.log(max(seconds, FIRST_S) / FIRST_S) / math.log(last_s / FIRST_S)
    return PANEL_WIDTH * min(max(share, 0.0), 1.0)


def place_y(gap: float) -> float:
    share = math.log(min(max(gap, LEAST_GAP), MOST_GAP) / LEAST_GAP) / math.log(MOST_GAP / LEAST_GAP)
    return PANEL_HEIGHT * (1 - share)


def panel(name: str, case: dict[str, Any], x0: float, y0: float) -> list[str]:
    last_s, bound_s = float(case["limit_s"]), case["bound_s"]
    parts = [text(x0, y0 - 8, name, "name")]
    for gap in (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5):
        y = y0 + place_y(gap)
        parts.append(f'<line x1="{x0}" x2="{x0 + PANEL_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        label = "proved" if gap == LEAST_GAP else f"{gap:.0%}" if gap >= 0.01 else f"{gap:.2%}"
        parts.append(text(x0 - 6, y + 4, label, "tick", "end"))
    for seconds in (0.1, 1.0, 10.0):
        x = x0 + place_x(seconds, last_s)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y0}" y2="{y0 + PANEL_HEIGHT}" class="grid"/>')
        parts.append(text(x, y0 + PANEL_HEIGHT + 16, f"{seconds:g} s", "tick", "middle"))
    if case["searches"]["templates"]:
        given = y0 + place_y(case["searches"]["templates"]["gap"])
        parts.append(f'<line x1="{x0}" x2="{x0 + PANEL_WIDTH}" y1="{given:.1f}" y2="{given:.1f}" class="given"/>')
    for search, colour in reversed(COLOURS.items()):
        found = case["searches"][search]
        if not found:
            continue
        corners, y = [], y0 + place_y(found["history"][0][1] / bound_s - 1)
        for wall_s, objective_s in found["history"]:
            x = x0 + place_x(wall_s, last_s)
            corners.append(f"{x:.1f},{y:.1f}")
            y = y0 + place_y(objective_s / bound_s - 1)
            corners.append(f"{x:.1f},{y:.1f}")
        end = x0 + place_x(found["wall_s"], last_s)
        corners.append(f"{end:.1f},{y:.1f}")
        parts.append(f'<polyline points="{" ".join(corners)}" class="line" stroke="{colour}"/>')
        parts.append(f'<circle cx="{end:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>')
    return parts


def picture(results: dict[str, Any]) -> str:
    rows = -(-len(results) // COLUMNS)
    width = LEFT + COLUMNS * (PANEL_WIDTH + GAP_X)
    height = TOP + rows * (PANEL_HEIGHT + GAP_Y)
    parts = [
        text(16, 28, "How far above the proved bound the best plan found so far is, over search time", "title"),
        text(16, 48, "Every search begins from the best plan that one would write by hand; a dot: it has ended. "
             "Wall seconds on a busy machine, both axes logarithmic.", "sub"),
    ]  # fmt: skip
    x = 16.0
    for search, colour in [*COLOURS.items(), ("best template", "#b0793b")]:
        parts.append(f'<rect x="{x}" y="60" width="14" height="4" fill="{colour}"/>')
        parts.append(text(x + 19, 67, search, "sub"))
        x += 44 + 8 * len(search)
    for number, (name, case) in enumerate(results.items()):
        row, column = divmod(number, COLUMNS)
        parts += panel(name, case, LEFT + column * (PANEL_WIDTH + GAP_X), TOP + 16 + row * (PANEL_HEIGHT + GAP_Y))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif">\n'
        f'<style>{STYLE}</style>\n<rect width="100%" height="100%" class="page"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


def tables(results: dict[str, Any]) -> str:
    lines = [
        "Step time as the problem prices it (nothing overlaps), over the proved bound, and after how many wall seconds",
        "it was found; in brackets the processor seconds of the whole search (of `ilp` without HiGHS' own process).",
        "",
        "| network, cluster | bound | traced, priced | ilp | ft | optcnn | mcmc | best template |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, case in results.items():
        cells = []
        for search in ("ilp", "ft", "optcnn", "mcmc", "templates"):
            found = case["searches"][search]
            if not found:
                cells.append("nothing found" if search != "templates" else "none fits")
                continue
            time = "" if search == "templates" else f", {found['best_at_s']:.1f} s [{found['processor_s']:.1f}]"
            cells.append(f"{max(found['gap'], 0):+.2%}{time}")
        made = f"{case['built']['wall_s']:.1f} s [{case['built']['processor_s']:.1f}]"
        few = case.get("samples_a_device", 0)
        told = f"{name}, {few} samples a device" if few and few < 64 else name
        lines.append(f"| {told} | {milliseconds(case['bound_s'])} | {made} | " + " | ".join(cells) + " |")
    lines += [
        "", "The same plans simulated (communication behind computation), and what a device sends in a step.", "",
        "| network, cluster | ilp | mcmc | mcmc, simulated | best template | data parallelism sends | ilp sends |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, case in results.items():
        found = case["searches"]
        cells = [
            milliseconds(found[search]["simulated_s"]) if found[search] else "-"
            for search in ("ilp", "mcmc", "mcmc simulated", "templates")
        ]
        sends = case["templates"]["sent_bytes"].get("data")
        cells.append("does not fit" if sends is None else f"{sends / 2**20:.0f} MiB")
        cells.append(f"{found['ilp']['sent_bytes'] / 2**20:.0f} MiB")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "", "A random change of one strategy, simulated as a delta and in full (medians; none compared differs).",
        "", "| network, cluster | operations and edges | delta | one device in full | every device in full | faster |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, case in results.items():
        d = case["delta"]
        one, every = (d[f"full_{which}_device_s"] / d["delta_s"] for which in ("one", "every"))
        lines.append(
            f"| {name} | {case['nodes'] + case['edges']} | {d['delta_s'] * 1e6:.0f} us "
            f"| {milliseconds(d['full_one_device_s'])} | {milliseconds(d['full_every_device_s'])} "
            f"| {one:.0f} x, {every:.0f} x |"
        )
    for cluster in ("16 P100", "64 K80"):
        cases = [case["delta"] for name, case in results.items() if name.endswith(cluster)]
        if cases:
            one, every = (
                median(d[f"full_{which}_device_s"] / d["delta_s"] for d in cases) for which in ("one", "every")
            )
            lines.append(f"| median, {cluster} | | | | | {one:.0f} x, {every:.0f} x |")
    return "\n".join(lines)


def main() -> None:
    results = json.loads((HERE / "results.json").read_text())
    order = sorted(results, key=lambda name: (name.split(" on ")[1], name))
    results = {name: results[name] for name in order}
    (HERE / "search.svg").write_text(picture(results))
    readme = HERE / "README.md"
    before, _, after = readme.read_text().split(MARK)
    readme.write_text(f"{before}{MARK}\n\n{tables(results)}\n\n{MARK}{after}")


if __name__ == "__main__":
    main()
