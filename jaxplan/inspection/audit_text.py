"""An audit as text: both sides, where the difference is, which shardings to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..units import format_bytes, format_seconds

if TYPE_CHECKING:
    from .audit import Audit

_LINES = 8
"""Lines of the program that are shown."""


def audit_text(audit: Audit) -> str:
    """See the module."""
    theirs, ours = audit.theirs, audit.ours
    rows = [("one device, one step", audit.subject, "jaxplan")]

    def both(name: str, first: str, second: str) -> None:
        rows.append((name, first, second))

    both("step", format_seconds(theirs.step_s), format_seconds(ours.step_s))
    both("  computation", format_seconds(theirs.compute_s), format_seconds(ours.compute_s))
    both("  communication", format_seconds(theirs.comm_s), format_seconds(ours.comm_s))
    for axes in sorted({*theirs.comm_s_by_axis, *ours.comm_s_by_axis}):
        both(
            f"    over {axes}",
            *(format_seconds(side.comm_s_by_axis.get(axes, 0.0)) for side in (theirs, ours)),
        )
    both("matrix products", f"{theirs.flops:.3e} FLOP", f"{ours.flops:.3e} FLOP")
    both("memory", format_bytes(theirs.peak_bytes), format_bytes(ours.peak_bytes))
    for part in sorted({*theirs.peak_parts, *ours.peak_parts}):
        both(f"  {part}", *(format_bytes(side.peak_parts.get(part, 0)) for side in (theirs, ours)))
    if theirs.compiled_bytes is not None and ours.compiled_bytes is not None:
        both("compiled: memory", format_bytes(theirs.compiled_bytes), format_bytes(ours.compiled_bytes))
        both(
            "compiled: communication",
            *(
                "refused: no room" if side.compiled_comm_s is None else format_seconds(side.compiled_comm_s)
                for side in (theirs, ours)
            ),
        )
    axes = ", ".join(f"{name}={size}" for name, size in audit.plan.axes)
    ratio = theirs.step_s / ours.step_s if ours.step_s else 1.0
    verdict = f"{audit.subject} takes {ratio:.2f} x the plan's time"
    title = f"Audit of `{audit.name}` on ({axes}), {audit.plan.hardware}: {verdict}"
    lines = [title, "", *_aligned(rows), *_budget(audit), *_where(audit), *_changes(audit)]
    if audit.warnings:
        lines += ["", "Warnings", *(f"  - {warning}" for warning in audit.warnings)]
    return "\n".join(lines)


def _budget(audit: Audit) -> list[str]:
    over = audit.theirs.peak_bytes - audit.budget_bytes
    if over <= 0:
        return []
    budget = format_bytes(audit.budget_bytes)
    return ["", f"  {audit.subject} is {format_bytes(over)} over the budget of {budget} a device"]


def _where(audit: Audit) -> list[str]:
    theirs, ours = audit.theirs.seconds_by_source, audit.ours.seconds_by_source
    changes = sorted(
        ((theirs.get(line, 0.0) - ours.get(line, 0.0), line) for line in {*theirs, *ours}),
        key=lambda change: (-abs(change[0]), change[1]),
    )
    total = abs(audit.theirs.step_s - audit.ours.step_s)
    rows = [
        (line, format_seconds(theirs.get(line, 0.0)), format_seconds(ours.get(line, 0.0)))
        for change, line in changes[:_LINES]
        if abs(change) > 0.01 * total and abs(change) > 0
    ]
    return ["", "Where the difference is", *_aligned([("line", audit.subject, "jaxplan"), *rows])] if rows else []


def _changes(audit: Audit) -> list[str]:
    if not audit.changes:
        return []
    rows = [("tensors", audit.subject, "jaxplan", "costs", "memory")]
    rows += [
        (
            change.paths[0] + (f" and {len(change.paths) - 1} more" if len(change.paths) > 1 else ""),
            str(change.before.spec()), str(change.after.spec()), format_seconds(change.saving_s),
            format_bytes(change.saving_bytes),
        )
        for change in audit.changes
    ]  # fmt: skip
    more = [f"  and {audit.unpriced} smaller leaves"] if audit.unpriced else []
    title = "What to change (costs: what the plan would take more if these alone stayed as they are)"
    return ["", title, *_aligned(rows), *more]


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
