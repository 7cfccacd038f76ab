"""Why a tensor lies as it does: its spec, what moves it, and the price of every other layout."""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import math
import textwrap
from collections.abc import Hashable, Sequence

from ..errors import ArgumentError
from ..sharding import Layout
from ..units import format_bytes, format_seconds
from .columns import WIDTH, aligned, percent
from .folding import fold_collectives
from .plan import Alternative, Plan, PlannedCollective, TensorPlan
from .words import runs_text, shape_text, spec_text

_SHOWN = 6
"""Differently laid tensors that a glob explains, and rows of their tables."""

_SAME = 1e-6
"""Relative difference of objectives below which two layouts cost the same: solvers and sums round that
much."""


def explain_tensor(plan: Plan, path: str) -> str:
    """The text of `Plan.explain`; leaves that a glob matches and that lie alike are explained once."""
    alike: dict[Hashable, list[TensorPlan]] = {}
    for tensor in matching(plan, path):
        alike.setdefault((tensor.layout, tensor.shape, tensor.dtype, tensor.kind, tensor.host), []).append(tensor)
    groups = list(alike.values())
    texts = [_explain(plan, group) for group in groups[:_SHOWN]]
    if len(groups) > _SHOWN:
        rest = sum(len(group) for group in groups[_SHOWN:])
        texts.append(f"and {rest} more leaves in {len(groups) - _SHOWN} other layouts or shapes")
    return "\n\n".join(texts)


def matching(plan: Plan, path: str) -> list[TensorPlan]:
    """Tensors named by an exact path, else by a glob, else by the end of their path; arguments before
    results.

    The end of a path means the parameter, where it names one: its optimizer state ends the same way.

    Raises:
      ArgumentError: none is; names near ones.
    """
    tensors = [*plan.inputs, *(tensor for tensor in plan.outputs if not tensor.alias)]
    exact = [tensor for tensor in (*tensors, *plan.outputs) if tensor.path == path]
    if exact:
        return exact[:1]
    under = f"{path.rstrip('/')}/*"
    for pattern in (path, f"*/{path}", under, f"*/{under}"):
        found = [tensor for tensor in tensors if fnmatch.fnmatchcase(tensor.path, pattern)]
        if found and pattern == path:
            return found
        if found:
            return [tensor for tensor in found if tensor.kind == "parameter"] or found
    names = [tensor.path for tensor in tensors]
    near = difflib.get_close_matches(path, names, n=3, cutoff=0.4)
    last = path.rsplit("/", 1)[-1]
    near += [name for name in names if last and last in name and name not in near][: 3 - len(near)]
    hint = (
        f"Near it: {', '.join(near)}" if near else f"Its first one is {names[0]}" if names else "It has none"
    )
    raise ArgumentError(
        f"no tensor of the plan of `{plan.name}` has the path {path!r}, ends in it, lies under it or matches it as a "
        f"glob. {hint}; print(plan) lists them"
    )


def _explain(plan: Plan, group: Sequence[TensorPlan]) -> str:
    tensor = group[0]
    local = local_shape(tensor, plan)
    rows = [
        ("spec", f"{spec_text(tensor.layout)}: {_cut_text(tensor, plan)}"),
        ("shape", f"{shape_text(tensor.shape)} {tensor.dtype}, {shape_text(local)} on a device"),
        ("bytes", f"{format_bytes(tensor.bytes)}, {format_bytes(tensor.local_bytes)} on a device"),
    ]
    if tensor.alias:
        rows.append(("state", f"the same layout as {tensor.alias}, its value before or after the step"))
    if len(group) > 1:
        rows.append(("alike", f"{len(group) - 1} more, such as {group[1].path}"))
    lines = [f"{tensor.path} ({tensor.kind})", *aligned(rows, shrink=1)]
    priced = next((t for t in (*group, *_aliases(plan, group)) if plan.alternatives.get(t.path)), None)
    alternatives = sorted(
        plan.alternatives[priced.path] if priced else (),
        key=lambda a: (a.objective_s, not a.fits, str(a.layout)),
    )
    why = textwrap.fill(
        _why(plan, tensor, alternatives),
        WIDTH,
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
    )
    lines += ["", why]
    if alternatives:
        lines += ["", *_alternatives(plan, tensor, alternatives)]
    collectives = _of_its_size(plan, tensor)
    if collectives:
        lines += ["", *_collectives(collectives)]
    return "\n".join(lines)


def _aliases(plan: Plan, group: Sequence[TensorPlan]) -> list[TensorPlan]:
    names = {tensor.alias for tensor in group}
    return [tensor for tensor in plan.inputs if tensor.path in names]


def local_shape(tensor: TensorPlan, plan: Plan) -> tuple[int, ...]:
    """The shape of one device's piece."""
    size = dict(plan.axes)
    cut = (math.prod(size[name] for name in names) for names in tensor.layout.dims)
    return tuple(extent // pieces for extent, pieces in zip(tensor.shape, cut, strict=True))


def _cut_text(tensor: TensorPlan, plan: Plan) -> str:
    size = dict(plan.axes)
    cuts = [
        f"dimension {d} ({extent}) in {math.prod(size[n] for n in names)} over {' and '.join(names)}"
        for d, (extent, names) in enumerate(zip(tensor.shape, tensor.layout.dims, strict=True))
        if names
    ]
    return "; ".join(cuts) or "whole on every device"


def _cut_words(layout: Layout) -> str:
    names = [name for dim in layout.dims for name in dim]
    return f"cut over {' and '.join(names)}" if names else "replicated"


def _why(plan: Plan, tensor: TensorPlan, alternatives: Sequence[Alternative]) -> str:
    """One sentence, from the prices: what the next best layout would cost."""
    chosen = f"{_cut_words(tensor.layout)[0].upper()}{_cut_words(tensor.layout)[1:]}"
    if not alternatives:
        if not plan.cost.termination or plan.cost.termination == "template":
            return f"{chosen}: the template {plan.search!r} lays it out so; nothing else was priced."
        return f"{chosen}: no other layout was possible, or none was priced, for this tensor."
    mine_s = plan.cost.objective_s
    fitting = [a for a in alternatives if a.fits]
    too_big = [a for a in alternatives if not a.fits and a.objective_s < mine_s * (1 - _SAME)]
    sentences = []
    if not fitting:
        sentences.append(
            f"{chosen}: no other layout fits the budget of {format_bytes(plan.budget_bytes)} a device."
        )
    else:
        best = fitting[0]
        extra_s = best.objective_s - mine_s
        other = f"{spec_text(best.layout)} ({_cut_words(best.layout)})"
        if extra_s > _SAME * mine_s:
            sentences.append(
                f"{chosen}: the next best, {other}, would cost {format_seconds(extra_s)} more a step "
                f"(+{percent(extra_s / mine_s)}) with the rest of the plan as it is."
            )
        elif extra_s >= -_SAME * mine_s:
            sentences.append(f"{chosen}: {other} would cost the same; the choice between them is free.")
        else:
            # a proof of optimality leaves one reason: the price is of this tensor alone, the budget of all of
            # them
            reason = (
                "the memory budget forbids it"
                if plan.cost.termination == "optimal"
                else f'the search ended as "{plan.cost.termination}" before it, or memory forbids it'
            )
            sentences.append(
                f"{chosen}, though {other} is priced {format_seconds(-extra_s)} lower: {reason}."
            )
    if too_big:
        saved = format_seconds(mine_s - too_big[0].objective_s)
        sentences.append(
            f"{spec_text(too_big[0].layout)} would save {saved} a step, but does not fit the memory budget."
        )
    return " ".join(sentences)


def _alternatives(plan: Plan, tensor: TensorPlan, alternatives: Sequence[Alternative]) -> list[str]:
    mine_s = plan.cost.objective_s
    rows = [(mine_s, 0, tensor.layout, "chosen")]
    rows += [
        (a.objective_s, 1, a.layout, "" if a.fits else "does not fit the memory budget") for a in alternatives
    ]
    rows.sort(key=lambda row: (row[0], row[1]))
    table = [("layout", "a device", "objective", "difference", "", "")]
    table += [
        (
            spec_text(layout),
            format_bytes(tensor.bytes / layout.shards(plan.axes)),
            format_seconds(objective_s),
            "" if note == "chosen" else _signed(objective_s - mine_s),
            "" if note == "chosen" or mine_s <= 0 else f"{100 * (objective_s / mine_s - 1):+.1f} %",
            note,
        )
        for objective_s, _, layout, note in rows
    ]
    title = "  Layouts of this tensor (objective: the step's, with the rest of the plan as it is)"
    return [title, *aligned(table, right=(1, 2, 3, 4), indent=4)]


def _signed(difference_s: float) -> str:
    return f"{'-' if difference_s < 0 else '+'}{format_seconds(abs(difference_s))}"


def _of_its_size(plan: Plan, tensor: TensorPlan) -> list[PlannedCollective]:
    """Collectives whose buffer is this tensor, its piece over some of the axes, or one layer of a stack of
    it.

    The plan knows the operation that a collective belongs to, not the tensor: size is what can be told.
    """
    if not tensor.shape:
        return []
    extents = [size for _, size in plan.axes]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(extents, n) for n in range(len(extents) + 1)
    )
    sizes = {tensor.bytes / math.prod(subset) for subset in subsets}
    found = []
    for one in plan.collectives:
        stacked = tensor.shape[0] if one.trips == tensor.shape[0] else 1
        if one.bytes in sizes or one.bytes * stacked in sizes:
            found.append(one)
    return found


def _collectives(collectives: Sequence[PlannedCollective]) -> list[str]:
    rows = fold_collectives(collectives)
    table = [("where", "collective", "axis", "bytes", "runs", "seconds")]
    table += [
        (
            row.where,
            row.kind,
            "+".join(row.axes),
            format_bytes(row.bytes),
            runs_text(row.runs),
            format_seconds(row.seconds_s),
        )
        for row in rows[:_SHOWN]
    ]
    if len(rows) > _SHOWN:
        seconds = format_seconds(sum(row.seconds_s for row in rows[_SHOWN:]))
        table.append((f"and {len(rows) - _SHOWN} more", "", "", "", "", seconds))
    title = "  Collectives of its size (its gather, its gradient's sum, or those of a tensor as large)"
    return [title, *aligned(table, right=(3, 4, 5), indent=4)]
