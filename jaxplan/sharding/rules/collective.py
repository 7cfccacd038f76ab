"""What a step says about its own sharding, and fences between operations."""

from __future__ import annotations

from ..rule import OpShapes, Rule, RuleBuilder
from .registry import register, replicated


@register(
    "sharding_constraint",
    "layout_constraint",
    "optimization_barrier",
    "device_put",
    "pvary",
    "reshard",
    "tie",
)
def pairs(op: OpShapes) -> Rule:
    """`([i],[j,k])->([i],[j,k])`: every operand with its own result; `tie` hands on its last operand."""
    b = RuleBuilder()
    operands = [b.factors(shape) for shape in op.operands]
    results = operands[len(operands) - len(op.results) :]
    return b.rule(operands=operands, results=results, follows=True, linear=op.primitive != "tie")


@register("shard_map")
def shard_map(op: OpShapes) -> Rule:
    """Everything whole: its body is written for the layout that its own specs demand."""
    return replicated(op, note="shard_map keeps the layout it was written with: replicated outside")
