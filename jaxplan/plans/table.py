"""`print(plan)`: what a user wants to know of a plan, in a terminal's width."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from ..units import format_bytes, format_seconds
from .columns import WIDTH, aligned, bar, percent, shortened
from .folding import TensorRow, fold_collectives, fold_tensors
from .plan import Plan
from .words import runs_text, spec_text, type_text

_TENSOR_ROWS = 40
"""Rows that one kind of tensors takes; the largest are shown, the rest is summed."""

_COLLECTIVE_ROWS = 20

KINDS = {
    "parameter": "parameters",
    "optimizer": "optimizer state",
    "state": "other state",
    "batch": "batch",
    "result": "results that are no state",
}


def plan_table(plan: Plan) -> str:
    """The plan as text: no line is longer than 120 columns, the same plan gives the same text."""
    sections = [
        _header(plan),
        _tensors(plan),
        _collectives(plan),
        _step_time(plan),
        _memory(plan),
        _templates(plan),
        _notes("Warnings", plan.warnings),
        _notes("Assumptions", plan.assumptions),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def mesh_text(plan: Plan) -> str:
    """`"data=4, model=2 (8 devices)"`."""
    count = math.prod(size for _, size in plan.axes)
    return f"{', '.join(f'{name}={size}' for name, size in plan.axes)} ({count} device{'s' * (count != 1)})"


def optimality_text(plan: Plan) -> str:
    """How good the plan is known to be, within the model's own prices: optimal only where that is proved."""
    cost = plan.cost
    if cost.termination == "optimal":
        return "proved optimal within the cost model"
    if cost.termination == "template":
        return "a hand-written template"
    if not cost.bound_s > 0:
        return "the best that was found; nothing is proved"
    why = {"time_limit": "stopped at the time limit", "interrupted": "interrupted"}.get(cost.termination)
    quality = f"at most {percent(cost.gap)} above the bound of {format_seconds(cost.bound_s)}"
    return f"{why}: {quality}" if why else quality


def _header(plan: Plan) -> list[str]:
    cost = plan.cost
    exposed = f"{format_seconds(cost.exposed_comm_s)} exposed communication"
    search = f"{plan.search}: {optimality_text(plan)}"
    if cost.search_s:
        search += f"; planned in {format_seconds(cost.search_s)}"
    rows = [
        ("mesh", mesh_text(plan)),
        ("hardware", plan.hardware + (f" (device kind {plan.device_kind})" if plan.device_kind else "")),
        ("step", f"{format_seconds(cost.step_s)} = {format_seconds(cost.compute_s)} compute + {exposed}"),
        (
            "memory",
            f"{format_bytes(cost.peak_bytes)} of {format_bytes(plan.budget_bytes)} a device "
            f"({percent(cost.peak_bytes / plan.budget_bytes)})",
        ),
        ("search", search),
    ]
    return [f"Plan of `{plan.name}`", *aligned(rows, shrink=1)]


def _tensors(plan: Plan) -> list[str]:
    rows = fold_tensors((*plan.inputs, *(tensor for tensor in plan.outputs if not tensor.alias)))
    table: list[tuple[str, ...]] = [("tensor", "leaves", "type", "spec", "bytes", "a device")]
    for kind in [*KINDS, *sorted({row.kind for row in rows} - set(KINDS))]:
        mine = [row for row in rows if row.kind == kind]
        if not mine:
            continue
        sums = (sum(row.bytes for row in mine), sum(row.local_bytes for row in mine))
        cells = tuple(format_bytes(size) for size in sums) if len(mine) > 1 else ("", "")
        root = _common_root(mine)
        table.append((f"[{KINDS.get(kind, kind)}]{f' {root}' if root else ''}", "", "", "", *cells))
        table += _tensor_rows(mine, root)
    legend = []
    if any(row.companions for row in rows):
        legend = ["  leaves n+m: n parameters and the m optimizer leaves that lie as they do"]
    return ["Tensors", *aligned(table, right=(1, 4, 5)), *legend]


def _common_root(rows: Sequence[TensorRow]) -> str:
    """The first parts that all the paths share, less the last: `"state/params/"`; "" for a single row."""
    parts = [row.pattern.split("/")[:-1] for row in rows]
    common: list[str] = []
    for names in zip(*parts, strict=False):
        if len(rows) < 2 or len(set(names)) > 1:
            break
        common.append(names[0])
    return "".join(f"{name}/" for name in common)


def _tensor_rows(rows: Sequence[TensorRow], root: str) -> list[tuple[str, ...]]:
    """The largest rows, in the order of the tree, and one for the rest; paths under `root`."""
    largest = sorted(range(len(rows)), key=lambda i: (-rows[i].bytes, i))[:_TENSOR_ROWS]
    table: list[tuple[str, ...]] = [
        (
            f"  {row.pattern.removeprefix(root)}",
            row.leaves,
            type_text(row.dtype, row.shape, row.host),
            spec_text(row.layout),
            format_bytes(row.bytes),
            format_bytes(row.local_bytes),
        )
        for row in (rows[i] for i in sorted(largest))
    ]
    rest = [row for i, row in enumerate(rows) if i not in set(largest)]
    if rest:
        count = sum(row.count + row.companions for row in rest)
        total, local = sum(row.bytes for row in rest), sum(row.local_bytes for row in rest)
        sums = (format_bytes(total), format_bytes(local))
        table.append((f"  and {len(rest)} smaller rows", str(count), "", "", *sums))
    return table


def _collectives(plan: Plan) -> list[str]:
    rows = fold_collectives(plan.collectives)
    if not rows:
        return ["Collectives", "  none: no device waits for another"]
    table = [("where", "operation", "collective", "axis", "bytes", "runs", "sent", "seconds")]
    table += [
        (
            row.where,
            row.primitive,
            row.kind,
            "+".join(row.axes),
            format_bytes(row.bytes),
            runs_text(row.runs),
            format_bytes(row.wire_bytes),
            format_seconds(row.seconds_s),
        )
        for row in rows[:_COLLECTIVE_ROWS]
    ]
    rest = rows[_COLLECTIVE_ROWS:]
    if rest:
        sums = (
            sum(row.runs for row in rest),
            sum(row.wire_bytes for row in rest),
            sum(row.seconds_s for row in rest),
        )
        cells = (runs_text(sums[0]), format_bytes(sums[1]), format_seconds(sums[2]))
        table.append((f"and {len(rest)} shorter rows", "", "", "", "", *cells))
    before = f"{format_seconds(plan.cost.comm_s)} before overlap"
    title = f"Collectives a step ({before}; bytes: the larger local buffer of one run)"
    return [title, *aligned(table, right=(4, 5, 6, 7))]


def _step_time(plan: Plan) -> list[str]:
    cost = plan.cost
    parts = (("compute", cost.compute_s), ("exposed communication", cost.exposed_comm_s))
    shares = [seconds / cost.step_s if cost.step_s else 0.0 for _, seconds in parts]
    rows = [
        (name, format_seconds(seconds), percent(share), bar(share))
        for (name, seconds), share in zip(parts, shares, strict=True)
    ]
    lines = [f"Step time {format_seconds(cost.step_s)}", *aligned(rows, right=(1, 2))]
    if cost.comm_s_by_axis:
        table = [("communication before overlap", "seconds", "sent by a device")]
        table += [
            (f"  over {axis}", format_seconds(seconds), format_bytes(cost.comm_bytes_by_axis.get(axis, 0)))
            for axis, seconds in sorted(cost.comm_s_by_axis.items(), key=lambda item: (-item[1], item[0]))
        ]
        lines += aligned(table, right=(1, 2))
    return lines


def _memory(plan: Plan) -> list[str]:
    cost = plan.cost
    parts = sorted(cost.peak_parts.items(), key=lambda item: (-item[1], item[0]))
    shares = [size / cost.peak_bytes if cost.peak_bytes else 0.0 for _, size in parts]
    rows = [
        (name, format_bytes(size), percent(share), bar(share))
        for (name, size), share in zip(parts, shares, strict=True)
    ]
    where = f", reached at {shortened(cost.peak_where, 44)}" if cost.peak_where else ""
    free = f"{format_bytes(plan.budget_bytes - cost.peak_bytes)} of the budget stay free"
    return [f"Memory {format_bytes(cost.peak_bytes)} a device{where}; {free}", *aligned(rows, right=(1, 2))]


def _templates(plan: Plan) -> list[str]:
    if not plan.templates:
        return []
    mine_s = plan.cost.step_s
    table = [("plan", "step", "against this plan"), ("this plan", format_seconds(mine_s), "")]
    table += [
        (name, format_seconds(step_s), against(step_s, mine_s))
        for name, step_s in sorted(plan.templates.items(), key=lambda item: (item[1], item[0]))
    ]
    return ["Templates (those that fit)", *aligned(table, right=(1, 2))]


def against(step_s: float, mine_s: float) -> str:
    """`against(1.1, 1.0) == "+10.0 %"`; "" where there is nothing to compare with."""
    return f"{100 * (step_s / mine_s - 1):+.1f} %" if mine_s > 0 else ""


def _notes(title: str, notes: Sequence[str]) -> list[str]:
    if not notes:
        return []
    lines = (textwrap.fill(note, WIDTH, initial_indent="  - ", subsequent_indent="    ") for note in notes)
    return [title, *lines]
