"""What the SPMD partitioner makes of a program: Shardy's own passes, run in process, no device, no compile.

`partition` propagates the shardings as `jax.jit` would, makes every reshard explicit, turns reshards into
collectives, and reads them with their axes, their bytes on one device and how often they run.  Volumes are
the partitioner's, before the compiler combines, fuses or decomposes collectives.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from .._jax import parse_module, run_passes
from .combined import reassociated, users_of, without_repeats, without_zeros
from .contested import settle
from .exchanged import exchanges
from .flows import Flow, flows_of
from .groups import axes_of_groups, axes_of_pairs
from .imported import as_xla_imports, joined
from .mlir import (
    Dims,
    Visit,
    Walk,
    axes_in,
    axis_size,
    function_layouts,
    local_bytes,
    mesh_sizes,
    numpy_name,
    shape_of,
)
from .spec import MeshAxes

CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute", "all_slice"
]

_PROPAGATION = ("sdy-propagation-pipeline",)
_RESHARDS = (
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true})",
    "func.func(sdy-reshard-to-collectives)",
)
_RULES = ("func.func(sdy-populate-op-sharding-rules)",)
_AXIS_NAME = re.compile(r'axis_ref<name = "([^"]+)"')
_RULE = re.compile(r"#sdy\.op_sharding_rule<(.*)>$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective, as each device takes part in it.

    Attributes:
      kind: all_slice is a reshard that moves nothing: each device keeps a part of what it has.
      axes: the mesh axes it runs over, in mesh order; part of an axis as `"model:(1)2"`.
      bytes: the larger local buffer on one device: an all_gather's result, the operand of the others.
      trips: how often it runs in one step.
      scope: the `jax.named_scope` path of the operation that needs it.
      shape, dtype: of its result, global; of the whole tensor whose edges are exchanged.
      written: by the user, or for a kernel, in a `shard_map`; the partitioner only carries it out.
      order: of a number, see `combined.number_orders`.
      excess: bytes by which XLA rounds up each device's piece of a sum that it scatters (see `cost.scattered_sums`).
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    bytes: int
    trips: float
    scope: str
    shape: tuple[int, ...]
    dtype: str
    written: bool = False
    excess: int = 0
    order: tuple[str, ...] = ()


class OpSharding(NamedTuple):
    """The layouts of one operation's results after propagation.

    Attributes:
      op: the StableHLO operation, `"dot_general"`.
      shapes: global, one a result.
      layouts: one a result: for each dimension the mesh axes that cut it.
      trips: how often it runs in one step.
    """

    scope: str
    op: str
    shapes: tuple[tuple[int, ...], ...]
    layouts: tuple[Dims, ...]
    trips: float


@dataclass(frozen=True, kw_only=True)
class Partitioned:
    """A partitioned program.

    Attributes:
      collectives, ops: in program order; collectives written in `shard_map` included.
      input_layouts, output_layouts: of the step's arguments (those that it uses) and results.
      warnings: what had to be assumed, and reshards that no collective expresses.
      flows: who reads what as what, where it was asked for.
    """

    collectives: tuple[Collective, ...]
    ops: tuple[OpSharding, ...]
    input_layouts: tuple[Dims, ...]
    output_layouts: tuple[Dims, ...]
    warnings: tuple[str, ...]
    flows: tuple[Flow, ...] = ()


def partition(
    module: Any, *, platform: str = "cpu", while_trips: float = 16.0, flows: bool = False
) -> Partitioned:
    """Partition a StableHLO module: `jit(...).lower(...).compiler_ir("stablehlo")`, or its text.

    A text must be written with locations (`get_asm(enable_debug_info=True)`) for scopes to be known.  The passes run on
    a copy.  `platform`: whose XLA imports it, "tpu", "cuda" or "cpu".  A loop whose trip count is no constant counts
    `while_trips` times, with a warning.
    """
    return partition_imported(imported_copy(module, platform), while_trips=while_trips, flows=flows)


def imported_copy(module: Any, platform: str = "cpu") -> Any:
    """A copy of a module, or of its text or bytecode, in the form in which XLA propagates shardings: `partition` begins
    with it."""
    copy = parse_module(module) if isinstance(module, (str, bytes)) else module.operation.clone().opview
    as_xla_imports(copy, platform)
    return copy


def partition_imported(imported: Any, *, while_trips: float = 16.0, flows: bool = False) -> Partitioned:
    """`partition` of an `imported_copy`, on a copy of it."""
    copy = imported.operation.clone().opview
    run_passes(copy, _PROPAGATION)
    sizes = mesh_sizes(copy)
    ops = tuple(
        OpSharding(scope=scope, op=name.removeprefix("stablehlo."), shapes=shapes, layouts=layouts, trips=trips)
        for name, scope, shapes, layouts, trips in Walk(copy, while_trips).made()
        if name.startswith("stablehlo.")
    )
    main = next(op for op in copy.body.operations if op.operation.attributes["sym_name"].value == "main")
    inputs, outputs = function_layouts(main)
    settle(copy)
    run_passes(copy, _RESHARDS)
    resharded = Walk(copy, while_trips)
    visits = list(resharded.visits())
    warnings = list(dict.fromkeys(resharded.warnings))
    warnings += [
        f"`{visit.scope}`: a reshard to {visit.layouts[0]} remains, for which there is no collective"
        for visit in visits
        if visit.op.name == "sdy.reshard"
    ]
    return Partitioned(
        collectives=tuple(_collectives(visits, sizes)),
        ops=ops,
        input_layouts=inputs,
        output_layouts=outputs,
        warnings=tuple(warnings),
        flows=flows_of(visits) if flows else (),
    )


def shardy_rules(module: Any) -> list[tuple[str, str]]:
    """`(operation, rule)` in program order: the factor rules that the partitioner itself will apply.

    Rules are in Shardy's notation: `"([i, k], [k, j])->([i, j]) {i=16, j=8, k=32} reduction={k}"`; operations
    without one are left out.
    """
    copy = imported_copy(module)
    run_passes(copy, _RULES)
    rules = []
    for visit in Walk(copy, 1.0).visits():
        if "sdy.sharding_rule" in visit.op.attributes:
            rule = _RULE.match(str(visit.op.attributes["sdy.sharding_rule"]))
            assert rule is not None
            rules.append((visit.op.name.removeprefix("stablehlo."), rule.group(1)))
    return rules


def _collectives(visits: Sequence[Visit], sizes: dict[str, int]) -> Iterable[Collective]:
    """The collectives among `visits`; an all_reduce that is only sliced is a reduce_scatter."""
    visits, orders = reassociated(without_zeros(without_repeats(visits)))
    users = users_of(visits)
    fused: set[int] = set()
    for visit in visits:
        name = visit.op.name
        if name == "sdy.all_reduce":
            slices = users.get(visit.results[0], ())
            scattered = _sliced_axes(visit, slices)
            if scattered:
                fused.update(s.results[0] for s in slices)
            readers = users.get(visit.results[0], [])
            for collective in _all_reduce(visit, scattered, sizes):
                collective = replace(collective, order=orders.get(visit.operands[0], ()))
                # a number added up from parts belongs to none of their makers, but to who reads it
                total = visit.operands[0] < 0 and not collective.shape and len(readers) > 0
                yield replace(collective, scope=_consumer_scope(readers[0], users)) if total else collective
        elif name in _WRITTEN:
            yield _written(visit, sizes)
        elif name in _SDY and visit.results[0] not in fused:
            for collective in _SDY[name](visit, sizes):
                yield replace(collective, scope=_consumer_scope(visit, users))
        else:
            for operand, axes, size in exchanges(visit, sizes):
                yield _collective(visit, "collective_permute", axes, size, sizes, of=visit.op.operands[operand])


def _consumer_scope(visit: Visit, users: Mapping[int, Sequence[Visit]]) -> str:
    """The scope of the operation for which a value is resharded: a reshard's own name is its producer's, and what a
    barrier lets pass is for who reads it behind that."""
    user, at = visit, 0
    while user.results and (user.op.name in _SDY or user.op.name == _BARRIER):
        passed = user.results[at]
        readers = users.get(passed)
        if not readers:
            return visit.scope
        user = readers[0]
        at = user.operands.index(passed)
    return user.scope if user.results else visit.scope


def _attribute_axes(visit: Visit) -> tuple[str, ...]:
    names = ("reduction_axes", "gathering_axes", "slicing_axes", "reduce_scatter_axes")
    text = next(str(visit.op.attributes[name]) for name in names if name in visit.op.attributes)
    return axes_in(text)


def _sliced_axes(reduced: Visit, users: Sequence[Visit]) -> tuple[str, ...]:
    """The axes of `reduced` over which every one of its users slices it; () if one needs it whole.

    Nor where they slice several dimensions: XLA for TPU compiles an all_reduce and slices then (see `reshard`).
    """
    if not users or any(user.op.name != "sdy.all_slice" for user in users):
        return ()
    if len({_attribute_axes(user) for user in users}) > 1:
        return ()
    summed = _attribute_axes(reduced)
    dims = [axes_in(dim) for dim in re.findall(r"\{[^{}]*\}", str(users[0].op.attributes["slicing_axes"]))]
    scattered = [tuple(axis for axis in dim if axis in summed) for dim in dims if any(axis in summed for axis in dim)]
    return scattered[0] if len(scattered) == 1 else ()


def _all_reduce(visit: Visit, scattered: tuple[str, ...], sizes: dict[str, int]) -> Iterable[Collective]:
    """One all_reduce, or the reduce_scatter over `scattered` and an all_reduce of the part over the rest."""
    whole = local_bytes(visit.op.results[0], visit.layouts[0], sizes)
    rest = tuple(axis for axis in _attribute_axes(visit) if axis not in scattered)
    if scattered:
        yield _collective(visit, "reduce_scatter", scattered, whole, sizes)
        for axis in scattered:
            whole = -(-whole // axis_size(axis, sizes))
    if rest:
        yield _collective(visit, "all_reduce", rest, whole, sizes)


def _result_sized(kind: CollectiveKind) -> Any:
    def read(visit: Visit, sizes: dict[str, int]) -> Iterable[Collective]:
        size = local_bytes(visit.op.results[0], visit.layouts[0], sizes)
        yield _collective(visit, kind, _attribute_axes(visit), size, sizes)

    return read


def _operand_sized(kind: CollectiveKind) -> Any:
    def read(visit: Visit, sizes: dict[str, int]) -> Iterable[Collective]:
        size = local_bytes(visit.op.operands[0], visit.operand_layouts[0], sizes)
        yield _collective(visit, kind, _attribute_axes(visit), size, sizes)

    return read


def _all_to_all(visit: Visit, sizes: dict[str, int]) -> Iterable[Collective]:
    size = local_bytes(visit.op.results[0], visit.layouts[0], sizes)
    # one entry a pair of dimensions: [{"data"}: 0->1, {"model"}: 2->0]
    for entry in re.findall(r"\{([^{}]*)\}", str(visit.op.attributes["params"])):
        yield _collective(visit, "all_to_all", axes_in(entry), size, sizes)


def _written(visit: Visit, sizes: dict[str, int]) -> Collective:
    """A collective that the user wrote, in `shard_map`: its groups are devices, its shapes local."""
    kind = _WRITTEN[visit.op.name]
    mesh_axes = tuple(sizes.items())
    attributes = visit.op.attributes
    if kind == "collective_permute":
        axes = axes_of_pairs(np.array(attributes["source_target_pairs"]), mesh_axes)
    else:
        axes = _group_axes(attributes["replica_groups"], mesh_axes)
    gathered = kind == "all_gather"
    values = visit.op.results if gathered else visit.op.operands
    layouts = visit.layouts if gathered else visit.operand_layouts
    size = sum(local_bytes(v, layout, sizes) for v, layout in zip(values, layouts, strict=True))
    scope = joined(visit.within, visit.scope)
    return replace(_collective(visit, kind, axes, size, sizes), scope=scope, written=True)


def _group_axes(groups: Any, mesh_axes: MeshAxes) -> tuple[str, ...]:
    # jax 0.12 writes the axes themselves, 0.10 a table of devices
    named = tuple(_AXIS_NAME.findall(str(groups)))
    return named or axes_of_groups(np.array(groups), mesh_axes)


def _permute(visit: Visit, sizes: dict[str, int]) -> Iterable[Collective]:
    before, after = visit.operand_layouts[0], visit.layouts[0]
    moved = set()
    for a, b in zip(before, after, strict=True):
        # the major axes that stay first say which pieces change places among themselves
        stay = next((n for n, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))
        moved |= {axis.partition(":")[0] for axis in (*a[stay:], *b[stay:])}
    size = local_bytes(visit.op.results[0], after, sizes)
    yield _collective(visit, "collective_permute", tuple(sorted(moved)), size, sizes)


_SDY = {
    "sdy.all_gather": _result_sized("all_gather"),
    "sdy.all_slice": _operand_sized("all_slice"),
    "sdy.reduce_scatter": _operand_sized("reduce_scatter"),
    "sdy.all_to_all": _all_to_all,
    "sdy.collective_permute": _permute,
}


_BARRIER = "stablehlo.optimization_barrier"


_WRITTEN: dict[str, CollectiveKind] = {
    "stablehlo.all_reduce": "all_reduce",
    "stablehlo.all_gather": "all_gather",
    "stablehlo.reduce_scatter": "reduce_scatter",
    "stablehlo.all_to_all": "all_to_all",
    "stablehlo.collective_permute": "collective_permute",
}


def _whole(axes: tuple[str, ...], sizes: Mapping[str, int]) -> Iterator[str]:
    """`axes`, those whose parts are all among them by their own names: ("data:(1)2", "data:(2)2") is "data" of 4."""
    parts: dict[str, list[str]] = {}
    for axis in axes:
        parts.setdefault(axis.partition(":")[0], []).append(axis)
    for name, own in parts.items():
        extents = [int(part.rpartition(")")[2]) for part in own if part != name]
        yield from (name,) if extents and math.prod(extents) == sizes.get(name) else own


def _collective(
    visit: Visit, kind: CollectiveKind, axes: tuple[str, ...], size: int, sizes: dict[str, int], of: Any = None
) -> Collective:
    order = {name: i for i, name in enumerate(sizes)}
    shape, element_type = shape_of(visit.op.results[0] if of is None else of)
    return Collective(
        kind=kind,
        axes=tuple(
            sorted(_whole(axes, sizes), key=lambda axis: (order.get(axis.partition(":")[0], -1), axis))
        ),
        bytes=size,
        trips=visit.trips,
        scope=visit.scope,
        shape=shape,
        dtype=numpy_name(element_type),
    )
