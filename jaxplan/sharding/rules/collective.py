"""What a step says about its own sharding, and fences between operations."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from ..rule import FixedDims, OpShapes, Rule, RuleBuilder
from .registry import register, replicated


@register("layout_constraint", "optimization_barrier", "name", "shard_alike", "xla_metadata_value")
def pairs(op: OpShapes) -> Rule:
    """`([i],[j,k])->([i],[j,k])`: every operand with its own result."""
    b = RuleBuilder()
    tensors = [b.factors(shape) for shape in op.operands]
    return b.rule(operands=tensors, results=tensors, follows=True, linear=True)


@register("device_put")
def device_put(op: OpShapes) -> Rule:
    """As `pairs`; what changes its memory does so by itself, and no sum is pending there; a sharding is fixed."""
    places, free = op.params.get("devices", ()), pairs(op)
    if all(place is None for place in places):
        return free
    named = [
        _dims(place.spec, len(shape)) if isinstance(place, NamedSharding) else (None,) * len(shape)
        for place, shape in zip(places, op.operands, strict=True)
    ]
    cut = any(isinstance(place, NamedSharding) for place in places)
    return dataclasses.replace(free, follows=False, linear=False, fixed=(tuple(named), tuple(named)) if cut else None)


@register("sharding_constraint")
def sharding_constraint(op: OpShapes) -> Rule:
    """What the user pinned stays pinned, what was left open (UNCONSTRAINED) stays open."""
    sharding = op.params["sharding"]
    if not isinstance(sharding, NamedSharding):
        return pairs(op)
    dims = _dims(sharding.spec, len(op.operands[0]))
    free = pairs(op)
    if dims and all(dim is None for dim in dims):
        return free
    return dataclasses.replace(free, follows=False, fixed=((dims,), (dims,)))


@register("shard_map")
def shard_map(op: OpShapes) -> Rule:
    """Laid out as its own specs say; on a mesh without their axes, whole."""
    whole = replicated(op)
    sides = tuple(
        tuple(_dims(spec, len(shape)) for spec, shape in zip(specs, shapes, strict=True))
        for specs, shapes in ((op.params["in_specs"], op.operands), (op.params["out_specs"], op.results))
    )
    return dataclasses.replace(whole, fixed=(sides[0], sides[1]))


@register("custom_partitioning")
def custom_partitioning(op: OpShapes) -> Rule:
    """What its author says in `def_partition(sharding_rule=...)`; without that, whole and named.

    Factors that the author calls reductions stay whole: whether the author's own code adds the parts up is not said.
    """
    said = op.params["sharding_rule"]
    if not hasattr(said, "operand_mappings"):
        return replicated(op, note="custom_partitioning without a sharding rule: replicated")
    b = RuleBuilder()
    named: dict[str, int] = {}

    def factor(name: str, extent: int) -> int:
        if name not in named:
            named[name] = b.factor(extent)
        return named[name]

    def tensor(mapping: Any, shape: tuple[int, ...]) -> list[Any]:
        dims: list[Any] = []
        own = [entry for entry in mapping if not (isinstance(entry, str) and entry.startswith(_BATCHING))]
        if len(own) < len(mapping):  # leading dimensions that the rule leaves unnamed
            leading = shape[: len(shape) - len(own)]
            dims += [factor(f"{mapping[0]}{d}", extent) for d, extent in enumerate(leading)]
        for entry in own:
            if isinstance(entry, str):
                dims.append(factor(entry, shape[len(dims)]))
            else:
                dims.append(tuple(factor(name, said.factor_sizes[name]) for name in entry))
        return dims

    # whole dimensions first: they tell the extents of what stands in a compound one elsewhere
    sides = [*zip(said.operand_mappings, op.operands, strict=True), *zip(said.result_mappings, op.results, strict=True)]
    for mapping, shape in sides:
        for entry, extent in zip(reversed(mapping), reversed(shape), strict=False):
            if isinstance(entry, str) and not entry.startswith(_BATCHING):
                factor(entry, extent)
    tensors = [tensor(mapping, shape) for mapping, shape in sides]
    special = (said.reduction_factors, said.need_replication_factors, said.permutation_factors)
    return b.rule(
        operands=tensors[: len(op.operands)],
        results=tensors[len(op.operands) :],
        need_replication=[named[name] for names in special for name in names],
        flops=float(max(math.prod(shape) for shape in op.operands + op.results)),
    )


_BATCHING = "…"
"""How jax's custom_partitioning_sharding_rule writes "..." inside."""


def _dims(spec: Any, rank: int) -> FixedDims:
    entries: list[tuple[str, ...] | None] = [
        None
        if e is PartitionSpec.UNCONSTRAINED
        else ()
        if e is None
        else (e,)
        if isinstance(e, str)
        else tuple(e)
        for e in spec
    ]
    return tuple(entries + [()] * (rank - len(entries)))
