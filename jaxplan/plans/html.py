"""A plan as one self-contained HTML page: no script, nothing fetched, so that it can be kept and sent."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..units import format_bytes, format_seconds
from .columns import percent
from .drawings import PALETTE, legend, mesh_drawing, share_bar, stacked_bar
from .folding import TensorRow, fold_collectives, fold_tensors
from .page_style import STYLE
from .plan import Plan
from .table import KINDS, against, mesh_text, optimality_text
from .words import runs_text, shape_text, spec_text, type_text

_COLLECTIVE_ROWS = 60
"""Longest collectives that the page lists before it sums the rest."""


def plan_page(plan: Plan) -> str:
    """The page's text; the same plan gives the same page."""
    sections = (
        _head(plan),
        _tiles(plan),
        _warnings(plan),
        _step_time(plan),
        _memory(plan),
        _templates(plan),
        _tensors(plan),
        _collectives(plan),
        _constraints(plan),
        _assumptions(plan),
        _leaves(plan),
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Plan of {escape(plan.name)}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main>\n</body>\n</html>\n"
    )


def _head(plan: Plan) -> str:
    made = f"search {plan.search}" + (f", checked with jax {plan.jax_version}" if plan.jax_version else "")
    kind = f" (device kind {plan.device_kind})" if plan.device_kind else ""
    return (
        f"<h1>Plan of <code>{escape(plan.name)}</code></h1>\n"
        f'<p class="sub">mesh {escape(mesh_text(plan))} on {escape(plan.hardware + kind)}; {escape(made)}</p>'
    )


def _tiles(plan: Plan) -> str:
    cost = plan.cost
    hidden = format_seconds(cost.comm_s - cost.exposed_comm_s)
    used = percent(cost.peak_bytes / plan.budget_bytes)
    proved = "proved" if cost.termination == "optimal" else cost.termination.replace("_", " ")
    tiles = (
        ("Step", format_seconds(cost.step_s), "predicted, on every device"),
        (
            "Peak memory",
            format_bytes(cost.peak_bytes),
            f"{used} of {format_bytes(plan.budget_bytes)} a device",
        ),
        (
            "Communication",
            format_seconds(cost.comm_s),
            f"{hidden} hidden by computation; {format_bytes(cost.comm_bytes)} sent by a device",
        ),
        ("Optimality", proved, optimality_text(plan)),
    )
    cards = (
        f'<div class="tile"><span class="name">{name}</span><b>{escape(value)}</b>'
        f"<span>{escape(text)}</span></div>"
        for name, value, text in tiles
    )
    return f'<div class="tiles">{"".join(cards)}</div>'


def _warnings(plan: Plan) -> str:
    if not plan.warnings:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in plan.warnings)
    return f'<h2>Warnings</h2>\n<ul class="warnings">{items}</ul>'


def _step_time(plan: Plan) -> str:
    cost = plan.cost
    parts = [
        ("compute", cost.compute_s, format_seconds(cost.compute_s)),
        ("exposed communication", cost.exposed_comm_s, format_seconds(cost.exposed_comm_s)),
    ]
    text = f"<h2>Step time</h2>\n{stacked_bar(parts, cost.step_s)}\n{legend(parts)}"
    by_axis = sorted(cost.comm_s_by_axis.items(), key=lambda item: (-item[1], item[0]))
    if not cost.comm_s:
        return text
    rows = [
        _row(
            (
                ("mono", escape(axis)),
                ("n", format_seconds(seconds)),
                ("", share_bar(seconds / cost.comm_s, "c1")),
                ("n", format_bytes(cost.comm_bytes_by_axis.get(axis, 0))),
            )
        )
        for axis, seconds in by_axis
    ]
    head = _row_of_heads(
        ("communication over", ""), ("before overlap", "n"), ("", ""), ("sent by a device", "n")
    )
    return f"{text}\n<p></p>\n{_table(head, rows)}"


def _memory(plan: Plan) -> str:
    cost = plan.cost
    sizes = sorted(cost.peak_parts.items(), key=lambda item: (-item[1], item[0]))
    parts = [
        (name, size, f"{format_bytes(size)}, {percent(size / max(cost.peak_bytes, 1))}")
        for name, size in sizes
    ]
    # a plan that needs a sliver of its budget is drawn by itself, else nothing could be seen of it
    fills = cost.peak_bytes >= 0.2 * plan.budget_bytes
    whole = max(plan.budget_bytes, cost.peak_bytes) if fills else cost.peak_bytes
    bar = stacked_bar(parts, whole, marker=plan.budget_bytes if fills else None)
    where = f", reached at <code>{escape(cost.peak_where)}</code>" if cost.peak_where else ""
    drawn = "the dashed line is the budget" if fills else "the bar is the peak alone"
    sizes_text = f"{format_bytes(cost.peak_bytes)} of {format_bytes(plan.budget_bytes)} a device"
    return (
        "<h2>Memory at the peak</h2>\n"
        f'<p class="sub">{sizes_text}{where}; {drawn}</p>\n{bar}\n{legend(parts)}'
    )


def _templates(plan: Plan) -> str:
    if not plan.templates:
        return ""
    mine_s = plan.cost.step_s
    others = sorted(plan.templates.items(), key=lambda item: (item[1], item[0]))
    longest_s = max([mine_s, *plan.templates.values()]) or 1.0
    rows = [_template_row("this plan", mine_s, "", longest_s, "this")]
    rows += [_template_row(name, step_s, against(step_s, mine_s), longest_s, "") for name, step_s in others]
    head = _row_of_heads(("plan", ""), ("step", "n"), ("", ""), ("against this plan", "n"))
    return f"<h2>Templates that fit</h2>\n{_table(head, rows)}"


def _template_row(name: str, step_s: float, change: str, longest_s: float, kind: str) -> str:
    cells = (
        ("mono", escape(name)),
        ("n", format_seconds(step_s)),
        ("", share_bar(step_s / longest_s, "c2" if kind else "c0")),
        ("n", change),
    )
    return _row(cells, kind)


def _tensors(plan: Plan) -> str:
    rows = fold_tensors((*plan.inputs, *(tensor for tensor in plan.outputs if not tensor.alias)))
    lines: list[str] = []
    for kind in [*KINDS, *sorted({row.kind for row in rows} - set(KINDS))]:
        mine = [row for row in rows if row.kind == kind]
        if mine:
            total, local = sum(row.bytes for row in mine), sum(row.local_bytes for row in mine)
            lines.append(
                f'<tr class="group"><td colspan="5">{escape(KINDS.get(kind, kind))}</td>'
                f'<td class="n">{format_bytes(total)}</td><td class="n">{format_bytes(local)}</td></tr>'
            )
            lines += [_tensor_row(plan, row) for row in mine]
    head = _row_of_heads(
        ("tensor", ""), ("leaves", "n"), ("type", ""), ("on the mesh", ""), ("spec", ""),
        ("bytes", "n"), ("a device", "n"),
    )  # fmt: skip
    note = (
        f"One square a device, columns over {plan.axes[0][0]}: squares of one shade hold the same piece. Cut "
        "dimensions "
        "are coloured. Leaves n+m: n parameters and the m optimizer leaves that lie as they do."
        if plan.axes
        else ""
    )
    return f'<h2>Tensors</h2>\n<p class="note">{escape(note)}</p>\n{_table(head, lines)}'


def _tensor_row(plan: Plan, row: TensorRow) -> str:
    extents = [
        f'<span class="cut">{extent}</span>' if names else str(extent)
        for extent, names in zip(row.shape, row.layout.dims, strict=True)
    ]
    dtype = escape(type_text(row.dtype, (), row.host).removesuffix("[]"))
    cells = (
        ("mono", escape(row.pattern)),
        ("n", row.leaves),
        ("mono", f"{dtype}[{','.join(extents)}]"),
        ("", mesh_drawing(row.layout, plan.axes)),
        ("mono", escape(spec_text(row.layout))),
        ("n", format_bytes(row.bytes)),
        ("n", format_bytes(row.local_bytes)),
    )
    return _row(cells)


def _collectives(plan: Plan) -> str:
    rows = fold_collectives(plan.collectives)
    if not rows:
        return '<h2>Collectives</h2>\n<p class="note">None: no device waits for another.</p>'
    kinds = {kind: f"c{i % PALETTE}" for i, kind in enumerate(sorted({row.kind for row in rows}))}
    longest_s = rows[0].seconds_s or 1.0
    lines = [
        _row(
            (
                ("mono", escape(row.where)),
                ("mono", escape(row.primitive)),
                ("mono", escape(row.kind)),
                ("mono", escape("+".join(row.axes))),
                ("n", format_bytes(row.bytes)),
                ("n", runs_text(row.runs)),
                ("n", format_bytes(row.wire_bytes)),
                ("n", format_seconds(row.seconds_s)),
                ("", share_bar(row.seconds_s / longest_s, kinds[row.kind])),
            )
        )
        for row in rows[:_COLLECTIVE_ROWS]
    ]
    rest = rows[_COLLECTIVE_ROWS:]
    if rest:
        seconds = format_seconds(sum(row.seconds_s for row in rest))
        lines.append(
            f'<tr><td colspan="7">and {len(rest)} shorter rows</td><td class="n">{seconds}</td><td></td></tr>'
        )
    head = _row_of_heads(
        ("where", ""), ("operation", ""), ("collective", ""), ("axis", ""), ("bytes", "n"), ("runs", "n"),
        ("sent", "n"), ("seconds", "n"), ("", ""),
    )  # fmt: skip
    note = (
        "Bytes: the larger local buffer of one run. Sent and seconds: of all runs in a step, before overlap."
    )
    return f'<h2>Collectives</h2>\n<p class="note">{note}</p>\n{_table(head, lines)}'


def _constraints(plan: Plan) -> str:
    pins = [one for one in plan.constraints if one.is_pin]
    if not pins:
        return ""
    lines = [
        _row(
            (
                ("mono", escape(one.source)),
                ("mono", escape(one.primitive)),
                ("mono", shape_text(one.shape)),
                ("mono", escape(spec_text(one.layout))),
                ("", escape(one.why)),
            )
        )
        for one in pins
    ]
    head = _row_of_heads(("where", ""), ("operation", ""), ("shape", ""), ("pinned to", ""), ("for", ""))
    return (
        f"<h2>Constraints inside the step</h2>\n<details><summary>{len(lines)} pinned with "
        f"<code>with_sharding_constraint</code></summary>\n{_table(head, lines)}</details>"
    )


def _assumptions(plan: Plan) -> str:
    if not plan.assumptions:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in plan.assumptions)
    return f"<h2>Assumptions</h2>\n<ul>{items}</ul>"


def _leaves(plan: Plan) -> str:
    lines = [
        _row(
            (
                ("mono", escape(tensor.path)),
                ("mono", escape(type_text(tensor.dtype, tensor.shape, tensor.host))),
                ("mono", escape(spec_text(tensor.layout))),
                ("n", format_bytes(tensor.local_bytes)),
                ("mono", escape(tensor.alias)),
            )
        )
        for tensor in (*plan.inputs, *plan.outputs)
    ]
    head = _row_of_heads(("path", ""), ("type", ""), ("spec", ""), ("a device", "n"), ("state with", ""))
    return (
        f"<h2>Every leaf</h2>\n<details><summary>{len(lines)} arguments and results</summary>\n"
        f"{_table(head, lines)}</details>"
    )


def _row(cells: Sequence[tuple[str, str]], kind: str = "") -> str:
    """A table's row of `(class, HTML)` cells."""
    inner = "".join(f'<td class="{name}">{text}</td>' if name else f"<td>{text}</td>" for name, text in cells)
    return f'<tr class="{kind}">{inner}</tr>' if kind else f"<tr>{inner}</tr>"


def _row_of_heads(*heads: tuple[str, str]) -> str:
    cells = (f'<th class="{kind}">{name}</th>' if kind else f"<th>{name}</th>" for name, kind in heads)
    return f"<tr>{''.join(cells)}</tr>"


def _table(head: str, rows: Sequence[str]) -> str:
    body = "\n".join(rows)
    return f'<div class="scroll"><table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'
