"""What one plan does differently from another: for a review, and for a change of model, mesh or machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..units import format_bytes, format_seconds
from .columns import WIDTH, aligned, percent
from .folding import fold_paths
from .plan import Constraint, Plan, TensorPlan
from .table import against, mesh_text
from .words import runs_text, shape_text, spec_text, type_text

_SHOWN = 40
"""Rows of one section."""


def plan_diff(before: Plan, after: Plan) -> str:
    """Sections of what differs, before and after side by side; "no difference" where nothing does.

    How long the searches took is no difference.
    """
    if before == after:
        return "no difference"
    sections = [
        _setting(before, after),
        _specs("Arguments", before.inputs, after.inputs),
        _specs("Results", _new(before), _new(after)),
        _cost(before, after),
        _collectives(before, after),
        _constraints(before, after),
        _prices(before, after),
        _lines("Warnings", before.warnings, after.warnings),
        _lines("Assumptions", before.assumptions, after.assumptions),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _new(plan: Plan) -> list[TensorPlan]:
    """Results that are no state: the state's layouts are compared as arguments."""
    return [tensor for tensor in plan.outputs if not tensor.alias]


def _setting(before: Plan, after: Plan) -> list[str]:
    rows = [
        (what, old, new)
        for what, old, new in (
            ("step", before.name, after.name),
            ("mesh", mesh_text(before), mesh_text(after)),
            ("hardware", before.hardware, after.hardware),
            ("device kind", before.device_kind, after.device_kind),
            ("budget", format_bytes(before.budget_bytes), format_bytes(after.budget_bytes)),
            ("search", before.search, after.search),
            ("jax", before.jax_version, after.jax_version),
            ("program", before.fingerprint[:12], after.fingerprint[:12]),
        )
        if old != new
    ]
    return ["Setting", *aligned([("", "before", "after"), *rows], shrink=1)] if rows else []


def _specs(title: str, before: Sequence[TensorPlan], after: Sequence[TensorPlan]) -> list[str]:
    old, new = ({tensor.path: tensor for tensor in tensors} for tensors in (before, after))
    changed = []
    for path in dict.fromkeys([*old, *new]):
        was, now = old.get(path), new.get(path)
        if was is None or now is None or not _same(was, now):
            sizes = " -> ".join("none" if t is None else format_bytes(t.local_bytes) for t in (was, now))
            changed.append((path, (_tensor_text(was, now), _tensor_text(now, was), sizes)))
    if not changed:
        return []
    rows = [(fold.pattern, str(len(fold.paths)), *fold.alike) for fold in fold_paths(changed)]
    table = [("tensor", "leaves", "before", "after", "a device"), *rows[:_SHOWN]]
    rest = [f"  and {len(rows) - _SHOWN} more rows"] if len(rows) > _SHOWN else []
    total = len(old.keys() | new.keys())
    return [f"{title}: {len(changed)} of {total} leaves differ", *aligned(table, right=(1,)), *rest]


def _same(was: TensorPlan, now: TensorPlan) -> bool:
    return (was.layout, was.shape, was.dtype, was.host, was.local_bytes) == (
        now.layout, now.shape, now.dtype, now.host, now.local_bytes,
    )  # fmt: skip


def _tensor_text(tensor: TensorPlan | None, other: TensorPlan | None) -> str:
    if tensor is None:
        return "none"
    if other is not None and (other.shape, other.dtype) == (tensor.shape, tensor.dtype):
        return spec_text(tensor.layout)
    if other is None:
        return spec_text(tensor.layout)
    return f"{spec_text(tensor.layout)} {type_text(tensor.dtype, tensor.shape, tensor.host)}"


def _change(old: float, new: float) -> str:
    if old == new:
        return ""
    return against(new, old) if old > 0 else "new"


def _cost(before: Plan, after: Plan) -> list[str]:
    a, b = before.cost, after.cost
    rows: list[tuple[str, ...]] = []

    def add(name: str, old: float, new: float, write: Callable[[float], str]) -> None:
        if old != new:
            rows.append((name, write(old), write(new), _change(old, new)))

    def add_all(
        name: str, old: Mapping[str, float], new: Mapping[str, float], write: Callable[..., str]
    ) -> None:
        for key in dict.fromkeys([*old, *new]):
            add(name.format(key), old.get(key, 0), new.get(key, 0), write)

    add("step", a.step_s, b.step_s, format_seconds)
    add("  compute", a.compute_s, b.compute_s, format_seconds)
    add("  exposed communication", a.exposed_comm_s, b.exposed_comm_s, format_seconds)
    add("communication before overlap", a.comm_s, b.comm_s, format_seconds)
    add_all("  over {}", a.comm_s_by_axis, b.comm_s_by_axis, format_seconds)
    add("sent by a device", a.comm_bytes, b.comm_bytes, format_bytes)
    add_all("  over {}", a.comm_bytes_by_axis, b.comm_bytes_by_axis, format_bytes)
    add("peak memory", a.peak_bytes, b.peak_bytes, format_bytes)
    add_all("  {}", a.peak_parts, b.peak_parts, format_bytes)
    add("objective", a.objective_s, b.objective_s, format_seconds)
    add("bound", a.bound_s, b.bound_s, format_seconds)
    if (a.gap, a.termination) != (b.gap, b.termination):
        rows.append(("termination", _ended(before), _ended(after), ""))
    return ["Cost", *aligned([("", "before", "after", "change"), *rows], right=(1, 2, 3))] if rows else []


def _ended(plan: Plan) -> str:
    return plan.cost.termination + (f", gap {percent(plan.cost.gap)}" if plan.cost.gap else "")


def _collectives(before: Plan, after: Plan) -> list[str]:
    old, new = _by_kind(before), _by_kind(after)
    table = [("collective", "axis", "runs", "", "sent", "", "seconds", "", "change")]
    for kind, axes in dict.fromkeys([*old, *new]):
        was, now = old.get((kind, axes), (0.0, 0.0, 0.0)), new.get((kind, axes), (0.0, 0.0, 0.0))
        if was != now:
            cells = (runs_text(was[0]), runs_text(now[0]), format_bytes(was[1]), format_bytes(now[1]))
            seconds = (format_seconds(was[2]), format_seconds(now[2]), _change(was[2], now[2]))
            table.append((kind, "+".join(axes), *cells, *seconds))
    if len(table) == 1:
        return []
    return ["Collectives a step, before and after", *aligned(table, right=range(2, 9))]


def _by_kind(plan: Plan) -> dict[tuple[str, tuple[str, ...]], tuple[float, float, float]]:
    """(runs, bytes sent, seconds) of a step by (kind, axes)."""
    sums: dict[tuple[str, tuple[str, ...]], tuple[float, float, float]] = {}
    for one in plan.collectives:
        runs, sent, seconds = sums.get((one.kind, one.axes), (0.0, 0.0, 0.0))
        key = (one.kind, one.axes)
        sums[key] = (runs + one.trips, sent + one.wire_bytes * one.trips, seconds + one.seconds_s)
    return sums


def _constraints(before: Plan, after: Plan) -> list[str]:
    return _lines(
        "Constraints inside the step",
        [_constraint_text(one) for one in before.constraints if one.is_pin],
        [_constraint_text(one) for one in after.constraints if one.is_pin],
    )


def _constraint_text(one: Constraint) -> str:
    return f"{one.source} {one.primitive} {shape_text(one.shape)}: {spec_text(one.layout)} ({one.why})"


def _prices(before: Plan, after: Plan) -> list[str]:
    rows = [
        (name, _step_text(before.templates.get(name)), _step_text(after.templates.get(name)))
        for name in dict.fromkeys([*before.templates, *after.templates])
        if before.templates.get(name) != after.templates.get(name)
    ]
    return ["Templates", *aligned([("", "before", "after"), *rows], right=(1, 2))] if rows else []


def _step_text(step_s: Any) -> str:
    return "does not fit" if step_s is None else format_seconds(step_s)


def _lines(title: str, before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Lines that only one of two lists holds, each as often as it does."""
    gone, new = _less(before, after), _less(after, before)
    lines = [f"  - {line}" for line in gone] + [f"  + {line}" for line in new]
    rest = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [f"{title}: {len(gone)} gone, {len(new)} new", *_cut(lines[:_SHOWN]), *rest] if lines else []


def _less(lines: Sequence[str], other: Sequence[str]) -> list[str]:
    left = list(other)
    kept = []
    for line in lines:
        if line in left:
            left.remove(line)
        else:
            kept.append(line)
    return kept


def _cut(lines: Sequence[str]) -> list[str]:
    return [line if len(line) <= WIDTH else f"{line[: WIDTH - 2]}.." for line in lines]
