"""What a step says about its own sharding, and fences between operations."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from ..rule import FixedDims, OpShapes, Rule, RuleBuilder
from .registry import register, replicated


@register("layout_constraint", "optimization_barrier", "device_put")
def pairs(op: OpShapes) -> Rule:
    """`([i],[j,k])->([i],[j,k])`: every operand with its own result."""
    b = RuleBuilder()
    tensors = [b.factors(shape) for shape in op.operands]
    return b.rule(operands=tensors, results=tensors, follows=True, linear=True)


@register("sharding_constraint")
def sharding_constraint(op: OpShapes) -> Rule:
    """What the user pinned stays pinned; with dimensions left open (UNCONSTRAINED) it follows its operand."""
    sharding = op.params["sharding"]
    if not isinstance(sharding, NamedSharding) or op.params.get("unconstrained_dims"):
        return pairs(op)
    dims = _dims(sharding.spec, len(op.operands[0]))
    free = pairs(op)
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


def _dims(spec: Any, rank: int) -> FixedDims:
    entries = [
        () if e is None or e is PartitionSpec.UNCONSTRAINED else (e,) if isinstance(e, str) else tuple(e)
        for e in spec
    ]
    return tuple(entries + [()] * (rank - len(entries)))
