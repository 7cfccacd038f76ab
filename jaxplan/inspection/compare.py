"""A plan and a compiled program -> what differs, and where in the user's program it comes from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from ..cost import CostModel, device_bytes
from ..ir import HOST_KIND, Value, on_host
from ..lowering import CompiledWork, compiled_collectives, compiled_memory, compiled_work, reused_parameters
from ..plans import Plan, TensorPlan
from ..sharding import places_of_layout
from ..units import format_bytes
from .findings import Finding, Quantity, Verification, ranked
from .matching import Part, compiled_parts, match, places, planned_parts

WORTH_TELLING = 0.01
"""Share of the planned step time from which a collective that was not planned is a grave finding."""
FLOPS_TOLERANCE = 0.05
"""Compilers drop products with a dimension of one, and split or merge some others."""
MEMORY_TOLERANCE = 0.06
"""Plans of the suite are compiled to peaks at most 5 % over what they promise (`experiments/quality`, its README)."""
HOST_MEMORY_TOLERANCE = 1.0
"""XLA for CPU fuses less than the memory model takes it to: what stays between kernels lies in memory twice as long."""
SMALL_BYTES = 8 * 2**20
"""Beyond any share: workspaces of libraries (cuBLAS takes 4 MiB and more), whole tiles for small tensors on TPU."""


@dataclass(frozen=True, kw_only=True)
class Tolerances:
    """From which share on a difference is grave: of the step's time, of its FLOPs, of its peak memory.

    `memory`: None for `MEMORY_TOLERANCE`, and on hosts `HOST_MEMORY_TOLERANCE`.
    """

    collective: float = WORTH_TELLING
    flops: float = FLOPS_TOLERANCE
    memory: float | None = None


def compare(
    plan: Plan, compiled: Any, model: CostModel, tolerances: Tolerances, while_trips: float
) -> Verification:
    """Lay `compiled`, a `jax.stages.Compiled`, beside `plan`."""
    text = compiled.as_text()
    collectives = compiled_collectives(text, plan.axes, while_trips=while_trips)
    planned, found = planned_parts(plan.collectives, plan.axes), compiled_parts(collectives)
    match(planned, found, plan.axes)
    memory = compiled_memory(compiled)
    work = compiled_work(text, while_trips=while_trips)
    step_s = plan.cost.step_s
    on_host = model.profile.kind == "cpu"
    spare = tolerances.memory
    if spare is None:
        spare = HOST_MEMORY_TOLERANCE if on_host else MEMORY_TOLERANCE
    findings = [
        *_mesh(plan, compiled),
        *_arguments(plan, compiled),
        *_results(plan, compiled),
        *_donations(plan, compiled, reused_parameters(text)),
        *_surplus(found, model, tolerances.collective * step_s),
        *_dearer(found, model, math.inf if on_host else tolerances.collective * step_s),
        *_missing(planned, model, tolerances.collective * step_s),
        *_computation(plan, work, memory.peak_bytes, tolerances.flops),
        *_memory(plan, memory.peak_bytes, spare, 0 if on_host else SMALL_BYTES),
    ]
    known = None if work is None else sum(w.flops * w.trips for w in work)
    quantities = [
        Quantity(name="matrix products", planned=_planned_flops(plan), compiled=known, unit="FLOP"),
        Quantity(name="arguments", planned=_argument_bytes(plan, compiled, model.profile.kind),
                 compiled=memory.argument_bytes, unit="B"),
        Quantity(name="peak memory", planned=plan.cost.peak_bytes, compiled=memory.peak_bytes, unit="B"),
        *_sent(planned, found, plan, model),
    ]  # fmt: skip
    return Verification(
        name=plan.name, platform=_platform(compiled), findings=ranked(findings), quantities=tuple(quantities),
        assumptions=plan.assumptions,
    )  # fmt: skip


def _argument_bytes(plan: Plan, compiled: Any, platform: str) -> int:
    """Of the arguments that the program uses as they lie in the devices' memory: on TPU in whole tiles; on CPU, whose
    hosts' memory is the devices' own, all of them."""
    shardings = _shardings(compiled)
    used = [s is not None for s in shardings] if len(shardings) == len(plan.inputs) else [True] * len(plan.inputs)

    def held(tensor: TensorPlan) -> int:
        if tensor.host and platform != "cpu":
            return 0
        item_bytes = tensor.bytes / max(math.prod(tensor.shape), 1)
        value = Value(index=0, name=tensor.path, shape=tensor.shape, dtype=tensor.dtype, item_bytes=item_bytes)
        places = places_of_layout(tensor.layout, plan.axes)[None]
        return max(int(device_bytes(value, places, plan.axes, platform)[0]), tensor.local_bytes)

    return sum(held(tensor) for tensor, present in zip(plan.inputs, used, strict=True) if present)


def _planned_flops(plan: Plan) -> float:
    return sum(plan.cost.flops_by_source.values())


def _shardings(compiled: Any) -> list[Any]:
    """Of every argument leaf; None for those that the program doesn't use."""
    tree: Any = jax.tree.structure(compiled.args_info)  # which tells a None among the arguments from an unused one
    return list(tree.flatten_up_to(compiled.input_shardings))


def _mesh_of(compiled: Any) -> Any:
    named = [s for s in jax.tree.leaves(compiled.input_shardings) if isinstance(s, NamedSharding)]
    return named[0].mesh if named else None


def _platform(compiled: Any) -> str:
    devices = [d for s in jax.tree.leaves(compiled.input_shardings) for d in list(s.device_set)[:1]]
    return f"{devices[0].device_kind} ({devices[0].platform})" if devices else "unknown devices"


def _mesh(plan: Plan, compiled: Any) -> Iterator[Finding]:
    mesh = _mesh_of(compiled)
    if mesh is None:
        return
    axes = tuple((str(name), int(size)) for name, size in mesh.shape.items())
    if axes != plan.axes:

        def said(sizes: Sequence[tuple[str, int]]) -> str:
            return ", ".join(f"{name}={size}" for name, size in sizes)

        yield Finding(
            what="mesh", where=f"({said(axes)})", text=f"the plan was made for ({said(plan.axes)})"
        )


def _arguments(plan: Plan, compiled: Any) -> Iterator[Finding]:
    infos = jax.tree.leaves(compiled.args_info)
    if len(infos) != len(plan.inputs):
        yield Finding(
            what="argument", where=f"`{plan.name}`",
            text=f"{len(infos)} argument leaves were compiled, {len(plan.inputs)} planned",
        )  # fmt: skip
        return
    for tensor, info, sharding in zip(plan.inputs, infos, _shardings(compiled), strict=True):
        yield from _tensor("argument", tensor, info, sharding)


def _results(plan: Plan, compiled: Any) -> Iterator[Finding]:
    infos = jax.tree.leaves(compiled.out_info)
    if len(infos) != len(plan.outputs):
        yield Finding(
            what="result", where=f"`{plan.name}`",
            text=f"{len(infos)} result leaves were compiled, {len(plan.outputs)} planned",
        )  # fmt: skip
        return
    shardings = jax.tree.leaves(compiled.output_shardings)
    for tensor, info, sharding in zip(plan.outputs, infos, shardings, strict=True):
        yield from _tensor("result", tensor, info, sharding)


def _tensor(what: str, tensor: TensorPlan, info: Any, sharding: Any) -> Iterator[Finding]:
    if (tuple(info.shape), str(info.dtype)) != (tensor.shape, tensor.dtype):
        yield Finding(
            what=what, where=tensor.path,
            text=f"planned {tensor.dtype}{list(tensor.shape)}, compiled {info.dtype}{list(info.shape)}",
        )  # fmt: skip
        return
    if sharding is None:
        return
    wanted = tensor.layout.spec()
    if isinstance(sharding, NamedSharding):
        axes = {name for dim in tensor.layout.dims for name in dim}
        same = axes <= set(sharding.mesh.shape) and sharding.is_equivalent_to(
            NamedSharding(sharding.mesh, wanted, memory_kind=HOST_KIND if tensor.host else None), len(tensor.shape)
        )
        compiled = str(sharding.spec)
    else:
        same = (
            math.prod(sharding.shard_shape(tensor.shape)) * tensor.bytes
            == tensor.local_bytes * math.prod(tensor.shape) or not tensor.shape
        )  # fmt: skip
        compiled = str(sharding)
    if not same:
        held = tensor.bytes * math.prod(sharding.shard_shape(tensor.shape)) / max(math.prod(tensor.shape), 1)
        yield Finding(
            what="sharding", where=tensor.path,
            text=f"planned {wanted}{_where(tensor.host)} ({format_bytes(tensor.local_bytes)} a device), compiled "
            f"{compiled}{_where(on_host(sharding))} ({format_bytes(held)})",
        )  # fmt: skip


def _where(host: bool) -> str:
    return " in the host's memory" if host else ""


def _donations(plan: Plan, compiled: Any, reused: frozenset[int]) -> Iterator[Finding]:
    """Donated leaves that come back and whose buffer the program doesn't write into."""
    shardings = _shardings(compiled)
    if len(shardings) != len(plan.inputs):
        return
    number = -1
    lost = []
    for tensor, sharding in zip(plan.inputs, shardings, strict=True):
        if sharding is None:
            continue  # not used, so no parameter of the program
        number += 1
        if tensor.donated and tensor.alias and number not in reused:
            lost.append(tensor)
    if lost:
        size = sum(tensor.local_bytes for tensor in lost)
        names = ", ".join(tensor.path for tensor in lost[:4]) + (
            f" and {len(lost) - 4} more" if len(lost) > 4 else ""
        )
        yield Finding(
            what="donation", where=names,
            text=f"planned to be given away, kept beside {'its' if len(lost) == 1 else 'their'} next value: "
            f"{format_bytes(size)} more a device",
        )  # fmt: skip


def _seconds(part: Part, model: CostModel) -> float:
    """Of the runs that are left."""
    return part.left * _seconds_of(part, model, part.kind, 1.0)


def _seconds_of(part: Part, model: CostModel, kind: str, share: float) -> float:
    """Of one run, were it of that kind and of that share of the bytes."""
    names = [name for name, _ in model.axes] if part.names == ("?",) else part.names
    return model.collective_over(kind, share * part.together_bytes, names) * part.bytes / max(part.together_bytes, 1)


_ROUNDED = ": the reduce_scatter there sums more rows in a piece than it is of, and they move on"


def _surplus(found: Sequence[Part], model: CostModel, least_s: float) -> Iterator[Finding]:
    """Compiled collectives that were not planned, those of one line, kind and axes together."""
    left = [
        (part, f"not planned{_ROUNDED if part.rounded else ''}", part.left, _seconds(part, model))
        for part in found
        if part.left > 0
    ]
    yield from _by_line(left, least_s)


def _dearer(found: Sequence[Part], model: CostModel, least_s: float) -> Iterator[Finding]:
    """Compiled collectives that do what a planned one does and send more: sums made whole and then cut, wider types.

    XLA for CPU scatters no sum (jax 0.10.2): there it is nobody's mistake.
    """
    dearer = []
    for part in found:
        for kind, share, runs in part.instead:
            change = "sent in a type twice as wide" if share < 1 else f"where a {kind} was planned"
            more_s = _seconds_of(part, model, part.kind, 1.0) - _seconds_of(part, model, kind, share)
            dearer.append((part, change, runs, runs * more_s))
    yield from _by_line(dearer, least_s)


def _by_line(
    differing: Sequence[tuple[Part, str, float, float]], least_s: float
) -> Iterator[Finding]:
    """Findings of (part, how it differs, runs, seconds more), those of one line, kind, axes and difference together."""
    seconds: dict[tuple[str, str, str], float] = {}
    sizes: dict[tuple[str, str, str], list[str]] = {}
    for part, change, runs, more_s in differing:
        key = (f"{part.kind} over {'+'.join(part.names)}", part.where, change)
        seconds[key] = seconds.get(key, 0.0) + more_s
        times = f" x {runs:g}" if runs != 1 else ""
        sizes.setdefault(key, []).append(f"{format_bytes(part.bytes)}{times}")
    for (what, where, change), total in seconds.items():
        moved = sizes[what, where, change]
        text = f"{what} of {', '.join(moved[:3])}{f' and {len(moved) - 3} more' if len(moved) > 3 else ''}, {change}"
        yield Finding(what="collective", where=where, text=text, seconds_s=total, grave=total > least_s)


def _missing(planned: Sequence[Part], model: CostModel, least_s: float) -> Iterator[Finding]:
    for part in planned:
        # one that runs less often than planned was moved out of its loop
        if part.left == part.trips and part.kind != "all_slice" and _seconds(part, model) > least_s:
            text = f"planned {part.kind} over {'+'.join(part.names)} of {format_bytes(part.bytes)} isn't in the program"
            yield Finding(what="collective", where=part.where, text=text, grave=False)


def _computation(
    plan: Plan, work: Sequence[CompiledWork] | None, peak_bytes: int, tolerance: float
) -> Iterator[Finding]:
    """More arithmetic than planned is grave; less where memory grew: what was to be computed again is kept instead, or
    what equal products make is kept for all that need it."""
    planned = _planned_flops(plan)
    if work is None or not planned:
        return
    total = sum(w.flops * w.trips for w in work)
    if abs(total - planned) <= tolerance * planned:
        return
    compiled: dict[str, float] = {}
    for w in work:
        # the planned line that shares most places with it; what no planned line made goes by its innermost one
        here = places(w.sources)
        shared, line = max(((len(places((p,)) & here), p) for p in plan.cost.flops_by_source), default=(0, ""))
        if not shared:
            line = (*w.sources, w.op_name, "")[0] or "no line of the program"
        compiled[line] = compiled.get(line, 0.0) + w.flops * w.trips
    lines = {**dict.fromkeys(compiled, 0.0), **plan.cost.flops_by_source}
    changes = sorted(((compiled.get(line, 0.0) - f, line) for line, f in lines.items()), key=lambda c: -abs(c[0]))
    worst = [f"{line} {change:+.2e}" for change, line in changes[:3] if abs(change) > 0.01 * planned]
    kept = total < planned and peak_bytes > (1 + MEMORY_TOLERANCE) * plan.cost.peak_bytes
    if kept:
        kept_instead = "what was to be computed again, or twice, is kept"
        worst.append(f"and the peak grew to {format_bytes(peak_bytes)}: {kept_instead}")
    yield Finding(
        what="computation", where=changes[0][1],
        text=f"planned {planned:.3e} FLOP in matrix products, compiled {total:.3e} ({total / planned - 1:+.0%}): "
        + ", ".join(worst),
        grave=total > planned or kept,
    )  # fmt: skip


def _memory(plan: Plan, peak_bytes: int, tolerance: float, small_bytes: int) -> Iterator[Finding]:
    planned = plan.cost.peak_bytes
    if peak_bytes > plan.budget_bytes:
        yield Finding(
            what="memory", where=plan.cost.peak_where or "peak",
            text=f"compiled peak {format_bytes(peak_bytes)} is over the budget of {format_bytes(plan.budget_bytes)}; "
            f"planned {format_bytes(planned)}",
        )  # fmt: skip
    elif abs(peak_bytes - planned) > tolerance * planned + small_bytes:
        yield Finding(
            what="memory", where=plan.cost.peak_where or "peak",
            text=f"planned peak {format_bytes(planned)}, compiled {format_bytes(peak_bytes)}",
            grave=peak_bytes > planned,
        )  # fmt: skip


def _sent(
    planned: Sequence[Part], found: Sequence[Part], plan: Plan, model: CostModel
) -> Iterator[Quantity]:
    totals: dict[tuple[str, str], list[float]] = {}
    for side, parts in enumerate((planned, found)):
        for part in parts:
            whole = Part(**{**vars(part), "left": part.trips})
            row = totals.setdefault(("+".join(part.names), part.kind), [0.0, 0.0])
            row[side] += whole.wire_bytes(plan.axes)
    for (axes, kind), (before, after) in sorted(totals.items()):
        if kind != "all_slice":
            yield Quantity(name=f"sent over {axes}: {kind}", planned=before, compiled=after, unit="B")
