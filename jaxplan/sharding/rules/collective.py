"""What a step says about its own sharding, and fences between operations."""

from __future__ import annotations

from ..rule import OpShapes, Rule, RuleBuilder
from .registry import register, replicated


@register(
    "sharding_constraint",
    "layout_constraint",
    "optimization_barrier",
    "device_put",
)
def pairs(op: OpShapes) -> Rule:
    """`([i],[j,k])->([i],[j,k])`: every operand with its own result."""
    b = RuleBuilder()
    tensors = [b.factors(shape) for shape in op.operands]
    return b.rule(operands=tensors, results=tensors, follows=True, linear=True)


@register("shard_map")
def shard_map(op: OpShapes) -> Rule:
    """Everything whole: its body is written for the layout that its own specs demand."""
    return replicated(op, note="shard_map keeps the layout it was written with: replicated outside")
